"""A run over the nodes of a Ray cluster on this machine, and what is done to the nodes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from actors.runtime.child import free_port
from bus import Bus, BusConfig
from bus.messages.control import Event
from bus.server.binary import find_server
from bus.topology import EVENTS
from tests.crash.house import Missed, Run, Tables, merged, toml_of, toy_tables, until

ME = [sys.executable, "-m", "miles_async"]
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A node that is gone is so for Ray after 2 s, not 15."""


class NoServer:
    """Redis ends with the test."""

    def stop(self) -> None: ...


def with_jobs(dashboard: int) -> dict[str, Any]:
    """What makes a head take jobs at this port. Its agent has a port of its own too: without one two clusters of this machine would
    both want 52365, and the later one would answer every job with an error."""
    ports = {"dashboard_port": dashboard, "dashboard_agent_listen_port": free_port()}
    return {"include_dashboard": True, "dashboard_host": "127.0.0.1", **ports}


class RayRun(Run):
    """A run whose launcher is on the cluster's head, which holds no more than `head_cpus` of it. `jobs`: the head takes some."""

    def __init__(
        self, toy: Path, home: Path, settings: Tables, *, head_cpus: int = 0, soon: bool = True, jobs: bool = False
    ) -> None:
        head = {"num_cpus": head_cpus, "include_dashboard": jobs, "_system_config": SOON if soon else {}}
        self.dashboard = free_port() if jobs else 0
        head |= with_jobs(self.dashboard) if jobs else {}
        self._head, self._lost = head, list[Any]()
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}"
        words = f"{find_server().path} --bind 127.0.0.1 --port {port} --save '' --appendonly no --maxmemory-policy noeviction"
        self.redis = subprocess.Popen(["sh", "-c", f"exec {words}"], cwd=home, stdout=subprocess.DEVNULL)
        own: Tables = {"bus": {"bus_url": self.url}, "launch": {"launcher": "ray", "ray_address": self.cluster.address}}
        super().__init__(home, merged(merged(toy_tables(toy, home, settings), own), {"launch": settings.get("launch", {})}))

    def submit(self) -> None:
        """Start it as a job. What was started shows the job's output until that ends."""
        (self.home / "run.toml").write_text(toml_of(self._tables))
        words = [*ME, "ray", "submit", "run.toml", "--ray-address", f"http://127.0.0.1:{self.dashboard}"]
        words += ["--working-dir", str(self.home), "--python", sys.executable]
        with (self.home / "launcher.log").open("ab") as log:
            self.launcher = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home)

    def add(self, *, cpus: int = 2, **resources: Any) -> Any:
        """Another node."""
        self.nodes.append(self.cluster.add_node(num_cpus=cpus, **resources))
        return self.nodes[-1]

    def lose(self, node: Any) -> None:
        """It is gone without a word."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def until_step(self, step: int) -> None:
        """A cluster starts slowly."""
        over = lambda: self.step() >= step or self.launcher is None or self.launcher.poll() is not None  # noqa: E731
        try:
            until(f"step {step}", over, seconds=240.0)
        except Missed as missed:
            raise Missed(f"{missed}\n{self.story()}") from None
        assert self.step() >= step, self.story()

    def server(self) -> Any:
        return NoServer()

    def ask(self, question: Callable[[Bus], Any]) -> Any:
        async def answer() -> Any:
            async with Bus(BusConfig(url=self.url, run="r", deadline_s=10.0)) as bus:
                return await question(bus)

        return asyncio.run(answer())

    def events(self, kind: str, actor: str = "") -> list[Event]:
        """What was said on the bus, oldest first."""

        async def find(bus: Bus) -> list[Event]:
            found = [await bus.message(e) for e in await bus.scan_all(EVENTS) if e.fields["note"] == kind]
            return [event for event in found if actor in ("", event.actor)]

        return list(self.ask(find))

    def until_it_serves(self, name: str, *, more_than: int = 0, seconds: float = 60.0) -> None:
        """A worker has activated so many versions, and one more."""
        until(f"{name} serves", lambda: len(self.events("activated", name)) > more_than, seconds=seconds)

    def lose_head(self) -> None:
        """It is gone without a word; its other nodes follow when they see it."""
        self.nodes.clear()
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)

    def another_cluster(self) -> None:
        """In the stead of one whose head was lost: the next start is there."""
        self._lost.append(self.cluster)
        self.cluster = Cluster(initialize_head=True, head_node_args=self._head)
        self.take({"launch": {**self._tables["launch"], "ray_address": self.cluster.address}})

    def node_of(self, actor: str) -> Any:
        """The node that an actor is on, as the launcher placed it."""
        placed = [e.text for e in self.events("placed") if e.text.startswith(f"{actor} on ")]
        wanted = placed[-1].partition("(node ")[2][:8]
        return next((node for node in self.nodes if node.node_id.startswith(wanted)), None)

    def clean(self) -> None:
        super().clean()
        for cluster in (*self._lost, self.cluster):
            cluster.shutdown()
        self.redis.kill()
        self.redis.wait(10)
