"""`miles-async bus ls|tail|show|lag`: reading only."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from bus import STREAMS, Bus, Stream
from bus.errors import BadMessage
from bus.inspect import Consumer, Head, ReadersFacts, all_heads, consumers_of, heads, newest_heads
from bus.streams.entry import Entry
from miles_async.cli.bus import fields_line
from miles_async.cli.inspection import print_json
from miles_async.cli.status import stream_json
from miles_async.console.show import outline, plain
from miles_async.console.snapshot import read_snapshot
from miles_async.console.text import duration, human_bytes, plural, table
from miles_async.settings.errors import SettingsError

FOLLOW_S = 0.3


async def ls(bus: Bus, *, as_json: bool) -> int:
    """Every stream on one line."""
    snapshot = await read_snapshot(bus)
    if as_json:
        print_json({"run": snapshot.run, "streams": {n: stream_json(f) for n, f in snapshot.streams.items()}})
        return 0
    rows = []
    for facts, stream in zip(snapshot.streams.values(), STREAMS, strict=True):
        readers = ",".join(stream.readers) or f"({', '.join(stream.tailed_by)})"
        held = [str(facts.pending), str(facts.lag), human_bytes(facts.n_bytes)] if facts.is_data else ["", "", ""]
        newest = f"{duration(facts.newest_age_s)} ago" if facts.newest_id else "-"
        rows.append([facts.name, str(facts.length), *held, newest, facts.writer, readers])
    columns = ["stream", "entries", "held", "waiting", "bytes", "newest", "writer", "readers (logs: who follows)"]
    print(table(columns, rows, right=columns[1:6]))
    return 0


async def tail(bus: Bus, stream: Stream, *, n: int, follow: bool, as_json: bool) -> int:
    """The newest entries, then each new one until interrupted. Asks twice a second: bodies stay on the server."""
    newest = await newest_heads(bus, stream, max(1, n))
    position = newest[-1].id if newest else "0"
    page = newest if n > 0 else []
    while True:
        for head in page:
            print(_json_line(head) if as_json else fields_line(head))
            position = head.id
        sys.stdout.flush()
        if not follow:
            return 0
        page = await heads(bus, stream, start=f"({position}")
        if not page:
            await asyncio.sleep(FOLLOW_S)


def _json_line(head: Head) -> str:
    return msgspec.json.encode({"id": head.id, "bytes": head.size, **head.fields}).decode()


async def show(bus: Bus, stream: Stream, name: str, *, as_json: bool) -> int:
    """One entry decoded. Its bytes are data: a message that does not decode is shown as such."""
    entry = await _find(bus, stream, name)
    content: Any
    try:
        content = plain(await bus.message(entry))
    except BadMessage as error:
        content = {"undecodable": str(error), "body": plain(entry.body)}
    except FileNotFoundError as error:
        content = {"undecodable": f"its body lies in {error.filename}, which is not on this host"}
    fields = dict(entry.fields)
    if as_json:
        print_json({"stream": stream.name, "id": entry.id, "bytes": entry.size, "fields": fields, "message": content})
        return 0
    print(f"{stream.name} {entry.id}, {human_bytes(entry.size)}" + (f" in blob {entry.blob}" if entry.blob else ""))
    print("\n".join([*outline(fields, "fields"), *outline(content, "message")]))
    return 0


async def _find(bus: Bus, stream: Stream, name: str) -> Entry:
    ms, dash, seq = name.partition("-")
    entry_id = name if dash and ms.isdigit() and seq.isdigit() else ""
    if not entry_id:
        entry_id = next((h.id for h in reversed(await all_heads(bus, stream)) if name in (h.sample, h.group)), "")
    found = await bus.scan(stream, start=entry_id, count=1) if entry_id else []
    if not found or found[0].id != entry_id:
        raise SettingsError(
            f"no entry {name!r} on {stream.name}",
            remedy=f"It may have moved on: try miles-async trace {name}, or miles-async bus tail {stream.name}.",
        )
    return found[0]


async def lag(bus: Bus, *, as_json: bool) -> int:
    """Every reader of every data stream, and who in it holds what."""
    snapshot = await read_snapshot(bus)
    found: list[tuple[str, ReadersFacts, list[Consumer]]] = []
    for stream in STREAMS:
        for facts in snapshot.streams[stream.name].readers:
            found.append((stream.name, facts, await consumers_of(bus, stream, facts.readers)))
    if as_json:
        print_json([{"stream": name, **msgspec.to_builtins(facts), "by": msgspec.to_builtins(by)} for name, facts, by in found])
        return 0
    rows = []
    for name, facts, by in found:
        held = ", ".join(f"{c.name} {c.pending}" for c in by if c.pending) or "-"
        oldest = f"{duration(facts.oldest_age_s)} ({facts.oldest_owner})" if facts.oldest_id else "-"
        idle = duration(facts.oldest_idle_s) if facts.oldest_id else "-"
        again = str(facts.oldest_deliveries) if facts.oldest_id else "-"
        rows.append([name, facts.readers, str(facts.lag), str(facts.pending), oldest, idle, again, held])
    columns = ["stream", "readers", "waiting", "held", "oldest held", "renewed", "deliveries", "held by"]
    print(table(columns, rows, right=("waiting", "held", "renewed", "deliveries")) if rows else "no readers yet")
    waiting = sum(facts.lag for _, facts, _ in found)
    print(f"\n{plural(waiting, 'entry')} not delivered, {sum(f.pending for _, f, _ in found)} held")
    return 0


__all__ = ("lag", "ls", "show", "tail")
