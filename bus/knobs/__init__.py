"""Live settings: how a change reaches everyone while a run goes on."""

from bus.knobs.kinds import checked, range_text
from bus.knobs.live import (
    KnobDifference,
    KnobValues,
    LiveKnobs,
    propose,
    publish_initial,
    read_history,
    revert,
    values_at,
)

__all__ = (
    "KnobDifference",
    "KnobValues",
    "LiveKnobs",
    "checked",
    "propose",
    "publish_initial",
    "range_text",
    "read_history",
    "revert",
    "values_at",
)
