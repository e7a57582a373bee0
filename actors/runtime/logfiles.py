"""Log files with a bound: a hook that prints without end fills no disk.

A log keeps its beginning, where a fault is first told, and its end; what is left out between them is told by one line there.
Always true: a process that has the file open to append goes on to write to it. A line that is written in the very moment in which a
log is shortened may be lost with those that are left out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

from actors.runtime.deadline import within

MOST = 64 << 20  # bytes of one log
FIRST, LAST = 8 << 20, 8 << 20  # of these, what stays of one that is longer
LOOK_S = 5.0
_WHERE = ("*.log", "*/*.log", "*/*/*.log")


def shorten(log: Path, *, most: int = MOST, first: int = FIRST, last: int = LAST) -> int:
    """Leave out the middle of a log of more than `most` bytes, in whole lines where it has lines; how many bytes. OSError."""
    if log.stat().st_size <= most:
        return 0
    with log.open("r+b", buffering=0) as file:
        beginning = file.read(first)
        head = beginning.rfind(b"\n") + 1 or len(beginning)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(head, size - last))
        ending = file.read(size - file.tell())
        tail = ending[ending.find(b"\n") + 1 :]
        left_out = size - head - len(tail)
        file.truncate(head)
    with log.open("ab", buffering=0) as file:  # in one call: others append meanwhile
        file.write(b"[%d bytes are left out here: a log has at most %d]\n%b" % (left_out, most, tail))
    return left_out


def logs_of(run_dir: Path) -> Iterator[Path]:
    """Logs of a run's actors, engines, ranks and Redis, as far as they lie in its folder."""
    for pattern in _WHERE:
        yield from run_dir.glob(pattern)


async def keep_short(run_dir: Path, stop: asyncio.Event) -> None:
    """Shorten the logs of a run until it stops; woken by time or the end."""
    while not await within(LOOK_S, stop):
        await asyncio.to_thread(all_short, run_dir)


def all_short(run_dir: Path) -> None:
    """Shorten each log that is too long, now."""
    for log in logs_of(run_dir):
        try:
            shorten(log)
        except OSError:
            continue  # tidied up, or the disk is full: the next look may do
