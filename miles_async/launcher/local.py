"""Processes of a run on this host: started, watched, restarted, stopped by pid.

Each actor is a process of its own session, so that Ctrl-C reaches the launcher alone, and survives the launcher: a
launcher that was killed and started again adopts those that still run, recognised by their spec file's path.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from actors.runtime.child import PYTHON
from actors.runtime.context import ActorSpec
from actors.runtime.run import EXIT_REFUSED
from bus import Clock
from bus.errors import printable
from miles_async.launcher.restart import Ending, describe_exit, judge_exit

_LOG_HEAD = re.compile(r"^[\d-]+ [\d:,]+ \S+ [A-Z]+ (\w+: )?")  # time, name, level, class of the error


class RunFailed(Exception):
    """An actor could not be kept running; the text names the cause. `status`: 2 when what it was given is to blame."""

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Child:
    """One actor: its spec, and the process that runs it now."""

    spec: ActorSpec
    pid: int = 0
    process: asyncio.subprocess.Process | None = None
    failures: list[Ending] = field(default_factory=list)
    done: bool = False
    essential: bool = True
    outdated: bool = False  # a process of an earlier launcher may run with other settings

    @property
    def name(self) -> str:
        return self.spec.name


class Supervisor:
    """Keeps a set of actors alive. `notes`: (kind, text) of everything an operator should know. `furthest`: asked for the last
    training step that the run has ever made."""

    def __init__(
        self, run_dir: Path, clock: Clock, *, budget: int, threads: dict[str, int], furthest: Callable[[], int]
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._budget = budget
        self._threads = threads
        self._furthest = furthest
        self.children: dict[str, Child] = {}
        self.restarts = 0
        self.notes: list[tuple[str, str]] = []
        self._stopping = False
        (run_dir / "actors").mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)

    def add(self, spec: ActorSpec, *, essential: bool = True) -> Child:
        """Take an actor into care; `watch` starts it."""
        child = Child(spec, essential=essential)
        self.children[spec.name] = child
        file, content = self._spec_file(child), msgspec.json.format(msgspec.json.encode(spec), indent=2)
        child.outdated = file.exists() and file.read_bytes() != content
        file.write_bytes(content)
        self._spec_file(child).chmod(0o600)  # the bus address may hold a password
        return child

    def _spec_file(self, child: Child) -> Path:
        return self._run_dir / "actors" / f"{child.name}.json"

    def _pid_file(self, child: Child) -> Path:
        return self._run_dir / "actors" / f"{child.name}.pid"

    def log_file(self, child: Child) -> Path:
        """Where an actor's stderr goes."""
        return self._run_dir / "logs" / f"{child.name}.log"

    async def _start(self, child: Child) -> None:
        adopted = self._adopt(child)
        if adopted and child.outdated:
            self.notes.append(("replaced", f"{child.name} (pid {adopted}) ran with other settings"))
            await self._end(adopted, child.spec.drain_timeout_s + 5.0)
            adopted = 0
        child.outdated = False
        if adopted:
            child.pid, child.process = adopted, None
            self.notes.append(("adopted", f"{child.name} (pid {adopted}) still runs"))
            return
        threads = str(self._threads.get(child.spec.role, 1))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log_file(child).open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *(*PYTHON, f"actors.{child.spec.role}", str(self._spec_file(child).resolve())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        child.pid = child.process.pid
        self._pid_file(child).write_text(f"{child.pid}\n")

    def _adopt(self, child: Child) -> int:
        """Pid of a process of an earlier launcher that still runs this actor, 0 if none."""
        return _living(self._pid_file(child))

    async def _end(self, pid: int, timeout_s: float) -> None:
        """Drain a process that is not our child, or kill it when it does not obey."""
        _signal(pid, signal.SIGTERM)
        until = self._clock.monotonic() + timeout_s
        while _alive(pid):
            if self._clock.monotonic() > until:
                _signal(pid, signal.SIGKILL)
                return
            await self._clock.sleep(0.05)

    async def retire_others(self) -> None:
        """End actors of an earlier launcher of this run that the present settings no longer have."""
        for file in (self._run_dir / "actors").glob("*.pid"):
            if file.stem not in self.children and (pid := _living(file)):
                self.notes.append(("retired", f"{file.stem} (pid {pid}) is not in the settings any more"))
                await self._end(pid, 30.0)
                file.unlink(missing_ok=True)

    async def watch(self, child: Child) -> None:
        """Start an actor and keep it until it is done; RunFailed when it cannot be kept."""
        while not self._stopping:
            began = self._clock.monotonic()
            await self._start(child)
            if self._stopping:  # asked to drain while it started
                _signal(child.pid, signal.SIGTERM)
            code = await self._wait(child)
            self._pid_file(child).unlink(missing_ok=True)
            if self._stopping:
                child.done = True
                return
            now = self._clock.monotonic()
            ending = Ending(now, code, self._furthest())
            steps = child.spec.role == "trainer"
            verdict = judge_exit(child.name, ending, child.failures, self._budget, steps=steps)
            if verdict.action == "done":
                child.done = True
                return
            cause = self.last_words(child)
            if verdict.action == "give_up":
                child.done = True
                status = EXIT_REFUSED if code == EXIT_REFUSED else 1
                raise RunFailed(f"{verdict.reason}: {cause} Log: {self.log_file(child)}", status=status)
            child.failures.append(ending)
            self.restarts += 1
            text = f"{child.name} {describe_exit(code)} after {now - began:.1f} s: {cause}; restarting"
            self.notes.append(("restart", text))
            if verdict.after_s:
                await self._clock.sleep(verdict.after_s)

    async def _wait(self, child: Child) -> int | None:
        if child.process is not None:
            return await child.process.wait()
        while psutil.pid_exists(child.pid) and self._adopt(child) == child.pid:
            await self._clock.sleep(0.3)  # not our child: the kernel tells us nothing, so the actor left a note
        return self._noted_exit(child)

    def _noted_exit(self, child: Child) -> int | None:
        """Exit status that the actor's process wrote down itself, None if it could not (killed)."""
        try:
            pid, code = self._spec_file(child).with_suffix(".exit").read_text().split()
        except (OSError, ValueError):
            return None
        return int(code) if int(pid) == child.pid else None

    def last_words(self, child: Child) -> str:
        """Last meaningful line of an actor's log."""
        try:
            lines = self.log_file(child).read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        for line in reversed(lines[-40:]):
            if line and not line.startswith((" ", "  |", "Traceback", "During handling")):
                return printable(_LOG_HEAD.sub("", line.strip())[:600])
        return "no log line"

    async def drain(self, *, timeout_s: float) -> list[str]:
        """SIGTERM to all, then SIGKILL to those that do not end in time; returns the names of the latter."""
        self._stopping = True
        living = [c for c in self.children.values() if c.pid and not c.done and _alive(c.pid)]
        for child in living:
            _signal(child.pid, signal.SIGTERM)
        until = self._clock.monotonic() + timeout_s
        while self._clock.monotonic() < until and any(_alive(c.pid) for c in living):
            await self._clock.sleep(0.05)
        late = [c for c in living if _alive(c.pid)]
        for child in late:
            _signal(child.pid, signal.SIGKILL)
        return [c.name for c in late]


def _living(pid_file: Path) -> int:
    """Pid in an actor's file, if that process still runs this actor and no other took its number; else 0."""
    try:
        pid = int(pid_file.read_text())
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return 0
    return pid if str(pid_file.with_suffix(".json").resolve()) in command else 0


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


__all__ = ("Child", "RunFailed", "Supervisor")
