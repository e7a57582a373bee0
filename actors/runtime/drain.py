"""How long an actor that was asked to end may take: its drain's deadline, and beyond it what would otherwise be lost.

A trainer that is killed in its last checkpoint, or in the step before, trains again everything since the checkpoint before. So that
much is waited for, here and by the launcher, who hears of it in the vitals. Always true: each wait has an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from actors.runtime.context import Context
from actors.runtime.deadline import first_of
from bus import Bus
from bus.errors import MilesAsyncError
from bus.messages.control import Vitals
from bus.messages.waits import Wait

KEEPS = {Wait.STEP_ENDS: 600.0, Wait.CHECKPOINT: 7200.0}
"""What is waited for beyond the deadline, and for how many seconds in all."""
LOOK_S = 1.0
ANSWER_S = 5.0  # of the bus; one that is away keeps nobody
SILENT_S = 30.0  # an actor whose vitals stand still for so long finishes nothing


class Patience:
    """Of whoever waits for the end of one actor, from `now` on; any clock's seconds."""

    def __init__(self, drain_s: float, now: float) -> None:
        self._drain_s, self._now, self._end = drain_s, now, now + drain_s
        self._kept: dict[Wait | None, float] = {}

    def is_over(self, now: float, finishes: str) -> bool:
        """Whether it has waited long enough. `finishes`: what the actor says it finishes; what is to be waited for does not count
        as part of the drain."""
        before, self._now = self._now, now
        wait = Wait.of(finishes)
        kept = self._kept[wait] = self._kept.get(wait, 0.0) + now - before
        if wait is not None and kept < KEEPS.get(wait, 0.0):
            self._end = now + LOOK_S + self._drain_s  # it may go on until the next look
            return False
        return now >= self._end


class Heard:
    """What actors that were asked to end last said that they finish; nothing of one whose vitals stand still, and of all once
    somebody `hurries`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._said: Mapping[str, Vitals] = {}
        self._asked = -LOOK_S
        self._beats: dict[str, tuple[float, float]] = {}  # name -> time of its newest vitals, and when we first saw them
        self.hurries = False

    async def finishes(self, name: str) -> str:
        """Of the actor `name`; empty: nothing, or nobody knows. Asked about many, it asks the bus for all at once."""
        now = self._bus.clock.monotonic()
        if now - self._asked >= LOOK_S / 2:
            self._asked = now
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._said = await self._bus.vitals()
            except (MilesAsyncError, TimeoutError):
                self._said = {}
        said = self._said.get(name)
        if said is None or self.hurries:
            return ""
        wall, at = self._beats.get(name, (0.0, now))
        if said.wall != wall:
            self._beats[name] = said.wall, (at := now)
        return said.waits_for if now - at < SILENT_S else ""


async def drained(
    ended: Awaitable[object], patience: Patience, now: Callable[[], float], finishes: Callable[[], Awaitable[str]]
) -> bool:
    """Waits for `ended`, looking every LOOK_S whether that is worth it; False when the patience is over first."""
    waiting = asyncio.ensure_future(ended)
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=LOOK_S)
            if not waiting.done() and patience.is_over(now(), await finishes()):
                return False
        return True
    finally:
        waiting.cancel()


async def drain_watch(context: Context, over: asyncio.Event) -> None:
    """Waits for the request to drain, then for the room; a room that does not finish in time is ended."""
    await first_of(context.draining.wait(), over.wait())
    if over.is_set():
        return
    now, allowed_s = context.clock.monotonic, context.spec.drain_timeout_s

    async def finishes() -> str:
        return context.vitals().waits_for

    if not await drained(over.wait(), Patience(allowed_s, now()), now, finishes):
        raise MilesAsyncError(
            f"{context.name} did not drain within {allowed_s:g} s; its entries stay pending and go to its successor. Raise "
            "--drain-timeout-s if it needs longer."
        )
