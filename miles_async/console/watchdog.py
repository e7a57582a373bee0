"""Keeps looking and names a stall on the bus: what the doctor finds wrong and what stays wrong becomes one event."""

from __future__ import annotations

import asyncio

from bus import Bus, Out
from bus.errors import BusUnreachable
from bus.messages.control import Event
from bus.topology import EVENTS
from miles_async.console.doctor import Finding, diagnose
from miles_async.console.scene import read_scene


async def watch(bus: Bus, stop: asyncio.Event, *, every_s: float = 10.0, persist_s: float = 25.0) -> None:
    """Until `stop`: look every `every_s`. A fault that stays for `persist_s` becomes one event `stall`, and another only
    after it had gone; so a stall is named within persist_s + 2 * every_s."""
    first_seen: dict[tuple[str, str], float] = {}
    told: set[tuple[str, str]] = set()
    while not stop.is_set():
        try:
            present = {(f.rule, f.about): f for f in diagnose(await read_scene(bus)) if f.level != "info"}
            now = bus.clock.monotonic()
            first_seen = {key: first_seen.get(key, now) for key in present}
            told &= present.keys()
            late = [key for key in present if key not in told and now - first_seen[key] >= persist_s]
            told.update(late)
            wall = bus.clock.wall()
            await bus.append([Out(EVENTS, _event(present[key], wall)) for key in late], repeatable=True)
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


__all__ = ("watch",)
