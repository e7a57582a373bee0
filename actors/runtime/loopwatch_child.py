"""`loopwatch_child.py PID DEADLINE_S LEASE_S STACKS`: watches over the event loop of the process that started it, from outside.

Hears on stdin, a line each: first what it watches, then an empty line whenever the loop turns, what the process reads, and `bye`.
What is done about a loop that stands is in loopwatch_acts.py.

Always true: time counts only while the process could have run. One that is stopped, traced or suspended with its host stands still
through no fault of its own, and one that waits for a core is given what it gets.

It is run by its path and without site packages, and imports nothing but what the interpreter is made of: every actor has one, and
most never see their loop stand (a tenth of the time and half of the memory of a process that loads msgspec and asyncio).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` takes as long to load as all the rest
if TYPE_CHECKING:
    from actors.runtime.loopwatch_acts import Watch


class Look:
    """The loop's thread: its state as proc(5) has it, and seconds of processor so far."""

    def __init__(self, state: str, cpu_s: float) -> None:
        self.state, self.cpu_s = state, cpu_s


def look_at(pid: int) -> Look:
    """Now; where the kernel does not tell, all time counts."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return Look(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return Look("S", 0.0)


def counted(before: Look, now: Look, step_s: float) -> float:
    """Seconds of a look for which the loop is to blame (pure)."""
    if now.state in "TtXZ":  # stopped, traced, ended
        return 0.0
    if now.state == "R":  # it computes, or waits for a core
        return min(step_s, now.cpu_s - before.cpu_s)
    return step_s


class Ear:
    """Counts for how long the loop of `pid` stands still. `stacks`: the file in which that process leaves its stacks."""

    def __init__(self, pid: int, deadline_s: float, lease_s: float, stacks: int) -> None:
        self._pid, self._stacks = pid, stacks
        self._step_s = max(0.05, min(1.0, deadline_s / 20))
        self._acts_s = min(lease_s / 5, deadline_s / 4)  # by the clock on the wall, as leases are; then they are to be kept
        self._said: list[bytes] = []  # by the process; the first line is what is watched
        self._buffer = b""
        self._before = look_at(pid)
        self._stood_s, self._turned_at, self._looked_at = 0.0, time.monotonic(), time.monotonic()
        self._most_s = max(self._step_s, deadline_s / 4)  # that one look counts for: we may have been stopped ourselves
        self._watch: Watch | None = None

    def run(self) -> None:
        """Until the process ends, or needs no watch any more."""
        while True:
            ready, _, _ = select.select([0], [], [], self._step_s)
            if ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return self._ended()
                if self._hear(data):
                    return None
                self._turned()
                continue
            if os.getppid() != self._pid:  # what it started holds the pipe open
                return self._ended()
            if self._stands():
                return None

    def _hear(self, data: bytes) -> bool:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == b"bye":
                return True
            if line:
                self._said.append(line)
                if self._watch is not None:
                    self._watch.hears(line)
        return False

    def _turned(self) -> None:
        if self._watch is not None:
            self._watch.turned()
        self._before, self._stood_s = look_at(self._pid), 0.0
        self._turned_at = self._looked_at = time.monotonic()

    def _stands(self) -> bool:
        now, at = look_at(self._pid), time.monotonic()
        more_s = counted(self._before, now, min(at - self._looked_at, self._most_s))  # to act may have taken seconds
        self._before, self._looked_at = now, at
        self._stood_s += more_s
        if more_s == 0.0 and now.state != "R":
            return False
        late = time.monotonic() - self._turned_at >= self._acts_s  # also while it waits for a core
        return late and self._acting().stands(self._stood_s)

    def _ended(self) -> None:
        if self._said and os.fstat(self._stacks).st_size:  # else it left no word, so it was killed
            self._acting().ended()

    def _acting(self) -> Watch:
        """Loaded when it is needed, with the site packages."""
        if self._watch is None:
            import site

            site.main()
            here = os.path.abspath(__file__)
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(here))))  # where nothing else leads to us
            from actors.runtime.loopwatch_acts import watch_of

            first, *others = self._said
            self._watch = watch_of(first)
            for line in others:
                self._watch.hears(line)
        return self._watch


def main() -> None:
    """Until the watched process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid, deadline_s, lease_s, stacks = sys.argv[1:]
    Ear(int(pid), float(deadline_s), float(lease_s), int(stacks)).run()


if __name__ == "__main__":
    main()
