"""Keeps a run's actors, wherever they run: what follows when one ends. Where and how they are started is the placer's
(local.py: on this host, ray_placer.py: on a Ray cluster)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from actors.recorder.history import History
from actors.runtime.context import ActorSpec
from actors.runtime.deadline import within
from actors.runtime.drain import Patience, drained
from actors.runtime.run import EXIT_BUS_BACK, EXIT_BUS_GONE, EXIT_DRAINED, EXIT_NAME_TAKEN, EXIT_REFUSED, disk_text
from bus import Bus, Clock
from bus.errors import MilesAsyncError, printable
from bus.messages.events import EventKind
from miles_async.launcher.restart import QUICK_S, Ending, describe_exit, judge_exit

_LOG_HEAD = re.compile(r"^[\d-]+ [\d:,]+ \S+ [A-Z]+ (\w+: )?")  # time, name, level, class of the error
ASKED_S = 3.0  # by when the bus says how far the run was
FULL_S, START_S = 5.0, 600.0  # a full disk: between two tries to start an actor, and for how long the run does without one
HELD_S = 120.0  # for how long another process may have an actor's name, and this host no part in that
AGAIN_S = 1.0  # before an actor that lost its place through no fault of its own takes another


class RunFailed(Exception):
    """An actor could not be kept running; the text names the cause. `status`: 2 when what it was given is to blame, EXIT_BUS_BACK
    when the bus must be restored first, EXIT_BUS_GONE when it is away for good, else 1. `resumes`: the same command goes on."""

    def __init__(self, text: str, *, status: int, resumes: bool = True) -> None:
        super().__init__(text)
        self.status, self.resumes = status, resumes and status != EXIT_REFUSED


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended. `code`: None = nobody can tell; `lines`: the last of its log, which lies at `log`; `moved`: why it
    has to be placed anew through no fault of its own, else empty."""

    code: int | None
    lines: Sequence[str]
    log: str
    moved: str = ""


class Process(Protocol):
    """An actor's process, wherever it runs."""

    @property
    def alive(self) -> bool: ...

    def ask_to_end(self) -> None: ...

    async def stop(self, patience_s: float) -> bool:
        """End it, politely first; False when it had to be killed."""
        ...


class Placer(Protocol):
    """Where actors run, and how they are started there. `notes`: (kind, text) of everything an operator should know.

    Example, as the supervisor calls it for each actor between `open` and `close`:
        placer.add(spec)
        await placer.open()
        await placer.place(spec)                # returns at once where it has a place
        process = await placer.start(spec)
        end = await placer.end_of(spec, process)
        await placer.close()
    """

    notes: list[tuple[EventKind, str]]

    def add(self, spec: ActorSpec) -> None:
        """Know of an actor, before `open`; nothing is started."""
        ...

    async def place(self, spec: ActorSpec) -> None:
        """Return when there is a place for it, where it may take a scheduler long; may be cancelled and asked again."""
        ...

    async def start(self, spec: ActorSpec) -> Process:
        """Start it there, or adopt what an earlier launcher started with the same settings."""
        ...

    async def end_of(self, spec: ActorSpec, process: Process) -> End:
        """Wait for its end, and say how it ended: its exit code, its last lines, or that its place is gone."""
        ...

    async def open(self) -> None:
        """All are added: end those of an earlier launcher that were not. SettingsError when there is no place for what is
        needed."""
        ...

    async def follow(self, stop: asyncio.Event) -> None:
        """Watch over the places until the end."""
        ...

    async def close(self) -> None:
        """All have ended: give back what held their places."""
        ...


