"""Reads what the doctor looks at, and keeps looking: the watchdog turns what stays wrong into an event on the bus."""

from __future__ import annotations

import asyncio

from bus import Bus, Out
from bus.errors import BusUnreachable
from bus.knobs.live import read_history, values_at
from bus.ledger import check
from bus.messages.control import Event
from bus.topology import DEAD, EVENTS, VERDICTS
from miles_async.console.doctor import Finding, Scene, diagnose
from miles_async.console.heads import newest_heads
from miles_async.console.places import read_places
from miles_async.console.server import read_server
from miles_async.console.snapshot import read_snapshot


async def read_scene(bus: Bus) -> Scene:
    """One look at everything. The ledger check is exact; the rest may be a few milliseconds apart."""
    snapshot, places, server, ledger, verdicts, dead, patches, time = await asyncio.gather(
        read_snapshot(bus),
        read_places(bus),
        read_server(bus),
        check(bus),
        newest_heads(bus, VERDICTS, 2000),
        newest_heads(bus, DEAD, 20),
        read_history(bus),
        bus.link.run("TIME"),
    )
    return Scene(
        snapshot=snapshot,
        places=places,
        server=server,
        ledger=ledger,
        verdicts=verdicts,
        dead=dead,
        knobs=dict(values_at(patches, patches[-1].epoch).values) if patches else {},
        now=int(time[0]) + int(time[1]) / 1e6,
        lease_s=bus.config.lease_s,
        stream_max_bytes=bus.config.stream_max_bytes,
    )


async def watch(bus: Bus, stop: asyncio.Event, *, every_s: float = 10.0, persist_s: float = 25.0) -> None:
    """Until `stop`: look every `every_s`; an error or warning that stays for `persist_s` becomes one event `stall`, again
    only after it had gone. A stall is named in under persist_s + 2 * every_s."""
    first_seen: dict[tuple[str, str], float] = {}
    told: set[tuple[str, str]] = set()
    while not stop.is_set():
        try:
            scene = await read_scene(bus)
            present = {(f.rule, f.about): f for f in diagnose(scene) if f.level != "info"}
            now = bus.clock.monotonic()
            first_seen = {key: first_seen.get(key, now) for key in present}
            told &= present.keys()
            for key, finding in present.items():
                if key not in told and now - first_seen[key] >= persist_s:
                    told.add(key)
                    await bus.append([Out(EVENTS, _event(finding, bus.clock.wall()))])
        except BusUnreachable:
            first_seen.clear()  # the actors meet the same silence; their supervisor deals with it
        try:
            await asyncio.wait_for(stop.wait(), every_s)
        except TimeoutError:
            continue


def _event(finding: Finding, wall: float) -> Event:
    return Event(
        actor="watchdog",
        kind="stall",
        text=finding.text[:500],
        wall=wall,
        level="error" if finding.level == "error" else "warning",
        data={"rule": finding.rule, "about": finding.about, "since_s": finding.since_s},
    )


__all__ = ("read_scene", "watch")
