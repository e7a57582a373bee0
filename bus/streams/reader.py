"""Reading: leased entries of data streams (Reader), positions in logs (Tail). Each has its own connection, because a
blocking read occupies one. A read in flight is never cancelled: its entries would sit in the pending list unseen. Block
times are short instead, and whoever wants to stop asks between two reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from bus.errors import InvariantBroken
from bus.streams.entry import Entry
from bus.streams.hop import id_key, make_entry, text_of
from bus.streams.link import refuses_writes
from bus.streams.redis import Bus
from bus.streams.wire import Wire
from bus.topology import Stream

# KEYS stream  ARGV readers   Returns milliseconds, by the server's clock, since the oldest entry that was given to nobody yet
_OLDEST = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local f = {}
  for i = 1, #info, 2 do f[info[i]] = info[i + 1] end
  if f['name'] == ARGV[1] then
    local first = redis.call('XRANGE', KEYS[1], '(' .. f['last-delivered-id'], '+', 'COUNT', 1)[1]
    if not first then return 0 end
    local now = redis.call('TIME')
    return math.max(0, now[1] * 1000 + math.floor(now[2] / 1000) - tonumber(string.match(first[1], '^%d+')))
  end
end
return 0
"""
# KEYS streams, the first one first   ARGV readers, consumer, for each stream how many entries   As XREADGROUP, of the first that
# has any: rooms that read several streams look at all of them in one round trip.
_FIRST = """
for n, key in ipairs(KEYS) do
  local found = redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[n + 2], 'STREAMS', key, '>')
  if found then return found end
end
return false
"""
# KEYS stream   ARGV readers   Begins the lease of all that is pending anew, whoever has it
_ANEW = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local from, n = '-', 0
repeat
  local rows = redis.pcall('XPENDING', KEYS[1], ARGV[1], from, '+', 500)
  if rows.err then return n end
  for _, row in ipairs(rows) do
    redis.call('XCLAIM', KEYS[1], ARGV[1], row[2], 0, row[1], 'JUSTID')
    from, n = '(' .. row[1], n + 1
  end
