"""What code of the user's started, ended with the process that ran it: an actor, a verifier, an environment.

While a verifier or an environment lives, all of it is below it: it adopts what loses its parent. What took a session of its own
and outlived who started it is found by a variable that it inherits; only a process that cleared its environment as well, or was
forked by an actor and runs no other program, escapes then.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

from actors.runtime.child import is_alive
from actors.runtime.host import processes_name

MARK = "MILES_ASYNC_STARTED_BY"
GONE_S = 5.0  # for the kernel to end what was killed, on a busy machine


def new_mark() -> str:
    """For one process: who owns it (where its process id counts, the id, its start), and which one it is (a name only, that decides
    nothing)."""
    return f"{processes_name()}:{owner_of()}:{uuid4().hex}"


@asynccontextmanager
async def ends_with_us() -> AsyncIterator[None]:
    """What this process starts meanwhile is marked, and ends with the block; so does now what killed actors left on this host."""
    await asyncio.to_thread(end_orphans)
    mark = os.environ[MARK] = new_mark()
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
        await asyncio.to_thread(end_marked, mark)


def end_below(pid: int) -> None:
    """SIGKILL to all that is below a living process, until nothing is; the process goes on."""
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
    """SIGKILL to all processes with this mark, until none is found; returns how many, once they are gone."""
    return _end(lambda found: found == mark)


def end_orphans() -> int:
    """The same for those whose actor is gone: it was killed, and could not end them itself. Not of a container seen from outside:
    process ids are others there, and its living actors look gone."""
    alive: dict[str, bool] = {}

    def is_orphan(found: str) -> bool:
        where, _, owner = found.rpartition(":")[0].partition(":")
        return where == processes_name() and not alive.setdefault(owner, owner == owner_of(owner.partition(":")[0]))

    return _end(is_orphan)


def owner_of(pid: str | int = "") -> str:
    """A process by its id and start; empty when it is gone. By the kernel's own count where it is told: a time of day moves when
    the clock is set, and a living owner would look like another."""
    pid = str(pid or os.getpid())
    try:
        return f"{pid}:{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        pass
    try:
        return "" if os.path.exists("/proc/self/stat") else f"{pid}:{psutil.Process(int(pid)).create_time():.2f}"
    except (psutil.Error, ValueError):
        return ""


def _end(which: Callable[[str], bool]) -> int:
    ended: set[int] = set()
    for _ in range(10):  # one of them may have started another meanwhile
        found = [p for p in _with_marks() if p.pid != os.getpid() and _is(p, which) and p.pid not in ended]
        for process in found:
            try:
                process.kill()
            except psutil.Error:
                continue
        if not found:
            break
        ended |= {process.pid for process in found}
    until = time.monotonic() + GONE_S
    while time.monotonic() < until and any(map(is_alive, ended)):  # whoever is told that they are gone may look
        time.sleep(0.005)
    return len(ended)


def _with_marks() -> Iterator[psutil.Process]:
    """Processes that may have a mark: on Linux, where each is looked at in 20 us, those that have one."""
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            path = f"/proc/{pid}/environ"
            if not os.path.exists("/proc/self/environ") or f"{MARK}=".encode() in Path(path).read_bytes():
                yield psutil.Process(pid)


def _is(process: psutil.Process, which: Callable[[str], bool]) -> bool:
    try:
        mark = process.environ().get(MARK, "")  # of our own processes only: others' cannot be read
        return bool(mark) and which(mark) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False
