"""The placer of this host: actors are its processes, started and stopped by pid.

Each actor is a process of its own session, so that Ctrl-C reaches the launcher alone, and survives the launcher: a
launcher that was killed and started again adopts those that still run, recognised by their spec file's path.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec
import psutil

from actors.runtime.child import PYTHON, Child, log_tail
from actors.runtime.context import ActorSpec
from actors.runtime.fork_server import ForkServer
from actors.runtime.leftovers import end_orphans
from bus.private import write_secret
from bus.topology import ROLES
from miles_async.launcher.supervisor import End, Process, environment_of

LIGHT = tuple(role for role in ROLES if role not in ("trainer", "router"))


def fork_servers() -> dict[str, ForkServer]:
    """By role, who forks its processes. They load while the start is checked. Torch is loaded ahead only where there is no GPU:
    its libraries may look for one, and who has done so must not fork."""
    if sys.platform != "linux":
        return {}
    light = ForkServer([f"actors.{role}.actor" for role in LIGHT])
    servers = dict.fromkeys(LIGHT, light)
    if not Path("/dev/nvidiactl").exists():
        servers["trainer"] = ForkServer(("actors.trainer.actor", "actors.trainer.torch_backend.core"))
    return servers


class LocalPlacer:
    """See supervisor.Placer. `threads`: CPU threads by role; `servers`: by role, who forks its processes; others are started one by
    one."""

    def __init__(self, run_dir: Path, *, threads: Mapping[str, int], servers: Mapping[str, ForkServer]) -> None:
        self._run_dir = run_dir
        self._threads = threads
        self._servers = servers
        self.notes: list[tuple[str, str]] = []
        self._added: set[str] = set()
        self._outdated: set[str] = set()  # a process of an earlier launcher may run with other settings
        (run_dir / "actors").mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)

    def add(self, spec: ActorSpec) -> None:
        self._added.add(spec.name)
        file, content = self._spec_file(spec.name), _content(spec)
        if file.exists() and file.read_bytes() != content:
            self._outdated.add(spec.name)
        write_secret(file, content.decode())

    def _spec_file(self, name: str) -> Path:
        return self._run_dir / "actors" / f"{name}.json"

    def _pid_file(self, name: str) -> Path:
        return self._run_dir / "actors" / f"{name}.pid"

    def log_file(self, name: str) -> Path:
        """Where an actor's stderr goes."""
        return self._run_dir / "logs" / f"{name}.log"

    async def place(self, spec: ActorSpec) -> None:
        """There is always room here."""

    async def start(self, spec: ActorSpec) -> Process:
        name, process = spec.name, Child(outlives=True)
        if pid := living(self._pid_file(name)):
            process.adopt(pid)
            if name not in self._outdated:
                self.notes.append(("adopted", f"{name} (pid {pid}) still runs"))
                return process
            self.notes.append(("replaced", f"{name} (pid {pid}) ran with other settings or of another release"))
            await process.stop(spec.drain_timeout_s + 5.0)
        self._outdated.discard(name)
        for file in (self._spec_file(name), self.log_file(name)):  # somebody tidied up
            file.parent.mkdir(exist_ok=True)
        if not self._spec_file(name).exists():
            write_secret(self._spec_file(name), _content(spec).decode())
        environment = environment_of(spec.role, self._threads)
        words = (f"actors.{spec.role}", str(self._spec_file(name).resolve()))
        server = self._servers.get(spec.role)
        forked = await server.start(words, self.log_file(name), environment) if server is not None else None
        if forked is not None:
            process.adopt(*forked)
        else:
            await process.start((*PYTHON, *words), self.log_file(name), {**os.environ, **environment}, append=True)
        try:
            self._pid_file(name).write_text(f"{process.pid}\n")
        except OSError:  # a full disk: nobody else would find this process, and start a second one
            await process.stop(0.0)
            raise
        return process

    async def end_of(self, spec: ActorSpec, process: Process) -> End:
        name, child = spec.name, cast(Child, process)
        pid = child.pid
        code = await child.wait()
        code = noted_exit(self._spec_file(name), pid) if code is None else code
        self._pid_file(name).unlink(missing_ok=True)
        return End(code, log_tail(self.log_file(name)), str(self.log_file(name)))

    async def open(self) -> None:
        for file in (self._run_dir / "actors").glob("*.pid"):
            if file.stem not in self._added and (pid := living(file)):
                self.notes.append(("retired", f"{file.stem} (pid {pid}) is not in the settings any more"))
                other = Child(outlives=True)
                other.adopt(pid)
                await other.stop(30.0)
                file.unlink(missing_ok=True)

    async def follow(self, stop: asyncio.Event) -> None:
        """This host stays."""

    async def close(self) -> None:
        """What actors that were killed left behind ends here: no later one does it."""
        await asyncio.to_thread(end_orphans)


def _content(spec: ActorSpec) -> bytes:
    return msgspec.json.format(msgspec.json.encode(spec), indent=2)


def noted_exit(spec_file: Path, pid: int) -> int | None:
    """Exit status that an actor's process wrote down itself, None if it could not (killed)."""
    try:
        whose, code = spec_file.with_suffix(".exit").read_text().split()
    except (OSError, ValueError):
        return None
    return int(code) if int(whose) == pid else None


def living(pid_file: Path) -> int:
    """Pid in an actor's file, if that process still runs this actor and no other took its number; else 0."""
    try:
        pid = int(pid_file.read_text())
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return 0
    return pid if str(pid_file.with_suffix(".json").resolve()) in command else 0
