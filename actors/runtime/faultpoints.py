"""Named places where a test may kill the process, so that every protocol step can be the last one.

MILES_ASYNC_FAULT="<actor>:<point>:<nth>:<signal>" arms one place: at its nth visit the actor gets the signal (KILL or
STOP). MILES_ASYNC_FAULT_ONCE names a file that is created just before, so that the restarted actor is not hit again.
Unarmed, a visit costs one comparison.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


class _Armed:
    def __init__(self, actor: str, point: str, nth: int, signal_name: str, once: str) -> None:
        self.actor, self.point, self.nth, self.signal, self.once = actor, point, nth, _SIGNALS[signal_name], once
        self.visits = 0


def _read_environment() -> _Armed | None:
    text = os.environ.get("MILES_ASYNC_FAULT", "")
    if not text:
        return None
    actor, point, nth, signal_name = text.split(":")
    return _Armed(actor, point, int(nth), signal_name, os.environ.get("MILES_ASYNC_FAULT_ONCE", ""))


_armed = _read_environment()


def fault_point(actor: str, point: str) -> None:
    """A place where this actor may be killed by a test."""
    if _armed is None or _armed.point != point or not actor.startswith(_armed.actor):
        return
    _armed.visits += 1
    if _armed.visits != _armed.nth:
        return
    if _armed.once:
        if Path(_armed.once).exists():
            return
        Path(_armed.once).touch()
    os.kill(os.getpid(), _armed.signal)
