"""Groups of a live run, as the filter judges them.

Reads  scored, verdicts, policy (without taking anything)    Writes  nothing
Always true: every judged group of the share, from the first verdict after the start on, is given out once or counted in `missed`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

from actors.filter.judges import Member
from actors.runtime.content import fault_of
from bus import Bus, Entry, Tail
from bus.errors import BadMessage, BusUnreachable
from bus.messages.groups import GroupVerdict, index_of
from bus.topology import POLICY, SCORED, VERDICTS
from miles_async.console.shadow.units import ShadowUnit, chosen

READ_S = 1.0
MOST_WAITING = 256  # groups read and not yet compared; a flood beyond is missed, so that reading goes on
MOST_HELD_BYTES = 1 << 30  # of samples whose group is not judged yet
Body = asyncio.Task[Member | None]


class Tap:
    """One run's. Use `units` once."""

    def __init__(self, bus: Bus, *, share: float) -> None:
        self._bus, self._share = bus, share
        self._held: dict[str, dict[int, tuple[Body, int]]] = {}  # by group and index; with the entry's bytes
        self._held_bytes = 0
        self._waiting: asyncio.Queue[tuple[GroupVerdict, list[Body]] | None] = asyncio.Queue()
        self.missed: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.told = f"run {bus.config.run}, live"

    async def units(self) -> AsyncGenerator[ShadowUnit]:
        """Until the run has finished or its bus is gone."""
        tail = Tail(self._bus, [SCORED, VERDICTS, POLICY], start="$")
        await tail.open()
        tail.positions[SCORED.name] = "0"  # groups that are half there: their bodies lie still
        reading = asyncio.create_task(self._read(tail))
        try:
            while (judged := await self._waiting.get()) is not None:
                verdict, bodies = judged
                members = [await body for body in bodies]
                if None in members:
                    self.missed["a body gone or unreadable"] += 1
                    continue
                yield ShadowUnit(
                    group=verdict.group_id,
                    members=tuple(member for member in members if member is not None),
                    kept=verdict.kept,
                    reason=verdict.reason,
                    part=bool(verdict.members),
                )
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            for body in [body for group in self._held.values() for body, _ in group.values()]:
                body.cancel()
            await tail.close()

    async def _read(self, tail: Tail) -> None:
        """Woken by the blocking read, and back in it as soon as may be: nothing here waits for a comparison."""
        try:
            while True:
                entries = await tail.read(READ_S)
                for entry in entries:
                    if entry.stream is SCORED:
                        self._hold(entry)
                for entry in entries:
                    if entry.stream is VERDICTS and chosen(entry.fields.get("group", ""), self._share):
                        await self._judged(entry)
                if any(entry.fields.get("type") == "policy.finished" for entry in entries):
                    return
        except BusUnreachable:
            self.told += ", which has ended"
        finally:
            self._waiting.put_nowait(None)

    def _hold(self, entry: Entry) -> None:
        group, index = entry.fields.get("group", ""), index_of(entry.fields.get("id", ""))
        if not group or not chosen(group, self._share):
            return
        while self._held and self._held_bytes + entry.size > MOST_HELD_BYTES:
            self._forget(next(iter(self._held)))
        here = self._held.setdefault(group, {})
        if index in here:  # scored anew, by a later version of the reward
            self._held_bytes -= here[index][1]
        here[index] = (asyncio.create_task(self._body(entry)), entry.size)
        self._held_bytes += entry.size

    def _forget(self, group: str) -> dict[int, tuple[Body, int]]:
        found = self._held.pop(group, {})
        self._held_bytes -= sum(size for _, size in found.values())
        return found

    async def _body(self, entry: Entry) -> Member | None:
        """Its message; None of one that is none or that nobody can work with, or whose body was gone or lies on another host."""
        try:
            found: Member = await self._bus.message(entry)
        except (BadMessage, BusUnreachable, FileNotFoundError):
            return None
        return None if fault_of(found) else found

    async def _judged(self, entry: Entry) -> None:
        """Let the group, or the part of it, that a verdict is about go to who compares."""
        try:
            verdict: GroupVerdict = await self._bus.message(entry)
        except BadMessage:
            return
        held = self._held.get(verdict.group_id, {})
        wanted = verdict.members or sorted(held)
        found = [held.pop(index) for index in wanted if index in held]
        self._held_bytes -= sum(size for _, size in found)
        if not held:
            self._held.pop(verdict.group_id, None)
        if len(found) != verdict.n_samples:
            self.missed["gone before it was read"] += 1
        elif self._waiting.qsize() >= MOST_WAITING:
            self.missed["comparing is slower than the run"] += 1
        else:
            self._waiting.put_nowait((verdict, [body for body, _ in found]))
