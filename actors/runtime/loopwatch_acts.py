"""What the watch over an event loop does once the loop stands (loopwatch_child.py hears that it does, and loads this only then).

The loop is named in the log of the process; its leases are kept meanwhile, so that what it works on walks to nobody else; at its
deadline the process is killed, and what it held goes on elsewhere, but for the death that is counted against what it was at.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

SHOW = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""A process of ours that is sent this writes the Python stack of each thread, whatever it is in, and goes on."""
ROWS, ROW_BYTES = 65, 512  # of the memory that is shared: one row per thread, the loop's is the first
TELL_S = 5.0  # of standing still, then it is said
LOAD_S = 600.0  # for a library that is being loaded: from a network it takes minutes, and Python waits for it in C
SHOWN_S, GONE_S, SETTLE_S = 3.0, 30.0, 20.0  # for the stacks to be written; the process to end; the bus to be told
LEAST_S = 0.05  # over which processors' time says anything
PLACES = 3  # innermost lines that are named
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "([^"]*)", line (\d+)')
FATAL = "Fatal Python error: "


class Told(msgspec.Struct, frozen=True):
    """What a watch is told first. `thread`: the loop's, as Python's stacks name it; `rows`, `stacks`: files that it inherited;
    `bus`: how to reach it."""

    name: str
    pid: int
    thread: int
    deadline_s: float
    bus: dict[str, Any]
    rows: int
    stacks: int


class Reads(msgspec.Struct, frozen=True):
    """What the process holds entries of, and as whom."""

    streams: list[str]
    readers: str
    me: str


class Work(msgspec.Struct, frozen=True):
    """An entry that is worked on. `name`: of its sample, else its stream and id: it stays when the entry moves on."""

    stream: str
    id: str
    name: str


class Row(msgspec.Struct, frozen=True):
    """For whom a thread runs, by the kernel's id of the thread."""

    thread: int
    work: Work


def places(stacks: str, thread: int) -> str:
    """The innermost lines of a thread in stacks that Python wrote, as `file:line < file:line` (pure)."""
    found: list[str] = []
    ours = False
    for line in stacks.splitlines():
        if head := _THREAD.match(line):
            ours = int(head[1], 16) == thread
        elif ours and (frame := _FRAME.match(line)) and len(found) < PLACES:
            found.append(f"{os.path.basename(frame[1])}:{frame[2]}")
    return " < ".join(found) or "a place that Python cannot tell"


def loads(stacks: str) -> bool:
    """Whether a thread loads a library (pure): the loader is among its innermost lines."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    return any("<frozen importlib._bootstrap" in frame for block in blocks for frame in block.splitlines()[1:4])


def blamed(rows: Sequence[Row | None], burnt: dict[int, float], stood_s: float) -> Work | None:
    """Whose code holds the loop up (pure): that of the thread that computed for most of the time, else what the loop itself is in.
    None: nobody's that is known. `burnt`: seconds of processor since the loop stands, by thread."""
    busiest = max(burnt, key=lambda thread: burnt[thread], default=0)
    if burnt.get(busiest, 0.0) >= stood_s / 2:
        return next((row.work for row in rows if row is not None and row.thread == busiest), None)
    return rows[0].work if rows and rows[0] is not None else None


def watch_of(line: bytes) -> Watch:
    """By the first line that the process said."""
    return Watch(msgspec.json.decode(line, type=Told))


