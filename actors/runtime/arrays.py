"""Whether arrays hold token ids and log-probabilities (pure): what a message or an engine brings is looked at first.

Packed arrays are long and nearly always fine, so they are first looked at whole, and one by one only to name what is wrong.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache, lru_cache

from bus.messages.base import Packed

LOGPROB_LOW, LOGPROB_HIGH = -1e30, 0.01  # outside of these a float32 log-probability is none; rounding may lift it above 0
INT32 = 1 << 31
MOST_LANES = 1 << 20  # bytes looked at as one number: what is kept to look with is as large


def _beyond(bound: float) -> int:
    """Bits of the first float32 above `bound`, which no float32 equals: its nearest one may itself be above."""
    nearest = struct.pack("<f", bound)
    return int.from_bytes(nearest, "little") + int(struct.unpack("<f", nearest)[0] < bound)


_TOO_LOW, _TOO_HIGH = _beyond(-LOGPROB_LOW), _beyond(LOGPROB_HIGH)


def ids_fault(packed: Packed, vocabulary: int) -> str:
    """Why packed int32 are no token ids."""
    if len(packed) % 4:
        return f"{len(packed)} bytes of token ids are no whole number of int32"
    return "" if ints_fit(packed, vocabulary) else tokens_fault(packed.cast("i").tolist(), vocabulary)


def floats_fault(packed: Packed) -> str:
    """Why packed float32 are no log-probabilities."""
    return "" if floats_fit(packed) else logprobs_fault(packed.cast("f").tolist())


def tokens_fault(ids: Sequence[int], vocabulary: int = 0) -> str:
    """Why these are no token ids."""
    if ids and (min(ids) < 0 or max(ids) >= (vocabulary or INT32)):
        bad = next(i for i in ids if not 0 <= i < (vocabulary or INT32))
        return f"token id {bad} is outside the vocabulary" + (f" of {vocabulary}" if vocabulary else "")
    return ""


def logprobs_fault(values: Sequence[float | None]) -> str:
    """Why these are no log-probabilities."""
    try:
        fine = not values or (min(values) > LOGPROB_LOW and max(values) <= LOGPROB_HIGH and math.isfinite(sum(values)))  # type: ignore
    except TypeError:  # None among them
        fine = False
    if fine:
        return ""
    return f"log-probability {next(v for v in values if v is None or not LOGPROB_LOW < v <= LOGPROB_HIGH)}"


def ints_fit(packed: Packed | bytes, vocabulary: int = 0) -> bool:
    """Whether each int32 can be a token id, without a look at one after the other: added to as many lanes of one large number,
    what is missing to 2**31 sets the lane's top bit where an id is too large; a negative one has it already."""
    if len(packed) > MOST_LANES:
        return all(ints_fit(packed[at : at + MOST_LANES], vocabulary) for at in range(0, len(packed), MOST_LANES))
    lanes, ids = _lanes(len(packed) // 4), int.from_bytes(packed, "little")
    return not (ids | ids + lanes * (INT32 - (vocabulary or INT32))) & (lanes << 31)


def floats_fit(packed: Packed | bytes) -> bool:
    """The same of float32 log-probabilities: without their signs, the bits of floats are ordered as the floats are."""
    if len(packed) > MOST_LANES:
        return all(floats_fit(packed[at : at + MOST_LANES]) for at in range(0, len(packed), MOST_LANES))
    lanes, bits = _lanes(len(packed) // 4), int.from_bytes(packed, "little")
    tops = lanes << 31
    negative = bits & tops
    sizes = bits ^ negative
    if sizes + lanes * (INT32 - _TOO_LOW) & tops:
        return False
    return negative == tops or not (sizes + lanes * (INT32 - _TOO_HIGH) & tops) & ~negative


@lru_cache(maxsize=16)  # chunks are of one size, mostly
def _lanes(n: int) -> int:
    """1 in each of `n` lanes of 32 bits."""
    power = (n - 1).bit_length() if n else 0
    return _power_of_lanes(power) >> 32 * ((1 << power) - n)


@cache
def _power_of_lanes(power: int) -> int:
    return int.from_bytes(b"\1\0\0\0" * (1 << power), "little")
