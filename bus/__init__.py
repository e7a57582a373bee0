"""The ground floor: what travels between actors and where it lies. Imports only the standard library, msgspec and redis."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bus.clock import Clock, SystemClock
    from bus.streams.entry import Commit, Entry, Guard, Out
    from bus.streams.reader import Reader, Tail
    from bus.streams.redis import Bus, BusConfig
    from bus.topology import BY_NAME, STREAMS, Stream

_HOMES = {
    "bus.clock": ("Clock", "SystemClock"),
    "bus.streams.entry": ("Commit", "Entry", "Guard", "Out"),
    "bus.streams.reader": ("Reader", "Tail"),
    "bus.streams.redis": ("Bus", "BusConfig"),
    "bus.topology": ("BY_NAME", "STREAMS", "Stream"),
}
__all__ = ("BY_NAME", "STREAMS", "Bus", "BusConfig", "Clock", "Commit", "Entry", "Guard", "Out", "Reader", "Stream",
           "SystemClock", "Tail")  # fmt: skip


def __getattr__(name: str) -> Any:
    """A home is loaded when it is asked for: who needs no server does without redis-py, whose import takes longer than all else."""
    home = next((home for home, names in _HOMES.items() if name in names), "")
    if not home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
