"""A run over several hosts: trainer, rooms and Redis on the first, workers on others. Cases marked slow run with
MILES_ASYNC_CRASH=matrix or all."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bus import Bus, BusConfig, Entry
from bus.inspect import wall_of
from bus.messages.control import Event
from bus.server.binary import find_server
from bus.topology import EVENTS
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import read_scene
from tests.crash.conftest import FAILED, keep, leave_out_slow, pytest_runtest_makereport, toy
from tests.crash.house import REPO, UNLOWERED, Missed, Run, Tables, merged, toy_tables, until
from tests.hosts.net import Host, Net, why_not
from tests.warm.launched import Warmed

__all__ = ("pytest_runtest_makereport", "toy")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    leave_out_slow(config, items, HERE)


class FarRun(Run):
    """A run on host `a`, whose bus is there too, or on a host `r`; this process reaches it by a socket. `model`: its model
    directory on the other hosts."""

    def __init__(self, net: Net, toy: Path, home: Path, settings: Tables, warm: Path | None, bus_apart: bool) -> None:
        self.net, self.a, self.model, self.socket = net, net.host("a"), home / "model", home / "redis.sock"
        self.r = net.host("r") if bus_apart else self.a
        self.workers: list[subprocess.Popen[bytes] | Warmed] = []
        self._heard: list[tuple[float, Event]] = []
        self._heard_to = "-"
        self.url = f"redis://{self.r.address}:6379"
        own = home / "a"  # the folders that no other host sees
        own.mkdir()
        shutil.copytree(toy / "model", self.model)
        shutil.copytree(toy, own / "toy")
        self.redis = self.start_redis(home)
        tables = merged(toy_tables(own / "toy", own, settings), {"bus": {"bus_url": self.url}})
        super().__init__(own, tables, warm)

    def start_redis(self, home: Path) -> subprocess.Popen[bytes]:
        """On its host, with what its file holds."""
        words = f"{find_server().path} --bind 0.0.0.0 --protected-mode no --port 6379 --unixsocket {self.socket} --save ''"
        words += " --appendonly yes --appendfsync everysec --maxmemory-policy noeviction --loglevel warning"
        return subprocess.Popen([*self.r.enter(), "sh", "-c", f"exec {words}"], cwd=home, stdout=subprocess.DEVNULL)

    def restart_redis(self) -> None:
        """Killed, and started again."""
        self.redis.kill()
        self.redis.wait(10)
        self.redis = self.start_redis(self.home.parent)

    def begin(self) -> None:
        """Start the run on host a."""
        until("Redis", self.socket.exists, seconds=10)
        if self._warm is not None:
            self.like = self.a.standing()
        self.start(wrap=() if self.like else (*UNLOWERED, *self.a.enter()))
        until("the run on its bus", lambda: bool(self.ask(lambda bus: bus.hash_of(bus.keys.vitals))))

    def join_from(self, host: Host, name: str = "", model: Path | None = None) -> subprocess.Popen[bytes] | Warmed:
        """A worker on another host, which sees neither the run's folders nor its shared memory."""
        flags = ["--bus", self.url, "--run", "r", "--model-path", str(model or self.model), "--name", name or host.name]
        if program := self._tables["rollout"].get("custom_generate_function_path"):
            flags += ["--custom-generate-function-path", program]  # a worker runs no code that it was not told of
        words, home = ["miles_async", "worker", *flags], self.home.parent
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "TMPDIR": str(self.home)}  # a disk of its own
        with (home / f"{name or host.name}.log").open("ab") as log:
            if self._warm is not None:
                env, like = environment | host.clock(), host.standing([self.home])
                self.workers.append(Warmed(self._warm, words, env=env, cwd=home, stdout=log, stderr=log, like=like))
            else:
                words = [*UNLOWERED, *host.enter([self.home]), sys.executable, "-m", *words]
                self.workers.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        return self.workers[-1]

    def ask(self, question: Callable[[Bus], Any]) -> Any:
        async def answer() -> Any:
            async with Bus(BusConfig(url=f"unix://{self.socket}", run="r", deadline_s=10.0)) as bus:
                return await question(bus)

        return asyncio.run(answer())

    def heard(self) -> list[tuple[float, Event]]:
        """All that was told, but vitals, and when by this machine's clock. Tests ask several times a second, and in minutes a run
        tells much: read on from where it ended."""

        async def read(bus: Bus) -> list[tuple[float, Event]]:
            found: list[Entry] = []
            while page := await bus.scan(EVENTS, start=self._heard_to):
                found += page
                self._heard_to = f"({page[-1].id}"
            told = [(entry, await bus.message(entry)) for entry in found if entry.fields["type"] == "event.note"]
            return [(wall_of(entry.id), event) for entry, event in told]

        self._heard += self.ask(read)
        return self._heard

    def events(self, actor: str, kind: str) -> list[Event]:
        """What a worker said."""
        return [event for _, event in self.heard() if (event.actor, event.kind) == (actor, kind)]

    def when(self, actor: str, kind: str) -> list[float]:
        """When it said so, by this machine's clock."""
        return [wall for wall, event in self.heard() if (event.actor, event.kind) == (actor, kind)]

    def until_it_serves(self, *names: str, more_than: int = 0, seconds: float = 60.0) -> None:
        """Each of these workers has activated so many versions, and one more."""
        for name in names:
            served = lambda name=name: len(self.events(name, "activated")) > more_than  # noqa: E731
            try:
                until(f"{name} serves", served, seconds=seconds, every_s=0.25)
            except Missed as missed:
                raise Missed(f"{missed}\n{self.story()}") from None

    def doctor(self) -> str:
        """What it finds."""

        async def look(bus: Bus) -> str:
            return "\n".join(finding.text for finding in diagnose(await read_scene(bus)))

        return str(self.ask(look))

    @property
    def left(self) -> Path:
        return self.home.parent

    def story(self) -> str:
        logs = [f"-- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.home.parent.glob("*.log"))]
        return "\n".join([super().story(), *logs])


@pytest.fixture
def far_run(toy: Path, warm: Path | None, request: pytest.FixtureRequest) -> Iterator[Callable[..., FarRun]]:
    """Makes one run of a test, with settings over the usual ones; its hosts are gone at the end."""
    if why := why_not():
        pytest.skip(why)
    with TemporaryDirectory(prefix="ma-hosts-") as folder:
        net = Net(Path(folder) / "net")
        made: list[FarRun] = []

        def make(settings: Tables | None = None, *, bus_apart: bool = False) -> FarRun:
            made.append(FarRun(net, toy, Path(folder), settings or {}, warm, bus_apart))
            return made[-1]

        try:
            yield make
        finally:
            for run in made:
                run.clean()
            net.close()
            for process in (p for run in made for p in (run.redis, *run.workers)):
                process.wait(10)
            if FAILED in request.node.stash and made:
                print(f"kept: {keep(made, request.node.name)}")
