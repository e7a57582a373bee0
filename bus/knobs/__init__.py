"""Live settings: how a change reaches everyone while a run goes on."""

from bus.knobs.kinds import range_text
from bus.knobs.live import propose, values_at

__all__ = ("propose", "range_text", "values_at")
