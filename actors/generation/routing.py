"""Experts that an engine chose for the tokens of a sample (R3), from its answer to the rollout (pure).

Always true: what was chosen for a token when it was first read is kept; who reads it again, after an update or on another
worker, adds only what is not known. Rows are those of prompt and response from the first token on, without gaps; the last token is
never read.
"""

from __future__ import annotations

import msgspec

from actors.runtime.prompts import RoutedShape
from bus.errors import UNREADABLE
from bus.messages.samples import Routed


def read_routed(raw: msgspec.Raw, shape: RoutedShape) -> Routed | None:
    """SGLang's form, base64 of int32 [n, layers, top-k], as ours; numbers that do not fit become the largest, which is no expert.
    None for what cannot be read."""
    import numpy as np  # the launcher reads this file too, and loads none

    try:
        numbers = np.frombuffer(msgspec.json.decode(raw, type=bytes), dtype="<i4")
    except (*UNREADABLE, ValueError):
        return None
    n, rest = divmod(numbers.size, shape.width)
    if rest or not n:
        return None
    most = np.iinfo(np.int16).max if shape.wide else np.iinfo(np.uint8).max
    fits = np.where((numbers < 0) | (numbers > most), most, numbers).astype("<i2" if shape.wide else "u1")
    return Routed(data=memoryview(fits.tobytes()), n=n, wide=shape.wide)


class Rows:
    """What is known of one sequence so far."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.n = 0
        self._wide = False

    def add(self, found: Routed, first: int, end: int | None = None) -> None:
        """Rows [first, first + found.n) of the sequence, of which those up to `end` are wanted. What is known stays, what would
        leave a gap, or has rows of another size, is left out."""
        size = len(found.data) // found.n if found.n else 0
        stop = first + found.n if end is None else min(end, first + found.n)
        if not size or first < 0 or first > self.n or stop <= self.n or (self.n and size != len(self._data) // self.n):
            return
        self._data += found.data[(self.n - first) * size : (stop - first) * size]
        self.n, self._wide = stop, found.wide

    def routed(self, end: int | None = None) -> Routed | msgspec.UnsetType:
        """The first `end` rows, as far as they are known, for a message; UNSET for none."""
        n = self.n if end is None else min(end, self.n)
        if not n:
            return msgspec.UNSET
        return Routed(data=memoryview(bytes(self._data[: n * (len(self._data) // self.n)])), n=n, wide=self._wide)
