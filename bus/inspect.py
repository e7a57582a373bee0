"""The streams as an operator looks at them: entries by id and plain fields, who holds them, readers, lengths, ages.

Nothing here takes an entry or changes one. Bodies stay on the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bus.streams.entry import Entry
from bus.streams.hop import make_entry, number_in, table_of, text_of
from bus.streams.link import Script
from bus.streams.redis import Bus
from bus.topology import STREAMS, Stream

PAGE = 500
GREP_PAGE = 2000
HEADS, FACTS, GREP, NOTED = Script("heads.lua"), Script("facts.lua"), Script("grep.lua"), Script("noted.lua")


class Head(msgspec.Struct, frozen=True):
    """One entry without its body. `size` is the body's bytes, also when it lies in a blob."""

    stream: str
    id: str
    size: int
    fields: dict[str, str]

    @property
    def wall(self) -> float:
        """When the server took it in, seconds."""
        return wall_of(self.id)

    @property
    def sample(self) -> str:
        return self.fields.get("id", "")

    @property
    def group(self) -> str:
        return self.fields.get("group", "")


class Pending(msgspec.Struct, frozen=True):
    """One delivered and unacknowledged entry: who holds it, idle seconds since its lease was renewed, deliveries."""

    stream: str
    readers: str
    id: str
    owner: str
    idle_s: float
    deliveries: int


class ConsumerFacts(msgspec.Struct, frozen=True):
    """One who reads: entries held, seconds since it asked last."""

    name: str
    pending: int
    idle_s: float


class ReadersFacts(msgspec.Struct, frozen=True):
    """One consumer group of a stream. `lag`: entries not yet delivered. `oldest_*`: of the oldest entry delivered and not
    acknowledged: its id, seconds since it was appended, who holds it, seconds since that lease was renewed."""

    readers: str
    consumers: int
    pending: int
    lag: int
    oldest_id: str = ""
    oldest_age_s: float = 0.0
    oldest_owner: str = ""
    oldest_idle_s: float = 0.0
    oldest_deliveries: int = 0


class StreamFacts(msgspec.Struct, frozen=True):
    """One stream: entries on it, bytes not yet acknowledged (data streams), seconds since the newest append. `added`: entries
    ever appended, -1 where the server does not tell (before Redis 7)."""

    name: str
    writer: str
    is_data: bool
    length: int
    n_bytes: int
    newest_id: str = ""
    newest_age_s: float = 0.0
    readers: tuple[ReadersFacts, ...] = ()
    added: int = -1

    @property
    def pending(self) -> int:
        return sum(r.pending for r in self.readers)

    @property
    def lag(self) -> int:
        return sum(r.lag for r in self.readers)


def wall_of(entry_id: str) -> float:
    """Server time inside an entry id, seconds."""
    return int(entry_id.partition("-")[0]) / 1000


async def heads(bus: Bus, stream: Stream, *, start: str = "-", stop: str = "+", count: int = PAGE) -> list[Head]:
    """Oldest first, from `start` on."""
    return await _read(bus, stream, "XRANGE", start, stop, count)


async def newest_heads(bus: Bus, stream: Stream, count: int) -> list[Head]:
    """The newest `count`, oldest of them first."""
    return (await _read(bus, stream, "XREVRANGE", "+", "-", count))[::-1]


async def all_heads(bus: Bus, stream: Stream) -> list[Head]:
    """Everything on a stream, in pages."""
    found: list[Head] = []
    start = "-"
    while page := await heads(bus, stream, start=start):
        found += page
        start = f"({page[-1].id}"
        if len(page) < PAGE:
            break
    return found


async def entries_with(bus: Bus, stream: Stream, text: str, types: Sequence[str] = (), *, after: str = "0") -> list[Entry]:
    """Entries that hold `text` in a field or in their body, those of some types, and those whose body lies elsewhere; behind the
    id `after`."""
    found: list[Entry] = []
    start = f"({after}"
    while True:
        last, raw = await bus.link.run_script(GREP, [bus.keys.stream(stream.name)], [start, GREP_PAGE, text, *types])
        found += [make_entry(stream, "", one) for one in raw]
        if not last:
            return found
        start = f"({text_of(last)}"


async def noted_entries(bus: Bus, stream: Stream, most: Mapping[str, int], *, after: str) -> tuple[list[Entry], str]:
    """Entries behind the id `after` that have one of these notes, oldest first, and the id of the last entry that was looked at. Of
    each note at least the newest `most`; where there are more of it, not all."""
    found: list[Entry] = []
    wanted = [word for pair in most.items() for word in pair]
    while True:
        last, raw = await bus.link.run_script(NOTED, [bus.keys.stream(stream.name)], [f"({after}", PAGE, *wanted])
        if not last:
            return found, after
        found += [make_entry(stream, "", one) for one in reversed(raw)]
        after = text_of(last)


