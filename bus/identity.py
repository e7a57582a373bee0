"""A run's identity on its bus, for workers and launchers that join it; and which runs a server holds."""

from __future__ import annotations

from typing import Any

import msgspec

from bus.client import connect
from bus.errors import UNREADABLE, BusRefused
from bus.streams.keys import Keys
from bus.streams.redis import Bus, BusConfig


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the launcher; read by elastic workers, rerun commands and tools. The defaults serve who only looks at a run."""

    run: str = ""
    fingerprint: str = ""
    worker: dict[str, Any] = {}
    bus: dict[str, Any] = {}
    run_seed: int = 0
    heartbeat_s: float = 2.0
    drain_timeout_s: float = 30.0
    loop_deadline_s: float = 0.0
    run_dir: str = ""
    release: str = ""

    def bus_at(self, url: str) -> BusConfig:
        """Bus settings of the run at the address that the joiner uses; BusRefused for those of another release."""
        try:
            return msgspec.structs.replace(msgspec.convert(self.bus, BusConfig), url=url)
        except msgspec.ValidationError as error:
            raise BusRefused(
                f"run {self.run} states its bus as this release does not understand it ({error}). Use the run's release here."
            ) from error


def are_alike(release: str, other: str) -> bool:
    """Whether two releases mean the same by a message: they agree to their second number, or one is not known."""
    return not release or not other or release.split(".")[:2] == other.split(".")[:2]


async def read_identity(bus: Bus) -> Identity | None:
    """None when the bus holds no run of this name, or one of a release that says otherwise what it is."""
    return _identity(await bus.link.run("GET", bus.keys.identity))


def _identity(raw: bytes | None) -> Identity | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=Identity)
    except UNREADABLE:
        return None


async def identity_at(url: str, run: str) -> Identity | None:
    """The same before a bus is open. Raises redis-py's errors."""
    async with connect(url) as client:
        raw: Any = await client.get(Keys(run).identity)
        return _identity(raw)


async def write_identity(bus: Bus, identity: Identity) -> None:
    """Replace it."""
    await bus.link.run("SET", bus.keys.identity, msgspec.json.encode(identity))


async def runs_on(url: str) -> list[str]:
    """Names of all runs on a server, from keys that every run has. Raises redis-py's errors, as no bus is open yet."""
    names: set[str] = set()
    async with connect(url) as client:
        for pattern in ("ma:{*}:identity", "ma:{*}:vitals", "ma:{*}:state"):
            async for key in client.scan_iter(match=pattern, count=1000):
                names.add(key.decode("utf-8", "replace").partition("{")[2].rpartition("}")[0])
    return sorted(names)
