"""What to do with an entry whose handling failed (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bus.errors import InvariantBroken, Transient


@dataclass(frozen=True, slots=True)
class Decision:
    """`again` after `after_s`, `dead` letter, or `stop` the process."""

    action: Literal["again", "dead", "stop"]
    after_s: float = 0.0


def decide(error: BaseException, *, deliveries: int, max_deliveries: int) -> Decision:
    """Transient failures are tried again with growing pauses while deliveries last; broken invariants stop the process;
    everything else is poison."""
    if isinstance(error, InvariantBroken):
        return Decision("stop")
    if isinstance(error, Transient) and deliveries < max_deliveries:
        return Decision("again", after_s=min(5.0, 0.05 * 2**deliveries))
    return Decision("dead")


__all__ = ("Decision", "decide")
