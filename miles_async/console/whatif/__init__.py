"""What a run would do under other settings: its own record, played through the rooms' own code in simulated time."""

from miles_async.console.whatif.compare import Comparison, compare, text
from miles_async.console.whatif.recorded import ASKED, Recorded, recorded, sound

__all__ = ("ASKED", "Comparison", "Recorded", "compare", "recorded", "sound", "text")
