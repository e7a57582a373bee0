"""What to do with an entry whose handling failed (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bus.errors import Transient


class NotItsFault(Transient):
    """It failed as everything does now: tried again, as often as need be, without counting against the entry."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`again` after `after_s`, `counted` as a further attempt or not; or `dead` letter."""

    action: Literal["again", "dead"]
    after_s: float = 0.0
    counted: bool = True


def decide(error: BaseException, *, attempt: int, most: int) -> Decision:
    """Transient failures are tried again with growing pauses, `most` attempts in all; everything else is poison."""
    after_s = min(5.0, 0.05 * 2 ** min(attempt, 10))
    if isinstance(error, NotItsFault):
        return Decision("again", after_s, counted=False)
    if isinstance(error, Transient) and attempt < most:
        return Decision("again", after_s)
    return Decision("dead")
