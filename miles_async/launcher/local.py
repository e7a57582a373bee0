"""The placer of this host: actors are its processes, started and stopped by pid.

Each actor is a process of its own session, so that Ctrl-C reaches the launcher alone, and survives the launcher: a
launcher that was killed and started again adopts those that still run.
Always true: what runs here is known by the process table alone, where an actor's command line says its spec file and the digest of
what it was started with (`python -m actors.<room> --digest=DIGEST SPEC`); no file that may be gone or old tells it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import psutil

from actors.runtime.child import PYTHON, Child, log_tail
from actors.runtime.context import ActorSpec
from actors.runtime.fork_server import ForkServer
from actors.runtime.leftovers import end_orphans
from bus import Bus
from bus.messages.events import EventKind
from bus.private import write_secret
from bus.topology import ROLES
from miles_async.launcher.place import Place
from miles_async.launcher.supervisor import End, Placer, Process, environment_of
from miles_async.settings.run import RunSettings

DIGEST = "--digest="
LIGHT = tuple(role for role in ROLES if role not in ("trainer", "router"))


def fork_servers(ahead: Sequence[str] = ()) -> dict[str, ForkServer]:
    """By role, who forks its processes. They load while the start is checked, the modules `ahead` too. Torch is loaded ahead only
    where there is no GPU: its libraries may look for one, and who has done so must not fork."""
    if sys.platform != "linux":
        return {}
    light = ForkServer([*(f"actors.{role}.actor" for role in LIGHT), *ahead])
    servers = dict.fromkeys(LIGHT, light)
    if not Path("/dev/nvidiactl").exists():
        servers["trainer"] = ForkServer(("actors.trainer.actor", "actors.trainer.torch_backend.core"))
    return servers


def check_start(settings: RunSettings) -> None:
    """This host is there."""


def join_cluster(settings: RunSettings) -> None:
    """There is none."""


def placer_of(
    settings: RunSettings, place: Place, threads: Mapping[str, int], servers: Mapping[str, ForkServer]
) -> Callable[[Bus], Placer]:
    """Makes what says where this run's actors are to be."""
    return lambda _: LocalPlacer(Path(place.run_dir), threads=threads, servers=servers)


class LocalPlacer:
    """See supervisor.Placer. `threads`: CPU threads by role; `servers`: by role, who forks its processes; others are started one by
    one."""

    def __init__(self, run_dir: Path, *, threads: Mapping[str, int], servers: Mapping[str, ForkServer]) -> None:
        self._run_dir = run_dir
        self._threads = threads
        self._servers = servers
        self.notes: list[tuple[EventKind, str]] = []
        self._added: set[str] = set()
        (run_dir / "actors").mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)

    def add(self, spec: ActorSpec) -> None:
        self._added.add(spec.name)
        write_secret(self._spec_file(spec.name), _content(spec).decode())

    def _spec_file(self, name: str) -> Path:
        return self._run_dir / "actors" / f"{name}.json"

    def log_file(self, name: str) -> Path:
        """Where an actor's stderr goes."""
        return self._run_dir / "logs" / f"{name}.log"

    async def place(self, spec: ActorSpec) -> None:
        """There is always room here."""

    async def start(self, spec: ActorSpec) -> Process:
        name, process = spec.name, Child(outlives=True)
        mark = mark_of(spec)
        for pid, other in await asyncio.to_thread(lambda: running(self._run_dir).get(name, [])):
            if other == mark and not process.alive:
                process.adopt(pid)
                self.notes.append((EventKind.ADOPTED, f"{name} (pid {pid}) still runs"))
                continue
            why = "was one too many" if other == mark else "ran with other settings or of another release"
            self.notes.append((EventKind.REPLACED, f"{name} (pid {pid}) {why}"))
            await _ended(pid, spec.drain_timeout_s + 5.0)
        if process.alive:
            return process
        for file in (self._spec_file(name), self.log_file(name)):  # somebody tidied up
            file.parent.mkdir(exist_ok=True)
        if not self._spec_file(name).exists():
            write_secret(self._spec_file(name), _content(spec).decode())
        environment = environment_of(spec.role, self._threads)
        words = (f"actors.{spec.role}", mark, str(self._spec_file(name).resolve()))
        server = self._servers.get(spec.role)
        forked = await server.start(words, self.log_file(name), environment) if server is not None else None
        if forked is not None:
            process.adopt(*forked)
        else:
            await process.start((*PYTHON, *words), self.log_file(name), {**os.environ, **environment}, append=True)
        return process

    async def end_of(self, spec: ActorSpec, process: Process) -> End:
        name, child = spec.name, cast(Child, process)
        pid = child.pid
        code = await child.wait()
        code = noted_exit(self._spec_file(name), pid) if code is None else code
        return End(code, log_tail(self.log_file(name)), str(self.log_file(name)))

    async def open(self) -> None:
        for name, found in (await asyncio.to_thread(running, self._run_dir)).items():
            for pid, _ in found if name not in self._added else ():
                self.notes.append((EventKind.RETIRED, f"{name} (pid {pid}) is not in the settings any more"))
                await _ended(pid, 30.0)

    async def follow(self, stop: asyncio.Event) -> None:
        """This host stays."""

    async def close(self) -> None:
        """What actors that were killed left behind ends here: no later one does it."""
        await asyncio.to_thread(end_orphans)


def _content(spec: ActorSpec) -> bytes:
    return msgspec.json.format(msgspec.json.encode(spec), indent=2)


def mark_of(spec: ActorSpec) -> str:
    """What its process bears on its command line: with other settings, or of another release, it is another."""
    return DIGEST + hashlib.blake2b(_content(spec), digest_size=8).hexdigest()


def noted_exit(spec_file: Path, pid: int) -> int | None:
    """Exit status that an actor's process wrote down itself, None if it could not (killed)."""
    try:
        whose, code = spec_file.with_suffix(".exit").read_text().split()
    except (OSError, ValueError):
        return None
    return int(code) if int(whose) == pid else None


async def _ended(pid: int, patience_s: float) -> None:
    other = Child(outlives=True)
    other.adopt(pid)
    await other.stop(patience_s)


def running(run_dir: Path) -> dict[str, list[tuple[int, str]]]:
    """Actors of a run that are processes of this host, by name: pid, and the mark of what each was started with, empty where it
    bears none (`miles-async worker` and its like are nobody's to keep)."""
    folder, found = f"{run_dir.resolve() / 'actors'}/", dict[str, list[tuple[int, str]]]()
    for process in psutil.process_iter(["cmdline", "status", "uids"]):
        words = [word for word in process.info["cmdline"] or () if word]
        ours = process.info["uids"] is not None and process.info["uids"].effective == os.geteuid()  # anybody may say these words
        if not ours or process.info["status"] == psutil.STATUS_ZOMBIE or "-m" not in words[:4]:
            continue
        module, *rest = words[words.index("-m") + 1 :] or [""]
        if module.startswith("actors.") and rest and rest[-1].startswith(folder) and rest[-1].endswith(".json"):
            mark = rest[0] if rest[0].startswith(DIGEST) else ""
            found.setdefault(rest[-1].removeprefix(folder).removesuffix(".json"), []).append((process.pid, mark))
    return found
