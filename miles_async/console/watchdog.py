"""Keeps looking and names a stall on the bus: what the doctor finds wrong and what stays wrong becomes one event."""

from __future__ import annotations

import asyncio

from actors.runtime.deadline import within
from bus import Bus, Out
from bus.errors import BusFull, BusUnreachable
from bus.leavers import forget_leavers
from bus.ledger import LedgerCheck, check
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.sweep import sweep_orphans
from bus.topology import EVENTS
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.doctor.finding import Finding
from miles_async.console.scene import OfLate, read_scene

AUDIT_SHARE = 0.01  # of the time that the ledger's audit may take: it holds the server, longer the more lies on the bus
TIDY_S = 600.0


class Audits:
    """Of the ledger: at once, and then so seldom that audits take AUDIT_SHARE of the time."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._newest: LedgerCheck | None = None

    async def newest(self, bus: Bus) -> LedgerCheck:
        """One that is made now, where one is due."""
        began = bus.clock.monotonic()
        if self._newest is None or self.due(began):
            self._newest = await check(bus)
            self.done(began, bus.clock.monotonic())
        return self._newest

    def due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    def done(self, began_s: float, ended_s: float) -> None:
        """One took this long."""
        self._next_s = ended_s + (ended_s - began_s) / AUDIT_SHARE


async def watch(bus: Bus, stop: asyncio.Event, *, every_s: float = 10.0, persist_s: float = 25.0) -> None:
    """Until `stop`: look every `every_s`. A fault that stays for `persist_s` becomes one event `stall`, and another only
    after it had gone; so a stall is named within persist_s + 2 * every_s. The ledger is audited as often as `Audits` says, and
    what is left of actors long gone, and bodies that no entry names, are taken off the bus."""
    first_seen: dict[tuple[str, str], float] = {}
    told: set[tuple[str, str]] = set()
    audits, of_late, tidy_s = Audits(), OfLate(), 0.0
    while not stop.is_set():
        try:
            ledger = await audits.newest(bus)
            if (now := bus.clock.monotonic()) >= tidy_s:
                tidy_s = now + TIDY_S
                await forget_leavers(bus)
                await sweep_orphans(bus)
            scene = await read_scene(bus, ledger=ledger, of_late=of_late)
            present = {(f.rule, f.about): f for f in diagnose(scene) if f.level != "info"}
            now = bus.clock.monotonic()
            first_seen = {key: first_seen.get(key, now) for key in present}
            told &= present.keys()
            late = [key for key in present if key not in told and now - first_seen[key] >= persist_s]
            told.update(late)
            wall = bus.clock.wall()
            await bus.append([Out(EVENTS, _event(present[key], wall)) for key in late], repeatable=True)
        except (BusUnreachable, BusFull):
            first_seen.clear()  # the actors meet the same; their supervisor deals with it
        await within(every_s, stop)


def _event(finding: Finding, wall: float) -> Event:
    return Event(
        actor="watchdog",
        kind=EventKind.STALL,
        text=finding.text[:500],
        wall=wall,
        level="error" if finding.level == "error" else "warning",
        data={"rule": finding.rule, "about": finding.about, "since_s": finding.since_s},
    )
