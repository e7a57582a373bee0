"""The verbs of `miles-async bus` that look at streams: they only read. Dead letters are in bus_dead.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.snapshot import read_snapshot
from bus import STREAMS, Bus, Stream, Tail
from bus.errors import BadMessage
from bus.inspect import ConsumerFacts, Head, ReadersFacts, all_heads, consumers_of, stream_facts
from bus.streams.entry import Entry
from miles_async.cli.options import print_json
from miles_async.cli.status import stream_json
from miles_async.console.rows import TEXTS, Decode, Row, flat, rows_of
from miles_async.console.show import outline, plain
from miles_async.console.text import duration, human_bytes, plural, shorten, table
from miles_async.console.where import Where
from miles_async.settings.errors import SettingsError

FOLLOW_S = 1.0  # a read waits so long
LOOK_S = 2.0  # between two looks at how many entries there were
HEAD_OF_ROW = ("stream", "id", "wall", "type")


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


async def tail(bus: Bus, stream: Stream, *, n: int, follow: bool, as_json: bool, where: Where | None = None) -> int:
    """The newest entries, then each new one until interrupted. With `where` each sample that meets it is a line."""
    newest = (await bus.last(stream, max(1, n)))[::-1]
    for entry in newest if n > 0 else ():
        await _print(bus, entry, where, as_json=as_json)
    sys.stdout.flush()
    async with aclosing(_coming(bus, stream, newest[-1].id if newest else "0")) as pages:
        while follow:
            for entry in await anext(pages):
                await _print(bus, entry, where, as_json=as_json)
            sys.stdout.flush()
    return 0


async def _coming(bus: Bus, stream: Stream, position: str) -> AsyncGenerator[list[Entry]]:
    """Entries after `position` as they come, in blocking reads: one that is taken and deleted at once is seen too. What came and
    went while a reply was being read is counted on stderr, where the server tells (Redis 7 or newer)."""
    tail = Tail(bus, [stream], start=position)
    await tail.open()
    first, seen, told, looked = await _added(bus, stream), 0, 0, 0.0
    try:
        while True:
            look = bus.clock.monotonic() >= looked + LOOK_S
            added = await _added(bus, stream) if look else 0  # before the read: what comes in between is not taken for unseen
            page = await tail.read(FOLLOW_S)
            seen += len(page)
            if look:
                looked = bus.clock.monotonic()
                if (unseen := added - first - seen) > told:
                    told = unseen
                    print(f"note: so far {plural(unseen, 'entry')} came and went between two reads", file=sys.stderr)
            yield page
    finally:
        await tail.close()


async def _added(bus: Bus, stream: Stream) -> int:
    return (await stream_facts(bus))[1][stream.name].added


async def _print(bus: Bus, entry: Entry, where: Where | None, *, as_json: bool) -> None:
    if where is None:
        aside = {"blob": entry.blob} if entry.blob else {}
        head = Head(entry.stream.name, entry.id, entry.size, {**entry.fields, **aside})
        print(_json_line(head) if as_json else _line(head))
        return
    for row in await rows_at(bus, entry):
        if where.holds(row):
            print(msgspec.json.encode(row, enc_hook=str).decode() if as_json else _row_line(row))


async def rows_at(bus: Bus, entry: Entry, decode: Decode | None = None) -> list[Row]:
    """Rows of an entry; none of one that does not decode, or whose body is gone or on another host."""
    try:
        return list(rows_of(entry, await bus.message(entry), decode))
    except (BadMessage, FileNotFoundError):
        return []


def _row_line(row: Row) -> str:
    when = datetime.fromtimestamp(row["wall"]).strftime("%H:%M:%S.%f")[:-3]
    shown = {name: value for name, value in row.items() if name not in HEAD_OF_ROW and value not in ("", [], {}, None)}
    return f"{when}  {row['id']}  " + " ".join(f"{name}={shorten(str(value), 60)}" for name, value in shown.items())


async def export(bus: Bus, stream: Stream, out: Path, *, where: Where | None, decode: Decode | None) -> int:
    """All rows of a stream into a file, .jsonl or .parquet. Nothing is taken from the stream."""
    found: list[Row] = []
    n = 0
    start = "-"
    while page := await bus.scan(stream, start=start):
        for entry in page:
            n += 1
            found += [row for row in await rows_at(bus, entry, decode) if where is None or where.holds(row)]
        start = f"({page[-1].id}"
    await asyncio.to_thread(_write, found, out)
    print(f"{plural(len(found), 'row')} of {plural(n, 'entry')} on {stream.name} written to {out}")
    return 0


def _write(rows: list[Row], out: Path) -> None:
    try:
        if out.suffix == ".jsonl":
            out.write_bytes(b"".join(msgspec.json.encode(row, enc_hook=str) + b"\n" for row in rows))
            return
        import pyarrow
        import pyarrow.parquet

        columns = flat(rows)
        names = list(dict.fromkeys(name for row in columns for name in row))
        table = pyarrow.table({name: [row.get(name) for row in columns] for name in names})
        pyarrow.parquet.write_table(table, out)
    except OSError as error:
        raise SettingsError(f"cannot be written: {error.strerror or error}", field="--out", value=str(out)) from None


def _json_line(head: Head) -> str:
    return msgspec.json.encode({"id": head.id, "bytes": head.size, **head.fields}).decode()


def _line(head: Head) -> str:
    """One entry on one line: time, id, size, then its plain fields."""
    when = datetime.fromtimestamp(head.wall).strftime("%H:%M:%S.%f")[:-3]
    fields = " ".join(f"{name}={shorten(value, 120)}" for name, value in head.fields.items() if name != "blob")
    return f"{when}  {head.id}  {human_bytes(head.size):>7}  {fields}"


async def show(bus: Bus, stream: Stream | None, name: str, *, as_json: bool, decode: Decode | None = None) -> int:
    """One entry decoded, of one stream or of the last one of the flow that has it, with the texts of its samples. Its
    bytes are data: a message that does not decode is shown as such."""
    entry = await _find(bus, (stream,) if stream is not None else STREAMS[::-1], name)
    stream = entry.stream
    content: Any
    try:
        content = plain(await bus.message(entry))
    except BadMessage as error:
        content = {"undecodable": str(error), "body": plain(entry.body)}
    except FileNotFoundError as error:
        content = {"undecodable": f"its body lies in {error.filename}, which is not on this host"}
    fields = dict(entry.fields)
    texts = [] if decode is None else [row for row in await rows_at(bus, entry, decode) if "prompt" in row]
    if as_json:
        shown = {"stream": stream.name, "id": entry.id, "bytes": entry.size, "fields": fields, "message": content}
        print_json(shown | ({"texts": [{k: row[k] for k in (*TEXTS, "said") if k in row} for row in texts]} if texts else {}))
        return 0
    print(f"{stream.name} {entry.id}, {human_bytes(entry.size)}" + (f" in blob {entry.blob}" if entry.blob else ""))
    print("\n".join([*outline(fields, "fields"), *outline(content, "message")]))
    for row in texts:
        print(f"\n{row['sample']}  prompt:\n{row['prompt']}")
        if "response" in row:
            print(f"{row['sample']}  response:\n{row['response']}")
    return 0


async def _find(bus: Bus, streams: Sequence[Stream], name: str) -> Entry:
    ms, dash, seq = name.partition("-")
    for stream in streams:
        entry_id = name if dash and ms.isdecimal() and seq.isdecimal() else ""
        if not entry_id:
            entry_id = next((h.id for h in reversed(await all_heads(bus, stream)) if name in (h.sample, h.group)), "")
        found = await bus.scan(stream, start=entry_id, count=1) if entry_id else []
        if found and found[0].id == entry_id:
            return found[0]
    where = streams[0].name if len(streams) == 1 else "any stream"
    raise SettingsError(f"no entry {name!r} on {where}", remedy=f"It may have moved on: try miles-async trace {name}.")


async def lag(bus: Bus, *, as_json: bool) -> int:
    """Every reader of every data stream, and who in it holds what."""
    snapshot = await read_snapshot(bus)
    found: list[tuple[str, ReadersFacts, list[ConsumerFacts]]] = []
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
