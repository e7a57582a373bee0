"""The ground floor: what travels between actors and where it lies. Imports only the standard library, msgspec and redis."""

from bus.clock import Clock, SystemClock
from bus.streams.entry import Commit, Entry, Guard, Out
from bus.streams.reader import Reader, Tail
from bus.streams.redis import Bus, BusConfig
from bus.topology import BY_NAME, STREAMS, Stream

__all__ = ("BY_NAME", "STREAMS", "Bus", "BusConfig", "Clock", "Commit", "Entry", "Guard", "Out", "Reader", "Stream",
           "SystemClock", "Tail")  # fmt: skip
