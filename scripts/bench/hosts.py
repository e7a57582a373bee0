"""How long a version takes to all hosts, in transfers over one link: the room that plans it, hosts that fetch and pass on.

    sudo python -m scripts.bench hosts --hosts 8 --rate 200mbit --megabytes 100
    ... --learning-rate 1e-6 --versions 5        versions that a step makes of each other

Hosts are network namespaces with shaped links on this machine (tests/hosts/net.py). The publisher is the real room; a host's
worker is the part of it that fetches and serves, without an engine: what loading costs is measured elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.generation.activation import check_manifest
from actors.generation.supply import Supply
from actors.publisher.actor import PublisherSpec
from actors.publisher.actor import run as publisher
from actors.runtime.checksum import checksum_of
from actors.runtime.context import Context
from actors.runtime.run import log_to_stderr, run_actor
from bus import Bus, BusConfig, Out, Tail
from bus.knobs.live import publish_initial
from bus.messages.active import Activate
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.messages.policy import PolicyAnnounced, WeightManifest
from bus.messages.versions import PolicyVersion
from bus.server.binary import find_server
from bus.topology import ACTIVE, EVENTS, POLICY
from scripts.bench.hosts_quickstart import quickstart
from tests.actors.house import KNOBS
from tests.actors.house import until as seen
from tests.bus.suite.knobs import plain_kinds
from tests.crash.house import until
from tests.declared import actor_of
from tests.hosts.net import Net, why_not

TOKEN = "bench"
DEADLINE_S = 600.0


async def worker(context: Context, spec: None) -> None:
    """A worker whose engine is a checksum."""
    supply = Supply(context, token=TOKEN, serves=True, address="", deadline_s=60.0)
    supply.open()
    tail = Tail(context.bus, [ACTIVE], start="$")
    await tail.open()
    await context.beat()
    try:
        while not context.draining.is_set():
            for entry in await tail.read(0.5):
                order = await context.bus.message(entry)
                if isinstance(order, Activate) and context.name in order.workers:
                    folder = await supply.bring(order)
                    filed = WeightManifest(path=str(folder), checksum=order.manifest.checksum)
                    await asyncio.to_thread(check_manifest, filed)
                    context.version = order.version.id
                    way = {"transport": "network", "host": context.name, **supply.fetched}
                    await context.event(EventKind.ACTIVATED, "", version=order.version.id, **way)
    finally:
        await tail.close()
        await supply.close()


def be(role: str, name: str, url: str, weights: str) -> int:
    """One process of a host."""
    config = BusConfig(url=url, run="bench")
    spec = actor_of(name=name, role=role, bus=config, heartbeat_s=1.0)
    room: Any = PublisherSpec(weights_dir=weights, weights_token=TOKEN, keep_versions=8) if role == "publisher" else None
    log_to_stderr()
    return asyncio.run(run_actor(spec, room, publisher if role == "publisher" else worker))


async def measure(bus: Bus, folder: Path, checksum: str, version: int, names: list[str]) -> list[tuple[float, int]]:
    """Seconds from the announcement until each of these workers said that it has the version, sorted, and bytes that came to it."""
    tail = Tail(bus, [EVENTS], start="$")
    await tail.open()
    manifest = WeightManifest(path=str(folder), checksum=checksum)
    began = time.monotonic()
    await bus.append([Out(POLICY, PolicyAnnounced(version=PolicyVersion(version, version), manifest=manifest))])
    took: dict[str, tuple[float, int]] = {}
    async with asyncio.timeout(DEADLINE_S):
        while took.keys() < set(names):
            for entry in await tail.read(0.5):
                message = await bus.message(entry)
                if isinstance(message, Event) and message.kind == "activated" and message.data["version"] == version:
                    took[message.actor] = time.monotonic() - began, message.data["fetched"]
    await tail.close()
    return sorted(took.values())


class Weights:
    """Of 16 bits each, which a step moves by as much as the learning rate, as Adam does, up or down; 0: all are anew."""

    def __init__(self, megabytes: int, learning_rate: float) -> None:
        import torch  # here: the hosts do without

        self._torch, self._rate = torch, learning_rate
        self._weights = torch.randn(megabytes * 500_000) * 0.02

    def write(self, folder: Path) -> str:
        """The next version; its checksum."""
        if self._rate:
            self._weights += self._rate * self._torch.randint(0, 2, self._weights.shape).mul_(2).sub_(1)
        else:
            self._weights.normal_(0.0, 0.02)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(self._weights.to(self._torch.bfloat16).view(self._torch.int16).numpy().tobytes())
        return checksum_of(folder / "model.safetensors")


def start_all(net: Net, args: argparse.Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Redis and the publisher on the first host, a worker on each other one."""
    home = net.host("a")
    words = f"{find_server().path} --bind 0.0.0.0 --protected-mode no --port 6379 --unixsocket {folder / 'redis.sock'} --save ''"
    redis = subprocess.Popen([*home.enter(), "sh", "-c", f"exec {words}"], stdout=subprocess.DEVNULL)
    until("Redis", (folder / "redis.sock").exists, seconds=10.0)
    asyncio.run(prepare(folder))
    me, url = [sys.executable, "-m", "scripts.bench.hosts", "--be"], f"redis://{home.address}:6379"
    with (folder / "log").open("ab") as log:
        weights = str(home.shm)  # by this path for everybody here, since the file system is one
        started = [subprocess.Popen([*home.enter(), *me, "publisher", "publisher", url, weights], stderr=log)]
        for n in range(args.hosts):
            host = net.host(f"w{n}")
            host.shape(args.rate)
            started.append(subprocess.Popen([*host.enter(), *me, "generation", host.name, url, ""], stderr=log))
    home.shape(args.rate)
    return [redis, *started]