@dataclass(slots=True)
class Kept:
    """One actor in care: its spec, and the process that runs it now; None before the first."""

    spec: ActorSpec
    process: Process | None = None
    failures: list[Ending] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody starts it again, and its process has ended."""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive


async def furthest_step(bus: Bus, history: History) -> int:
    """The last training step that the run has ever made, as far as can be told within ASKED_S: the history of a busy launcher may
    be seconds behind, and knows of steps that a restore took back."""
    try:
        async with asyncio.timeout(ASKED_S):
            said = await bus.state_as("trainer", lambda text: int(text.partition(":")[0] or 0))
    except (MilesAsyncError, TimeoutError):
        said = 0
    return max(history.furthest, said)


class Supervisor:
    """Keeps a set of actors alive. `furthest`: asked for the last training step that the run has ever made."""

    def __init__(self, placer: Placer, clock: Clock, *, budget: int, furthest: Callable[[], Awaitable[int]]) -> None:
        self._placer = placer
        self._clock = clock
        self._budget = budget
        self._furthest = furthest
        self.kept: dict[str, Kept] = {}
        self.notes = placer.notes
        self._stopping = asyncio.Event()

    def add(self, spec: ActorSpec) -> None:
        """Take an actor into care; `watch` starts it."""
        self.kept[spec.name] = Kept(spec)
        self._placer.add(spec)

    async def watch(self, kept: Kept) -> None:
        """Start an actor and keep it until it is done; RunFailed when it cannot be kept."""
        try:
            await self._keep(kept)
        finally:
            kept.over.set()

    async def _keep(self, kept: Kept) -> None:
        name, role = kept.spec.name, kept.spec.role
        failed = ""  # how the life before this one failed
        full_since, told_full = 0.0, False
        held_since = 0.0
        while await self._unless_stopping(self._placer.place(kept.spec)):
            try:
                kept.process = await self._placer.start(kept.spec)
            except OSError as error:
                full = disk_text(error, (kept.spec.run_dir,))
                why = full or f"{error.strerror or error}: {error.filename}. Put back what is missing"
                full_since = full_since or self._clock.monotonic()
                left_s = START_S - (self._clock.monotonic() - full_since)
                if not full or (left_s <= 0 and not self._is_spared(kept)):
                    raise RunFailed(f"{name} cannot be started: {why}.", status=1) from None
                if not told_full:
                    text = f"{name} cannot be started, and is tried again until there is space: {why}"
                    self.notes.append((EventKind.RESTART, text))
                told_full = True
                await within(FULL_S, self._stopping)
                continue
            began, full_since, told_full = self._clock.monotonic(), 0.0, False
            if self._stopping.is_set():  # asked to drain while it started
                kept.process.ask_to_end()
            end = await self._placer.end_of(kept.spec, kept.process)
            before, failed = failed, ""
            if self._stopping.is_set():
                return
            if end.moved:
                self.notes.append((EventKind.MOVED, f"{name}: {end.moved}; it is placed anew"))
                await within(AGAIN_S, self._stopping)
                continue
            if end.code == EXIT_DRAINED:  # by somebody else, for the run goes on; or the launcher is about to hear the same wish
                await within(AGAIN_S, self._stopping)
                if not self._stopping.is_set():
                    text = f"{name} was asked to end (SIGTERM), and drained; the run goes on: restarting"
                    self.notes.append((EventKind.RESTART, text))
                continue
            now = self._clock.monotonic()
            if end.code == EXIT_NAME_TAKEN:  # by one that the placer finds where it looks again, or that is about to end
                if not held_since or now - began > QUICK_S:
                    held_since = now
                    self.notes.append((EventKind.RESTART, f"{name} is there already: {last_words(end.lines, name)}"))
                if now - held_since < HELD_S:
                    await within(AGAIN_S, self._stopping)
                    continue
                text = f"{name} is there already, and not on this host: {last_words(end.lines, name)}"
                raise RunFailed(f"{text} End that one (miles-async stop ends them all), then give the same command.", status=2)
            held_since = 0.0
            ending = Ending(now, end.code, await self._furthest() if role == "trainer" else 0)
            verdict = judge_exit(name, ending, kept.failures, self._budget, steps=role == "trainer", spared=self._is_spared(kept))
            if verdict.action == "done":
                return
            cause = last_words(end.lines, name if end.code is not None and end.code > 0 else "")
            if verdict.action == "give_up":
                status = end.code if end.code in (EXIT_REFUSED, EXIT_BUS_BACK, EXIT_BUS_GONE) else 1
                if end.code == EXIT_BUS_BACK:
                    raise RunFailed(cause, status=status)
                also = f" Before that it {before}." if before and end.code == EXIT_REFUSED else ""
                raise RunFailed(f"{verdict.reason}: {cause.rstrip('.')}.{also} Log: {end.log}", status=status)
            text = f"{name} {describe_exit(end.code)} after {now - began:.1f} s: {cause}; restarting"
            if verdict.action == "pause":
                ending = replace(ending, pause_s=verdict.after_s)
                text = f"{verdict.reason}: {cause}; tried again in {verdict.after_s:.0f} s, the run goes on without it"
            kept.failures = [*kept.failures[-64:], ending]
            failed = f"{describe_exit(end.code)}: {cause.rstrip('.')}"
            self.notes.append((EventKind.RESTART, text))
            await within(verdict.after_s, self._stopping)

    async def _unless_stopping(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` was done; it is cancelled when the run ends before."""
        doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            if not self._stopping.is_set():
                await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return doing.done() and not self._stopping.is_set()
        finally:
            doing.cancel()
            stopping.cancel()

    def _is_spared(self, kept: Kept) -> bool:
        """Whether the run can miss it for a while: peers do the same work now, or, of the recorder, what it has not written
        stays on the bus."""
        peers = [k for k in self.kept.values() if k.spec.role == kept.spec.role and k is not kept]
        return kept.spec.role == "recorder" or any(peer.alive for peer in peers)

    async def drain(self, *, timeout_s: float, finishes: Callable[[str], Awaitable[str]], records: bool = True) -> list[str]:
        """SIGTERM to all, then SIGKILL to those that do not end in time; returns the names of the latter. The recorder goes
        last, and has the others' last words on record then; where there is no bus for these (`records`), with them. `finishes`:
        asked by name what an actor says that it finishes; some of that is waited for beyond `timeout_s` (drain.py)."""
        self._stopping.set()
        late: list[str] = []
        for last in (False, True):
            now = [k for k in self.kept.values() if (records and k.spec.role == "recorder") == last]
            living = {k.spec.name: k for k in now if not k.over.is_set()}
            obeyed = await asyncio.gather(*(self._end(name, k, timeout_s, finishes) for name, k in living.items()))
            late += [name for name, in_time in zip(living, obeyed, strict=True) if not in_time]
        return late

    async def _end(self, name: str, kept: Kept, timeout_s: float, finishes: Callable[[str], Awaitable[str]]) -> bool:
        if not kept.alive or kept.process is None:
            return True
        kept.process.ask_to_end()
        now = self._clock.monotonic
        in_time = await drained(kept.over.wait(), Patience(timeout_s, now()), now, partial(finishes, name))
        await kept.process.stop(0.0)  # what is left of it
        return in_time


def last_words(lines: Sequence[str], name: str = "") -> str:
    """Last meaningful line of an actor's log, of which these are the last. `name`: of an actor that ended by itself; the error
    that it told counts then, whatever libraries said while the process went down."""
    told = [line for line in lines[-40:] if name and re.match(rf"[\d-]+ [\d:,]+ {re.escape(name)} ERROR ", line)]
    for line in reversed(told or lines[-40:]):
        if not line.startswith((" ", "  |", "Traceback", "During handling")):
            return printable(_LOG_HEAD.sub("", line.strip())[:600])
    return "no log line"


def environment_of(role: str, threads: Mapping[str, int]) -> dict[str, str]:
    """What every actor's process has in its environment. `threads`: CPU threads by role, else one."""
    count = str(threads.get(role, 1))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