class Watch:
    """One process's, once its loop stood still. Seconds are of standing still, as the child counts them."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._reads: dict[tuple[str, str], Reads] = {}
        self._burnt_before = self._cpu()
        self._began_s = 0.0  # stood at `_burnt_before`
        self._stood_s = 0.0
        self._is_told = False
        self._renewed_at = 0.0  # or it turned then
        self._allowed_s = told.deadline_s
        self._runner = asyncio.Runner()
        self._bus: Any = None

    def hears(self, line: bytes) -> None:
        """What the process reads."""
        heard = msgspec.json.decode(line, type=Reads)
        self._reads[heard.readers, heard.me] = heard

    def turned(self) -> None:
        """The loop goes on."""
        if self._is_told:
            self._say("WARNING", f"the event loop goes on after {self._stood_s:.3g} s")
        self._stood_s, self._is_told, self._renewed_at = 0.0, False, time.monotonic()
        self._allowed_s = self._told.deadline_s

    def stands(self, stood_s: float) -> bool:
        """It has stood for so long. True: the process is ended."""
        if not self._stood_s:
            self._burnt_before, self._began_s = self._cpu(), stood_s
        self._stood_s = stood_s
        lease_s = float(self._told.bus.get("lease_s", 6.0))
        if time.monotonic() - self._renewed_at >= lease_s / 5:  # leases end by the clock on the wall
            self._renewed_at = time.monotonic()
            self._on_bus(self._keep, lease_s)
        if not self._is_told and stood_s >= min(TELL_S, self._told.deadline_s / 2):
            self._is_told = True
            place = places(self._stacks(), self._told.thread)
            hint = "what blocks in a rollout program belongs into session.tell"
            self._say("WARNING", f"the event loop stands still for {stood_s:.3g} s at {place}: {hint}")
        return stood_s >= self._allowed_s and self._ends()

    def _ends(self) -> bool:
        """The deadline is over: the process is killed, unless it is seen to load a library."""
        told, stacks = self._told, self._stacks()
        if loads(stacks) and self._stood_s < LOAD_S:
            self._allowed_s = self._stood_s + told.deadline_s
            return False
        if select.select([0], [], [], 0)[0]:  # it turned meanwhile
            return False
        work = self._blamed()
        place = places(stacks, told.thread)
        why = f"the event loop of {told.name} stood still for {self._stood_s:.3g} s at {place}"
        sys.stderr.write(stacks if stacks.endswith("\n") else f"{stacks}\n")
        about = f", with {work.name}" if work is not None else ""
        self._say("ERROR", f"{why}{about}: this process is ended, what it held goes on elsewhere (--loop-deadline-s)")
        with suppress(ProcessLookupError):
            os.kill(told.pid, signal.SIGKILL)
        return self._settle(work, why)

    def ended(self) -> None:
        """The process has ended without a word: by a crash of its own, if Python could still write what it was in."""
        stacks = self._written()
        if FATAL not in stacks:
            return
        sys.stderr.write(stacks)
        what = stacks.partition(FATAL)[2].partition("\n")[0]
        why = f"{self._told.name} crashed, {what}, at {places(stacks, self._told.thread)}"
        self._say("ERROR", f"{why}: what it held goes on elsewhere")
        self._settle(self._blamed(), why)

    def _settle(self, work: Work | None, why: str) -> bool:
        until = time.monotonic() + GONE_S
        while os.getppid() == self._told.pid and time.monotonic() < until:
            time.sleep(0.02)
        if os.getppid() == self._told.pid:
            self._say("ERROR", f"process {self._told.pid} does not die of SIGKILL; look at it with ps. What it holds stays its own")
            return True
        self._on_bus(lambda bus: self._let_go(bus, work, why), SETTLE_S)
        return True

    # -- the process --------------------------------------------------------------------------------------------

    def _cpu(self) -> dict[int, float]:
        """Seconds of processor by thread."""
        found: dict[int, float] = {}
        with suppress(OSError):
            for task in Path(f"/proc/{self._told.pid}/task").iterdir():
                with suppress(OSError, IndexError, ValueError):
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                    found[int(task.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def _stacks(self) -> str:
        """What each thread is in now."""
        stacks = self._told.stacks
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        try:
            os.kill(self._told.pid, SHOW)
        except ProcessLookupError:
            return ""
        until, before = time.monotonic() + SHOWN_S, ""
        while time.monotonic() < until:
            time.sleep(0.05)
            if (written := self._written()) and written == before:
                break
            before = written
        return before

    def _written(self) -> str:
        size = os.fstat(self._told.stacks).st_size
        return os.pread(self._told.stacks, min(size, 1 << 20), 0).decode(errors="replace")

    def _blamed(self) -> Work | None:
        now = self._cpu()
        burnt = {thread: cpu_s - self._burnt_before.get(thread, 0.0) for thread, cpu_s in now.items()}
        return blamed([*self._rows()], burnt, max(self._stood_s - self._began_s, LEAST_S))

    def _rows(self) -> Iterator[Row | None]:
        content = os.pread(self._told.rows, ROWS * ROW_BYTES, 0)
        for at in range(0, len(content), ROW_BYTES):
            text = content[at : at + ROW_BYTES].partition(b"\0")[0]
            try:
                yield msgspec.json.decode(text, type=Row) if text else None
            except msgspec.MsgspecError:
                yield None

    def _say(self, level: str, text: str) -> None:
        """As the process itself logs."""
        now = time.time()
        at = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03d}"
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{at} {self._told.name} {level} {text}\n")
            sys.stderr.flush()

    # -- the bus ------------------------------------------------------------------------------------------------

    def _on_bus(self, does: Callable[[Any], Coroutine[Any, Any, None]], within_s: float) -> None:
        """Its client is loaded when it is needed, since most watches never do; the connection stays: on a busy machine to make one
        anew for each renewal is what keeps it busy."""
        if not self._reads:
            return
        from bus.errors import MilesAsyncError

        try:
            self._runner.run(self._asked(does, within_s))
        except (MilesAsyncError, OSError, TimeoutError) as error:
            why = error if str(error) else f"no answer within {within_s:.3g} s"
            self._say("WARNING", f"the bus was not told that the event loop stands still: {why}")

    async def _asked(self, does: Callable[[Any], Coroutine[Any, Any, None]], within_s: float) -> None:
        from bus import Bus, BusConfig

        try:
            async with asyncio.timeout(within_s):
                if self._bus is None:
                    config = msgspec.convert({**self._told.bus, "deadline_s": within_s}, BusConfig)
                    self._bus = await Bus(config).__aenter__()
                await does(self._bus)
        except BaseException:
            bus, self._bus = self._bus, None
            if bus is not None:
                with suppress(Exception):  # whatever it is in: the next is a new one
                    async with asyncio.timeout(1.0):
                        await bus.__aexit__(None, None, None)
            raise

    async def _keep(self, bus: Any) -> None:
        from bus.streams.absent import held_by, keep_leases

        for one in self._reads.values():
            await keep_leases(bus, await held_by(bus, one.streams, one.readers, one.me), one.readers, one.me)

    async def _let_go(self, bus: Any, work: Work | None, why: str) -> None:
        from bus.streams.absent import count_death, held_by, let_go

        held = [await held_by(bus, one.streams, one.readers, one.me) for one in self._reads.values()]
        blamed = (work.stream, work.id) if work is not None else ("", "")
        if work is not None:
            await count_death(bus, work.name, why)
        for one, entries in zip(self._reads.values(), held, strict=True):
            await let_go(bus, entries, one.readers, one.me, blamed=blamed)