until #rows < 500
return n
"""
GIVEN = 256  # ids; far more than are lost at once
SHARED = 16  # of them at the start of who reads only what comes
QUIET_S = 10.0  # without an entry, before this looks whether some were delivered under its name to a zombie
READ_BYTES = 4 << 20  # a reply above 9 to 16 MB halves throughput


class Reader:
    """One consumer of one or more streams that share a readers name, in order of priority.

    `held` are the entries given out and not yet forgotten: they are never given out twice by this reader, also when the
    pending list is read again after a lost connection.
    """

    def __init__(self, bus: Bus, streams: Sequence[Stream], readers: str, me: str) -> None:
        self._bus = bus
        self.streams = tuple(streams)
        self.readers = readers
        self.me = me
        self._wire = Wire(bus.config.url)
        self._restarts_seen = bus.link.server_restarts
        self._mean_bytes = 1024.0
        self.held: dict[tuple[str, str], Entry] = {}
        self._reread, self._looked_at = True, bus.clock.monotonic()
        self._times: tuple[float, float] | None = None  # the server's and ours, when they were compared last
        self.recovered = False  # entries that were pending at the start have all been given out, and more was asked for
        self._offered: list[Entry] = []

    async def open(self) -> None:
        """Create the consumer groups if need be."""
        for stream in self.streams:
            await self._bus.ensure_readers(stream, self.readers)

    async def close(self) -> None:
        """Close the connection; held entries stay pending for their next owner."""
        await self._wire.close()

    async def read(self, count: int, block_s: float, wanted: Sequence[tuple[Stream, int]] | None = None) -> list[Entry]:
        """Up to `count` entries: claimed and own pending ones first, then new ones in stream order of priority. `wanted`: only of
        these streams, in this order, and at most so many of each; it says nothing about what was claimed or pending."""
        if count <= 0:
            return []
        if self._offered:
            given, self._offered = self._offered[:count], self._offered[count:]
            return [entry for entry in given if (entry.stream.name, entry.id) in self.held]
        if self._reread or self._restarts_seen != self._bus.link.server_restarts:
            self._restarts_seen = self._bus.link.server_restarts
            self.recovered = False
            entries = await self._own_pending(count)
            self._reread = len(entries) >= count
            if entries:
                return entries
        elif self._bus.names.hold is not None and self._bus.clock.monotonic() - self._looked_at > QUIET_S:
            self._looked_at = self._bus.clock.monotonic()
            if entries := await self._own_pending(count):
                return entries
        self.recovered = True
        count = max(1, min(count, int(READ_BYTES / self._mean_bytes)))
        limits = [(stream, count) for stream in self.streams] if wanted is None else wanted
        if limits and (len(limits) > 1 or block_s <= 0):
            keys = [self._bus.keys.stream(stream.name) for stream, _ in limits]
            most = [min(count, most) for _, most in limits]
            if found := await self._take(["EVAL", _FIRST, len(keys), *keys, self.readers, self.me, *most]):
                return found
        if block_s <= 0 or not limits:
            return []
        keys = [self._bus.keys.stream(stream.name) for stream, _ in limits]
        few = max(1, count // len(limits))
        command = ("XREADGROUP", "GROUP", self.readers, self.me, "COUNT", few, "BLOCK", int(block_s * 1000), "STREAMS", *keys)
        return await self._take([*command, *[">"] * len(keys)], block_s)

    async def unread_s(self, stream: Stream) -> float:
        """Seconds that the oldest entry of a stream has waited without a reader; 0 when there is none."""
        key = self._bus.keys.stream(stream.name)
        return int(await self._bus.link.run("EVAL", _OLDEST, 1, key, self.readers)) / 1000

    def forget(self, entries: Iterable[Entry]) -> None:
        """These are finished (committed, moved or given away)."""
        for entry in entries:
            self.held.pop((entry.stream.name, entry.id), None)

    @property
    def offered(self) -> int:
        """Claimed entries that the next reads hand out."""
        return len(self._offered)

    def offer(self, entries: Iterable[Entry]) -> None:
        """Hand out claimed entries at the next reads."""
        self._offered += entries

    def retry_later(self, entry: Entry) -> None:
        """Give the entry out again at one of the next reads; it stays held meanwhile."""
        again = msgspec.structs.replace(entry, deliveries=entry.deliveries + 1)
        self.held[(entry.stream.name, entry.id)] = again
        self._offered.append(again)

    async def renew(self, entries: Iterable[Entry] | None = None) -> set[str]:
        """Renew leases of held entries; returns ids whose lease was lost meanwhile (they are forgotten)."""
        by_stream: dict[str, list[Entry]] = {}
        for entry in list(self.held.values()) if entries is None else entries:
            by_stream.setdefault(entry.stream.name, []).append(entry)
        lost: set[str] = set()
        for name, group in by_stream.items():
            key = self._bus.keys.stream(name)
            mine = await self._deliveries(key, [e.id for e in group])
            keep = [e for e in group if e.id in mine]
            if keep:  # JUSTID: resets idle, keeps the delivery count
                await self._bus.link.run("XCLAIM", key, self.readers, self.me, 0, *(e.id for e in keep), "JUSTID")
            gone = [e for e in group if e.id not in mine and (name, e.id) in self.held]  # not what we finished meanwhile
            lost |= {e.id for e in gone}
            self.forget(gone)
        return lost

    async def recount(self, deliveries: Iterable[tuple[Entry, int]]) -> None:
        """Set the server's delivery counts of entries that are held here; their leases are renewed."""
        for entry, count in deliveries:
            key = self._bus.keys.stream(entry.stream.name)
            await self._bus.link.run("XCLAIM", key, self.readers, self.me, 0, entry.id, "RETRYCOUNT", count, "JUSTID")

    async def _deliveries(self, key: str, entry_ids: Sequence[str]) -> dict[str, int]:
        """How often each entry between the first and the last of these ids that is still pending under our name was delivered."""
        ids = sorted(entry_ids, key=id_key)
        counts: dict[str, int] = {}
        start = ids[0]
        while True:
            rows = await self._bus.link.run("XPENDING", key, self.readers, start, ids[-1], 500, self.me)
            counts |= {text_of(row[0]): int(row[3]) for row in rows}
            if len(rows) < 500:
                return counts
            start = f"({text_of(rows[-1][0])}"

    async def clock_step(self, lease_s: float) -> float:
        """By how many seconds the server's clock was set since this was asked last; 0 for less than half a lease. Leases are times
        of that clock: set forth it ends those of the living, set back it keeps those of the dead for as long. So all begin anew."""
        before, now = self._times, (await self._bus.server_time(), self._bus.clock.monotonic())
        self._times = now
        step_s = (now[0] - before[0]) - (now[1] - before[1]) if before is not None else 0.0
        if abs(step_s) < lease_s / 2:
            return 0.0
        for stream in self.streams:
            await self._bus.link.run("EVAL", _ANEW, 1, self._bus.keys.stream(stream.name), self.readers)
        return step_s

    async def claim(self, idle_s: float, count: int = 64) -> list[Entry]:
        """Take over up to `count` entries that no living owner has renewed for `idle_s`."""
        claimed: list[Entry] = []
        for stream in self.streams:
            key = self._bus.keys.stream(stream.name)
            cursor = "0-0"
            # One call looks at 10 * COUNT pending entries; behind a long row of living ones the dead come later.
            while len(claimed) < count:
                reply = await self._bus.link.run(
                    *("XAUTOCLAIM", key, self.readers, self.me, int(idle_s * 1000), cursor),
                    *("COUNT", count - len(claimed)),
                )
                raw = [r for r in reply[1] if r is not None and r[1] is not None]
                fresh = [r for r in raw if (stream.name, text_of(r[0])) not in self.held]
                claimed += await self._hold(stream, fresh, with_deliveries=True)
                cursor = text_of(reply[0])
                if cursor == "0-0":
                    break
        return claimed

    async def _own_pending(self, count: int) -> list[Entry]:
        """Pending entries of ours that nobody here works on. Listed first and claimed then, because reading them back
        would raise the delivery count of the held ones too."""
        found: list[Entry] = []
        for stream in self.streams:
            key = self._bus.keys.stream(stream.name)
            start = "-"
            while len(found) < count:
                rows = await self._pending_rows(key, start)
                if not rows:
                    break
                start = f"({text_of(rows[-1][0])}"
                ids = [text_of(row[0]) for row in rows if (stream.name, text_of(row[0])) not in self.held]
                ids = ids[: count - len(found)]
                if ids:
                    raw = await self._bus.link.run("XCLAIM", key, self.readers, self.me, 0, *ids)
                    found += await self._hold(stream, [r for r in raw if r and r[1]], with_deliveries=True)
        return found

    async def _pending_rows(self, key: str, start: str) -> list[Any]:
        try:
            rows: list[Any] = await self._bus.link.run("XPENDING", key, self.readers, start, "+", 100, self.me)
        except InvariantBroken as error:
            if "NOGROUP" not in str(error):
                raise
            await self.open()  # a server that lost its last second may have lost the group too
            return []
        return rows

    async def _take(self, command: list[Any], block_s: float = 0.0) -> list[Entry]:
        raw = _by_stream(await self._bus.link.retry(lambda: self._call(command, block_s)), self.streams)
        found: list[Entry] = []
        for name, rows in raw.items():
            # A server that lost its last second delivers anew what is held here: it is pending again, and that is all.
            fresh = [row for row in rows if (name, text_of(row[0])) not in self.held]
            found += await self._hold(next(stream for stream in self.streams if stream.name == name), fresh)
        if found:
            self._looked_at = self._bus.clock.monotonic()
        for entry in found:
            self._mean_bytes += 0.1 * (entry.size + 256 - self._mean_bytes) if not entry.blob else 0.0
        return found

    async def _hold(self, stream: Stream, rows: list[Any], *, with_deliveries: bool = False) -> list[Entry]:
        counts: dict[str, int] = {}
        if with_deliveries and rows:
            counts = await self._deliveries(self._bus.keys.stream(stream.name), [text_of(row[0]) for row in rows])
        entries = [make_entry(stream, self.readers, row, counts.get(text_of(row[0]), 1)) for row in rows]
        for entry in entries:
            self.held[(stream.name, entry.id)] = entry
        return entries

    async def _call(self, command: list[Any], block_s: float) -> Any:
        try:
            return await self._asked(command, block_s)
        except ResponseError as error:
            if refuses_writes(error):
                await self._wire.close()  # a replica by now; the primary may be elsewhere
                raise
            if not str(error).startswith("NOGROUP"):
                raise await self._bus.link.explained(error, tuple(command)) from error
            await self.open()  # a server that lost its last second may have lost the group too
            return await self._asked(command)
        except (ConnectionError, TimeoutError, OSError):
            self._reread = True  # entries may have been given to us in a reply that never came
            raise

    async def _asked(self, command: Sequence[Any], block_s: float = 0.0) -> Any:
        """The reply; in the same round trip who has our name by then. What is delivered to a zombie nobody works on: it stays
        pending under that name, and whoever has it looks there (QUIET_S)."""
        if self._bus.names.hold is None:
            return await self._wire.call(*command, block_s=block_s)
        words = ("HGET", self._bus.keys.names, self._bus.names.hold.name)
        reply, word = await self._wire.calls(tuple(command), words, block_s=block_s)
        await self._bus.names.check(word)
        return reply


