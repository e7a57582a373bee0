"""What a hook started, ended with the verifier it came from.

While the verifier lives, all of it is below it: it adopts what loses its parent. Once it has ended by itself, what took a session
of its own is found by a variable that it inherits; only a process that cleared its environment as well escapes then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import psutil

MARK = "MILES_ASYNC_VERIFIER"


def new_mark() -> str:
    """For one verifier: who owns it (process id and start), and which one it is (names only, decides nothing)."""
    return f"{_owner()}:{uuid4().hex}"


def end_below(pid: int) -> None:
    """SIGKILL to all that is below a living verifier, until nothing is; the verifier goes on."""
    for _ in range(10):  # one of them may have started another meanwhile
        try:
            below = [p for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        except psutil.Error:
            return
        if not below:
            return
        for process in below:
            with suppress(psutil.Error):
                process.kill()


def end_marked(mark: str) -> int:
    """SIGKILL to all processes with this mark, until none is found; returns how many."""
    return _end(lambda found: found == mark)


def end_orphans() -> int:
    """The same for those whose actor is gone: it was killed, and could not end them itself."""
    alive: dict[str, bool] = {}

    def is_orphan(found: str) -> bool:
        owner = found.rpartition(":")[0]
        return not alive.setdefault(owner, owner == _owner(owner.partition(":")[0]))

    return _end(is_orphan)


def _owner(pid: str = "") -> str:
    try:
        process = psutil.Process(int(pid or os.getpid()))
        return f"{process.pid}:{process.create_time():.2f}"
    except (psutil.Error, ValueError):
        return ""


def _end(which: Callable[[str], bool]) -> int:
    ended: set[int] = set()
    for _ in range(10):  # one of them may have started another meanwhile
        found = [p for p in psutil.process_iter() if p.pid != os.getpid() and _is(p, which) and p.pid not in ended]
        for process in found:
            try:
                process.kill()
            except psutil.Error:
                continue
        if not found:
            break
        ended |= {process.pid for process in found}
    return len(ended)


def _is(process: psutil.Process, which: Callable[[str], bool]) -> bool:
    try:
        mark = process.environ().get(MARK, "")  # of our own processes only: others' cannot be read
        return bool(mark) and which(mark) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False
