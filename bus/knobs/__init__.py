"""Live settings: what may be turned while a run goes on, and how a turn reaches everyone."""

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
from bus.knobs.table import FACTS, KNOBS, Fact, Knob, check_whole

__all__ = (
    "FACTS",
    "KNOBS",
    "Fact",
    "Knob",
    "KnobDifference",
    "KnobValues",
    "LiveKnobs",
    "check_whole",
    "propose",
    "publish_initial",
    "read_history",
    "revert",
    "values_at",
)
