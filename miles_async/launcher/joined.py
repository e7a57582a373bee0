"""Workers that joined by hand, when a run ends for good: told that it does, and waited for while its own Redis still answers.

Reads  vitals    Writes  the wish to stop
A worker whose bus is gone waits for it with its engine, for minutes: so the server that ends with the run ends after those that
can still hear it. How long they may take has an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from actors.runtime.context import STOP_WISH
from actors.runtime.host import SILENT_BEATS, lives
from bus import Bus, Commit
from bus.errors import BusFull, BusUnreachable, BusWentBack

DONE = "the last step is done"
LOOK_S = 0.2


async def let_go(bus: Bus, ours: Collection[str], *, finished: bool, heartbeat_s: float, within_s: float) -> None:
    """Wish that all end where the run has `finished`, and wait for workers that are not `ours` wherever that is wished, also by
    `miles-async stop`; woken by time. 0 s: the server outlives us, and nobody need be waited for."""
    with suppress(BusUnreachable, BusFull, BusWentBack, TimeoutError):
        if finished:
            await bus.commit(Commit(state={STOP_WISH: DONE}))
        if not within_s or not await bus.state(STOP_WISH):
            return
        async with asyncio.timeout(within_s):
            while await here(bus, ours, heartbeat_s):
                await bus.clock.sleep(LOOK_S)


async def here(bus: Bus, ours: Collection[str], heartbeat_s: float) -> list[str]:
    """Workers of others that work, drain, or were heard of a moment ago."""
    vitals, silent_s = await bus.vitals(), await bus.silences()
    found = []
    for name, said in vitals.items():
        if said.role != "generation" or name in ours or said.state in ("stopped", "failed"):
            continue
        lost = silent_s.get(name, 0.0) > SILENT_BEATS * heartbeat_s
        if not lost and lives(said) is not False:
            found.append(name)
    return found