class Tail:
    """Positions in one or more logs, each read from `start` on ("0" = all, "$" = only what comes)."""

    def __init__(self, bus: Bus, streams: Sequence[Stream], start: str = "0") -> None:
        self._bus = bus
        self._streams = tuple(streams)
        self._start = start
        self._wire = Wire(bus.config.url)
        self._restarts_seen = bus.link.server_restarts
        self._given: dict[str, deque[str]] = {}  # ids of the entries given out last, by stream
        self._opened: dict[str, str] = {}  # positions at the start
        self.positions: dict[str, str] = {}

    async def open(self) -> None:
        """Resolve "$" to the present end, so that nothing written from now on is missed. Opened again it begins anew."""
        self._restarts_seen = self._bus.link.server_restarts
        self._given.clear()
        for stream in self._streams:
            if self._start != "$":
                self.positions[stream.name] = self._opened[stream.name] = self._start
                continue
            newest = await self._bus.last(stream, SHARED)
            self.positions[stream.name] = self._opened[stream.name] = newest[0].id if newest else "0"
            self._given[stream.name] = deque((e.id for e in reversed(newest)), maxlen=GIVEN)

    async def close(self) -> None:
        """Close the connection."""
        await self._wire.close()

    async def __aenter__(self) -> Tail:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def read(self, block_s: float, count: int = 256) -> list[Entry]:
        """New entries of all streams, oldest first; empty after `block_s` without any."""
        if self._restarts_seen != self._bus.link.server_restarts:
            self._restarts_seen = self._bus.link.server_restarts
            await self._step_back()
        command: list[Any] = ["XREAD", "COUNT", count]
        if block_s > 0:
            command += ["BLOCK", int(block_s * 1000)]
        keys = [self._bus.keys.stream(s.name) for s in self._streams]
        command += ["STREAMS", *keys, *(self.positions[s.name] for s in self._streams)]
        reply = await self._bus.link.retry(lambda: self._wire.call(*command, block_s=block_s))
        rows = _by_stream(reply, self._streams)
        found: list[Entry] = []
        for stream in self._streams:
            for raw in rows.get(stream.name, []):
                found.append(make_entry(stream, "", raw))
                self.positions[stream.name] = found[-1].id
                self._given.setdefault(stream.name, deque(maxlen=GIVEN)).append(found[-1].id)
        found.sort(key=lambda e: id_key(e.id))
        return found

    async def _step_back(self) -> None:
        """To the last entry given out that a server which lost its last moments still has. It counts on from there, and where its
        clock is behind that of the one before, with ids below our position for as long."""
        for stream in self._streams:
            key, known = self._bus.keys.stream(stream.name), self._given.get(stream.name)
            if not known:
                continue
            while known and not await self._bus.link.run("XRANGE", key, known[-1], known[-1]):
                known.pop()
            self.positions[stream.name] = known[-1] if known else self._opened.get(stream.name, "0")


def _by_stream(reply: Any, streams: Sequence[Stream]) -> dict[str, list[Any]]:
    if not reply:
        return {}
    rows: dict[str, list[Any]] = {}
    for key, entries in reply:
        name = text_of(key).rpartition("}:")[2]
        if all(name != s.name for s in streams):
            raise InvariantBroken(f"Redis answered for stream {name!r}, which was not asked for")
        rows[name] = list(entries)
    return rows
