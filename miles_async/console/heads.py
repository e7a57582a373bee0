"""Stream entries as an operator reads them: id and plain fields, the body left on the server."""

from __future__ import annotations

from typing import Any

import msgspec

from bus import Bus, Stream

PAGE = 500

# Bodies are cut off on the server: a look at a full stream must not move its gigabytes.
# KEYS 1 stream   ARGV command (XRANGE | XREVRANGE), from, to, count   Returns {id, body bytes, {field, value, ...}}...
_HEADS = """
local found = {}
for n, entry in ipairs(redis.call(ARGV[1], KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])) do
  local fields, size, all = {}, 0, entry[2]
  for f = 1, #all, 2 do
    if all[f] == 'body' then size = #all[f + 1] else fields[#fields + 1] = all[f]; fields[#fields + 1] = all[f + 1] end
  end
  found[n] = {entry[1], size, fields}
end
return found
"""


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


def wall_of(entry_id: str) -> float:
    """Server time inside an entry id, seconds."""
    return int(entry_id.partition("-")[0]) / 1000


def order_of(entry_id: str) -> tuple[int, int]:
    """Sort key of an entry id."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


async def heads(bus: Bus, stream: Stream, *, start: str = "-", stop: str = "+", count: int = PAGE) -> list[Head]:
    """Oldest first, from `start` on."""
    return await _read(bus, stream, "XRANGE", start, stop, count)


async def newest_heads(bus: Bus, stream: Stream, count: int) -> list[Head]:
    """The newest `count`, oldest of them first."""
    return (await _read(bus, stream, "XREVRANGE", "+", "-", count))[::-1]


async def all_heads(bus: Bus, stream: Stream, *, limit: int = 200_000) -> list[Head]:
    """Everything on a stream, in pages, at most `limit`."""
    found: list[Head] = []
    start = "-"
    while len(found) < limit and (page := await heads(bus, stream, start=start)):
        found += page
        start = f"({page[-1].id}"
        if len(page) < PAGE:
            break
    return found


async def pending_entries(bus: Bus, stream: Stream, readers: str, *, limit: int = 10_000) -> list[Pending]:
    """Delivered and unacknowledged entries, oldest first; none when the readers do not exist."""
    found: list[Pending] = []
    start = "-"
    while len(found) < limit:
        rows = await pending_page(bus, stream, readers, start=start, count=PAGE)
        found += rows
        if len(rows) < PAGE:
            break
        start = f"({rows[-1].id}"
    return found


async def pending_page(bus: Bus, stream: Stream, readers: str, *, start: str = "-", count: int = 10) -> list[Pending]:
    """Up to `count` pending entries from `start` on; the readers must exist."""
    rows = await bus.link.run("XPENDING", bus.keys.stream(stream.name), readers, start, "+", count)
    return [
        Pending(stream.name, readers, _text(row[0]), _text(row[1]), int(row[2]) / 1000, int(row[3]))
        for row in rows or []
    ]


async def readers_of(bus: Bus, stream: Stream) -> list[dict[str, Any]]:
    """XINFO GROUPS as dicts with text keys; empty when the stream does not exist."""
    exists = await bus.link.run("EXISTS", bus.keys.stream(stream.name))
    if not int(exists):
        return []
    raw = await bus.link.run("XINFO", "GROUPS", bus.keys.stream(stream.name))
    return [{_text(k): v for k, v in zip(row[::2], row[1::2], strict=True)} for row in raw]


async def _read(bus: Bus, stream: Stream, command: str, start: str, stop: str, count: int) -> list[Head]:
    rows = await bus.link.run("EVAL", _HEADS, 1, bus.keys.stream(stream.name), command, start, stop, count)
    found: list[Head] = []
    for entry_id, size, flat in rows:
        fields = {_text(k): _text(v) for k, v in zip(flat[::2], flat[1::2], strict=True)}
        blob = fields.get("blob", "")
        blob_size = blob.rpartition(":")[2]
        found.append(Head(stream.name, _text(entry_id), int(blob_size) if blob_size.isdigit() else int(size), fields))
    return found


def _text(value: bytes | str | int) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


__all__ = (
    "Head",
    "Pending",
    "all_heads",
    "heads",
    "newest_heads",
    "order_of",
    "pending_entries",
    "pending_page",
    "readers_of",
    "wall_of",
)
