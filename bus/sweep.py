"""Bodies that no entry names: what a crash left between writing a body and the commit that names it, or between the commit that
acknowledged an entry and the deletion of its body. They are found by comparing with all references on the bus."""

from __future__ import annotations

from bus.dead import read_letters
from bus.inspect import all_heads
from bus.streams.redis import Bus
from bus.topology import STREAMS

HOUR_S = 3600.0


async def sweep_orphans(bus: Bus, *, older_s: float | None = None) -> int:
    """Delete them; returns how many. Only bodies older than `older_s` count: a younger one may wait for room on its stream (the
    default is longer than any such wait). Reads no stream while there is no body of that age."""
    if older_s is None:
        older_s = 2 * max(HOUR_S, bus.config.room_deadline_s)
    old = {_id(ref): ref for ref, age_s in await bus.blobs.list_ids() if age_s >= older_s}
    if not old:
        return 0
    # Letters twice: an entry may become one, and one an entry again, while the streams are read.
    named = {ref for item in await read_letters(bus) for ref in item.letter.kept}
    for stream in STREAMS:
        for head in await all_heads(bus, stream):
            named.update(ref for name in ("blob", "plan", "asides", "inputs") for ref in head.fields.get(name, "").split())
    for group in (await bus.open_groups()).values():
        named |= set(group.blobs)
    named |= {ref for item in await read_letters(bus) for ref in item.letter.kept}
    orphans = [old[blob] for blob in old.keys() - {_id(ref) for ref in named if ref}]
    await bus.blobs.delete(orphans)
    return len(orphans)


def _id(ref: str) -> str:
    return ref.split(":")[1] if ref.count(":") == 2 else ref