async def pending_entries(bus: Bus, stream: Stream, readers: str, *, limit: int = 10_000) -> list[Pending]:
    """Delivered and unacknowledged entries, oldest first; none when the readers do not exist."""
    found: list[Pending] = []
    start = "-"
    while len(found) < limit:
        rows = await bus.link.run("XPENDING", bus.keys.stream(stream.name), readers, start, "+", PAGE)
        for entry_id, owner, idle_ms, deliveries in rows or []:
            found.append(Pending(stream.name, readers, text_of(entry_id), text_of(owner), int(idle_ms) / 1000, int(deliveries)))
        if len(rows or []) < PAGE:
            break
        start = f"({found[-1].id}"
    return found


async def readers_of(bus: Bus, stream: Stream) -> list[str]:
    """Names of the consumer groups; empty when the stream does not exist."""
    if not int(await bus.link.run("EXISTS", bus.keys.stream(stream.name))):
        return []
    raw = await bus.link.run("XINFO", "GROUPS", bus.keys.stream(stream.name))
    return [text_of(table_of(row)["name"]) for row in raw]


async def consumers_of(bus: Bus, stream: Stream, readers: str) -> list[ConsumerFacts]:
    """Everybody who ever read as one of these readers and was not forgotten."""
    raw = await bus.link.run("XINFO", "CONSUMERS", bus.keys.stream(stream.name), readers)
    rows = map(table_of, raw)
    return [ConsumerFacts(text_of(row["name"]), int(row["pending"]), int(row["idle"]) / 1000) for row in rows]


async def stream_facts(bus: Bus) -> tuple[float, dict[str, StreamFacts]]:
    """The server's time, and every stream with its readers at that instant."""
    keys = [bus.keys.stream(s.name) for s in STREAMS]
    (time, rows), n_bytes = await asyncio.gather(bus.link.run_script(FACTS, keys, []), bus.numbers(bus.keys.in_flight_bytes))
    now = int(time[0]) + int(time[1]) / 1e6
    found = zip(STREAMS, keys, rows, strict=True)
    return now, {s.name: _stream(s, row, now, n_bytes.get(key, 0)) for s, key, row in found}


def _stream(stream: Stream, row: Any, now: float, n_bytes: int) -> StreamFacts:
    length, newest, groups = int(row[0]), text_of(row[1]), row[2]
    return StreamFacts(
        name=stream.name,
        writer=stream.writer,
        is_data=stream.is_data,
        length=length,
        n_bytes=max(0, n_bytes) if stream.is_data else 0,
        newest_id=newest,
        newest_age_s=max(0.0, now - wall_of(newest)) if newest else 0.0,
        readers=tuple(_readers(group, length, now) for group in groups),
        added=int(row[3]),
    )


def _readers(group: Any, length: int, now: float) -> ReadersFacts:
    name, consumers, pending, lag, oldest = group
    if int(lag) < 0:  # before Redis 7: acknowledged entries are deleted, so what is not pending waits for delivery
        lag = max(0, length - int(pending))
    facts = ReadersFacts(text_of(name), int(consumers), int(pending), int(lag))
    if not oldest:
        return facts
    return msgspec.structs.replace(
        facts,
        oldest_id=text_of(oldest[0]),
        oldest_age_s=max(0.0, now - wall_of(text_of(oldest[0]))),
        oldest_owner=text_of(oldest[1]),
        oldest_idle_s=int(oldest[2]) / 1000,
        oldest_deliveries=int(oldest[3]),
    )


async def _read(bus: Bus, stream: Stream, command: str, start: str, stop: str, count: int) -> list[Head]:
    rows = await bus.link.run_script(HEADS, [bus.keys.stream(stream.name)], [command, start, stop, count])
    found: list[Head] = []
    layouts: dict[tuple[bytes, ...], list[str]] = {}  # thousands of entries have the same few
    for entry_id, size, flat in rows:
        names = tuple(flat[::2])
        if (known := layouts.get(names)) is None:
            known = layouts[names] = [text_of(name) for name in names]
        fields = dict(zip(known, [value.decode("utf-8", "replace") for value in flat[1::2]], strict=True))
        blob = fields.get("blob", "")
        blob_size = blob.rpartition(":")[2]
        found.append(Head(stream.name, text_of(entry_id), number_in(blob_size, int(size)), fields))
    return found
