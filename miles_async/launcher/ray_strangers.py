"""Actors of a run that live although its Ray cluster does not keep them: they outlived an earlier cluster, whose head died.

Reads  vitals    Writes  nothing    Always true: no second set of actors is started beside one that lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from actors.runtime.snapshot import read_snapshot
from bus import Bus
from miles_async.settings.errors import SettingsError

LOOK_S = 0.5
WAIT_S = 30.0  # for all of them; the first that beats is named then
SHOWN = 4


async def refuse_strangers(bus: Bus, names: Collection[str], kept: Collection[str]) -> None:
    """SettingsError when some of `names` that are not `kept` beat again. Waits until each has done so or has been silent for too
    long to be alive: those that died with their hosts a moment ago."""
    first: dict[str, float] = {}
    until = bus.clock.monotonic() + WAIT_S
    while True:
        living = [a.vitals for a in (await read_snapshot(bus)).living()]
        alive = {v.actor: v for v in living if v.actor in names and v.actor not in kept}
        beating = [v for name, v in alive.items() if first.setdefault(name, v.wall) != v.wall]
        if beating and (len(beating) == len(alive) or bus.clock.monotonic() > until):
            who = ", ".join(f"{v.actor} on {v.host} (pid {v.pid})" for v in beating[:SHOWN])
            more = f" and {len(beating) - SHOWN} more" if len(beating) > SHOWN else ""
            raise SettingsError(
                f"{who}{more} live, and this Ray cluster does not keep them: they have outlived an earlier one",
                field="name",
                value=bus.config.run,
                remedy="End them with miles-async stop, then give the same command.",
            )
        if not alive:
            return
        await asyncio.sleep(LOOK_S)