def bus_in(folder: Path) -> Bus:
    return Bus(BusConfig(url=f"unix://{folder / 'redis.sock'}", run="bench"))


async def prepare(folder: Path) -> None:
    async with bus_in(folder) as bus:
        await bus.make_readers()
        await publish_initial(bus, KNOBS, plain_kinds(KNOBS))


async def bench(net: Net, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All versions, one after the other."""
    asked = ("hosts", "rate", "megabytes", "learning_rate")
    found: dict[str, Any] = {name: getattr(args, name) for name in asked} | {"runs": []}
    weights = Weights(args.megabytes, args.learning_rate)
    names = [host.name for host in net.hosts[1:]]

    async with bus_in(folder) as bus:

        async def all_there() -> bool:
            return set(await bus.vitals()) >= {*names, "publisher"}

        await seen(all_there)
        await asyncio.sleep(3.0)  # the publisher has heard of all of them
        for version in range(1, args.versions + 1):
            at = net.hosts[0].shm / f"v{version:08d}"
            took = await measure(bus, at, weights.write(at), version, names)
            most = max(n_bytes for _, n_bytes in took)
            found["runs"].append({"first_s": round(took[0][0], 2), "all_s": round(took[-1][0], 2), "bytes": most})
            print(json.dumps(found["runs"][-1]), flush=True)
    return found


def main() -> int:
    if sys.argv[1:2] == ["--be"]:
        return be(*sys.argv[2:6])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.0, help="each version is a step from the one before")
    parser.add_argument("--quickstart", action="store_true", help="whole runs, see hosts_quickstart.py")
    parser.add_argument("--runs", type=int, default=3, help="with --quickstart: of each way")
    parser.add_argument("--steps", type=int, default=0, help="with --quickstart: fewer than its 60, to try this")
    parser.add_argument("--delay-us", type=int, default=0, help="with --quickstart: what each link takes, each way")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if why := why_not():
        print(f"not here: {why}", file=sys.stderr)
        return 2
    if args.quickstart:
        return quickstart(args)
    with TemporaryDirectory(prefix="ma-bench-") as folder:
        net = Net(Path(folder) / "net")
        try:
            start_all(net, args, Path(folder))
            found = asyncio.run(bench(net, args, Path(folder)))
        finally:
            net.close()
    n_bytes, bits_s = args.megabytes * 1e6, float(args.rate.removesuffix("mbit")) * 1e6
    found["transfer_s"] = round(8 * n_bytes / bits_s, 2)
    found["transfers"] = [round(run["all_s"] / found["transfer_s"], 2) for run in found["runs"]]
    print(json.dumps(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
