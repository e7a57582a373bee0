"""Actors that left: what the bus still knows of them goes, once nothing can need it.

Reads  vitals, the consumers of the data streams    Owns  when an actor counts as gone
Elastic workers come and go by other names; without this their consumers, vitals and accounts would grow with the run. Always
true: an actor that holds an entry stays known, so that its entry is claimed and the doctor can name it.
"""

from __future__ import annotations

from collections.abc import Mapping

from bus.messages.control import Vitals
from bus.streams.link import Script
from bus.streams.redis import Bus
from bus.topology import STREAMS

LEAVE = Script("leave.lua")
ENDED_S = 3600.0  # after its last word, for one that said it ended
SILENT_S = 86400.0  # for one that said nothing; a whole night, so that the doctor can still name who died


def gone(vitals: Mapping[str, Vitals], silences: Mapping[str, float]) -> list[str]:
    """Names of actors that will not be heard of again (pure). `silences`: seconds since each one's last word (Bus.silences)."""
    return sorted(
        name
        for name, last in vitals.items()
        if silences.get(name, 0.0) > (ENDED_S if last.state in ("stopped", "failed") else SILENT_S)
    )


async def forget_leavers(bus: Bus, *, idle_s: float = ENDED_S) -> list[str]:
    """Forget them; returns their names. `idle_s`: consumers that read within this time stay as well."""
    known = await bus.vitals()  # without those of another release: whoever runs that one tells them apart
    keys = [bus.keys.vitals, bus.keys.ledger, *(bus.keys.stream(s.name) for s in STREAMS if s.is_data)]
    names = await bus.link.run_script(LEAVE, keys, [int(idle_s * 1000), *gone(known, await bus.silences())])
    if names:
        await bus.link.run("HDEL", bus.keys.heard, *names)
        await bus.link.run("HDEL", bus.keys.names, *names)
    return [name.decode() for name in names]
