"""What a run is, as it stands on its bus; light to import, because a joining worker waits for it."""

from __future__ import annotations

from typing import Any

import msgspec

from bus import Bus, BusConfig
from bus.errors import BusRefused


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is, for whoever joins it: elastic workers and rerun commands."""

    run: str
    fingerprint: str
    worker: dict[str, Any]
    bus: dict[str, Any]
    run_seed: int
    heartbeat_s: float
    drain_timeout_s: float
    run_dir: str


async def read_identity(bus: Bus) -> Identity:
    """What run this is; BusRefused when there is none of that name."""
    raw = await bus.link.run("GET", bus.keys.identity)
    if raw is None:
        raise BusRefused(
            f"no run {bus.config.run!r} on {bus.config.url}. Start it with `miles-async train`, or name another --run."
        )
    return msgspec.json.decode(raw, type=Identity)


def bus_of(identity: Identity, url: str) -> BusConfig:
    """Bus settings of a joined run, at the address the joiner uses."""
    return msgspec.structs.replace(msgspec.convert(identity.bus, BusConfig), url=url)
