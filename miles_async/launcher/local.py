"""Processes of a run on this host: started, watched, restarted, stopped by pid.

Each actor is a process of its own session, so that Ctrl-C reaches the launcher alone, and survives the launcher: a
launcher that was killed and started again adopts those that still run, recognised by their spec file's path.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from actors.runtime.child import PYTHON, Child, log_tail
from actors.runtime.context import ActorSpec
from actors.runtime.fork_server import ForkServer
from actors.runtime.run import EXIT_BUS_BACK, EXIT_REFUSED
from bus import Clock
from bus.errors import printable
from bus.private import write_secret
from miles_async.launcher.restart import Ending, describe_exit, judge_exit

_LOG_HEAD = re.compile(r"^[\d-]+ [\d:,]+ \S+ [A-Z]+ (\w+: )?")  # time, name, level, class of the error


class RunFailed(Exception):
    """An actor could not be kept running; the text names the cause. `status`: 2 when what it was given is to blame, EXIT_BUS_BACK
    when the bus must be restored first, else 1."""

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Kept:
    """One actor in care: its spec, and the process that runs it now."""

    spec: ActorSpec
    process: Child = field(default_factory=lambda: Child(outlives=True))
    failures: list[Ending] = field(default_factory=list)
    done: bool = False
    outdated: bool = False  # a process of an earlier launcher may run with other settings

    @property
    def name(self) -> str:
        return self.spec.name


class Supervisor:
    """Keeps a set of actors alive. `notes`: (kind, text) of everything an operator should know. `furthest`: asked for the last
    training step that the run has ever made. `servers`: by role, who forks its processes; others are started one by one."""

    def __init__(
        self,
        run_dir: Path,
        clock: Clock,
        *,
        budget: int,
        threads: dict[str, int],
        furthest: Callable[[], int],
        servers: Mapping[str, ForkServer] = {},
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._budget = budget
        self._threads = threads
        self._furthest = furthest
        self._servers = servers
        self.kept: dict[str, Kept] = {}
        self.notes: list[tuple[str, str]] = []
        self._stopping = asyncio.Event()
        (run_dir / "actors").mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)

    def add(self, spec: ActorSpec) -> Kept:
        """Take an actor into care; `watch` starts it."""
        kept = self.kept[spec.name] = Kept(spec)
        file, content = self._spec_file(kept), msgspec.json.format(msgspec.json.encode(spec), indent=2)
        kept.outdated = file.exists() and file.read_bytes() != content
        write_secret(file, content.decode())
        return kept

    def _spec_file(self, kept: Kept) -> Path:
        return self._run_dir / "actors" / f"{kept.name}.json"

    def _pid_file(self, kept: Kept) -> Path:
        return self._run_dir / "actors" / f"{kept.name}.pid"

    def log_file(self, kept: Kept) -> Path:
        """Where an actor's stderr goes."""
        return self._run_dir / "logs" / f"{kept.name}.log"

    async def _start(self, kept: Kept) -> None:
        pid = living(self._pid_file(kept))
        if pid:
            kept.process.adopt(pid)
            if not kept.outdated:
                self.notes.append(("adopted", f"{kept.name} (pid {pid}) still runs"))
                return
            self.notes.append(("replaced", f"{kept.name} (pid {pid}) ran with other settings"))
            await kept.process.stop(kept.spec.drain_timeout_s + 5.0)
        kept.outdated = False
        threads = str(self._threads.get(kept.spec.role, 1))
        environment = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        words = (f"actors.{kept.spec.role}", str(self._spec_file(kept).resolve()))
        server = self._servers.get(kept.spec.role)
        forked = await server.start(words, self.log_file(kept), environment) if server is not None else None
        if forked is not None:
            kept.process.adopt(*forked)
        else:
            whole = {**os.environ, **environment}
            await kept.process.start((*PYTHON, *words), self.log_file(kept), whole, append=True)
        self._pid_file(kept).write_text(f"{kept.process.pid}\n")

    async def retire_others(self) -> None:
        """End actors of an earlier launcher of this run that the present settings no longer have."""
        for file in (self._run_dir / "actors").glob("*.pid"):
            if file.stem not in self.kept and (pid := living(file)):
                self.notes.append(("retired", f"{file.stem} (pid {pid}) is not in the settings any more"))
                other = Child(outlives=True)
                other.adopt(pid)
                await other.stop(30.0)
                file.unlink(missing_ok=True)

    async def watch(self, kept: Kept) -> None:
        """Start an actor and keep it until it is done; RunFailed when it cannot be kept."""
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            await self._start(kept)
            if self._stopping.is_set():  # asked to drain while it started
                kept.process.ask_to_end()
            code = await kept.process.wait()
            code = self._noted_exit(kept) if code is None else code
            self._pid_file(kept).unlink(missing_ok=True)
            if self._stopping.is_set():
                kept.done = True
                return
            now = self._clock.monotonic()
            ending = Ending(now, code, self._furthest())
            role = kept.spec.role
            verdict = judge_exit(
                kept.name, ending, kept.failures, self._budget, steps=role == "trainer", spared=self._is_spared(kept)
            )
            if verdict.action == "done":
                kept.done = True
                return
            cause = self.last_words(kept)
            if verdict.action == "give_up":
                kept.done = True
                status = code if code in (EXIT_REFUSED, EXIT_BUS_BACK) else 1
                if code == EXIT_BUS_BACK:
                    raise RunFailed(cause, status=status)
                raise RunFailed(f"{verdict.reason}: {cause} Log: {self.log_file(kept)}", status=status)
            text = f"{kept.name} {describe_exit(code)} after {now - began:.1f} s: {cause}; restarting"
            if verdict.action == "pause":
                ending = replace(ending, pause_s=verdict.after_s)
                text = f"{verdict.reason}: {cause}; tried again in {verdict.after_s:.0f} s, the run goes on without it"
            kept.failures = [*kept.failures[-64:], ending]
            self.notes.append(("restart", text))
            try:
                await asyncio.wait_for(self._stopping.wait(), verdict.after_s)
            except TimeoutError:
                continue

    def _is_spared(self, kept: Kept) -> bool:
        """Whether the run can miss it for a while: peers do the same work now, or, of the recorder, what it has not written
        stays on the bus."""
        peers = [k for k in self.kept.values() if k.spec.role == kept.spec.role and k is not kept]
        return kept.spec.role == "recorder" or any(peer.process.alive for peer in peers)

    def _noted_exit(self, kept: Kept) -> int | None:
        """Exit status that the actor's process wrote down itself, None if it could not (killed)."""
        try:
            pid, code = self._spec_file(kept).with_suffix(".exit").read_text().split()
        except (OSError, ValueError):
            return None
        return int(code) if int(pid) == kept.process.pid else None

    def last_words(self, kept: Kept) -> str:
        """Last meaningful line of an actor's log."""
        for line in reversed(log_tail(self.log_file(kept))[-40:]):
            if not line.startswith((" ", "  |", "Traceback", "During handling")):
                return printable(_LOG_HEAD.sub("", line.strip())[:600])
        return "no log line"

    async def drain(self, *, timeout_s: float) -> list[str]:
        """SIGTERM to all, then SIGKILL to those that do not end in time; returns the names of the latter. The recorder goes
        last, and has the others' last words on record then."""
        self._stopping.set()
        late: list[str] = []
        for last in (False, True):
            living = [
                k for k in self.kept.values() if (k.spec.role == "recorder") == last and not k.done and k.process.alive
            ]
            obeyed = await asyncio.gather(*(k.process.stop(timeout_s) for k in living))
            late += [k.name for k, in_time in zip(living, obeyed, strict=True) if not in_time]
        return late


def living(pid_file: Path) -> int:
    """Pid in an actor's file, if that process still runs this actor and no other took its number; else 0."""
    try:
        pid = int(pid_file.read_text())
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return 0
    return pid if str(pid_file.with_suffix(".json").resolve()) in command else 0
