"""What a run would do under other settings: its own record, played through the rooms' own code in simulated time."""

from miles_async.console.whatif.comparison import compare, text
from miles_async.console.whatif.record import recorded, sound
from miles_async.console.whatif.setup import ASKED

__all__ = ("ASKED", "compare", "recorded", "sound", "text")
