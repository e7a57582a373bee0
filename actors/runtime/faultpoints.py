"""Named places where a test may kill the process, so that every protocol step can be the last one.

MILES_ASYNC_FAULT="<actor>:<point>:<nth>:<signal>,..." arms places: at the nth visit of one its actor gets the signal (KILL or
STOP). MILES_ASYNC_FAULT_ONCE names a folder in which each fault leaves a file just before it strikes, so that the restarted
actor is not hit by it again. Unarmed, a visit costs one call.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path

_SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
_visits: Counter[tuple[str, ...]] = Counter()


@cache
def _armed() -> list[tuple[str, ...]]:
    return [tuple(fault.split(":")) for fault in os.environ.get("MILES_ASYNC_FAULT", "").split(",") if fault]


def fault_point(actor: str, point: str) -> None:
    """A place where this actor may be killed by a test."""
    for fault in _armed():
        wanted, where, nth, number = fault
        if where != point or not actor.startswith(wanted):
            continue
        _visits[fault] += 1
        if _visits[fault] != int(nth):
            continue
        if once := os.environ.get("MILES_ASYNC_FAULT_ONCE"):
            if (struck := Path(once) / ":".join(fault)).exists():
                continue
            struck.touch()
        os.kill(os.getpid(), _SIGNALS[number])
