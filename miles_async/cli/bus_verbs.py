"""The verbs of `miles-async bus`. All but `dead retry` and `dead drop` only read."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from typing import Any

import msgspec

from actors.runtime.snapshot import read_snapshot
from bus import STREAMS, Bus, Stream
from bus.dead import Letter, drop, find_letter, read_letters, retry
from bus.errors import BadMessage
from bus.inspect import Consumer, Head, ReadersFacts, all_heads, consumers_of, heads, newest_heads
from bus.streams.entry import Entry
from miles_async.cli.inspection import print_json
from miles_async.cli.status import stream_json
from miles_async.console.show import outline, plain
from miles_async.console.text import duration, human_bytes, plural, shorten, table
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
            print(_json_line(head) if as_json else _line(head))
            position = head.id
        sys.stdout.flush()
        if not follow:
            return 0
        page = await heads(bus, stream, start=f"({position}")
        if not page:
            await asyncio.sleep(FOLLOW_S)


def _json_line(head: Head) -> str:
    return msgspec.json.encode({"id": head.id, "bytes": head.size, **head.fields}).decode()


def _line(head: Head) -> str:
    """One entry on one line: time, id, size, then its plain fields."""
    when = datetime.fromtimestamp(head.wall).strftime("%H:%M:%S.%f")[:-3]
    fields = " ".join(f"{name}={shorten(value, 120)}" for name, value in head.fields.items() if name != "blob")
    return f"{when}  {head.id}  {human_bytes(head.size):>7}  {fields}"


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
        print_json(
            [{"stream": name, **msgspec.to_builtins(facts), "by": msgspec.to_builtins(by)} for name, facts, by in found]
        )
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


async def dead(bus: Bus, verb: str, name: str, *, as_json: bool) -> int:
    """One of list, retry, drop. What cannot be done raises, and nothing has changed then."""
    if verb == "list":
        letters = await read_letters(bus)
        if as_json:
            print_json([letter_json(item) for item in letters])
        else:
            print(_letters_text(letters))
        return 0
    item = await find_letter(bus, name)
    if verb == "drop":
        await drop(bus, item)
        result: dict[str, Any] = {"dropped": item.id, "sample": item.letter.sample_id}
        text = f"dropped {item.id} ({item.letter.stream} {item.letter.sample_id or item.letter.entry_id})"
    else:
        done = await retry(bus, item)
        result = {"retried": item.id, "how": done.how, "stream": done.stream, "entry": done.entry_id}
        text = done.text
    if as_json:
        print_json(result)
    else:
        print(text)
    return 0


def letter_json(item: Letter) -> dict[str, Any]:
    """A letter as plain values, without its body."""
    letter = item.letter
    return {
        "id": item.id,
        "stream": letter.stream,
        "entry_id": letter.entry_id,
        "sample": letter.sample_id,
        "group": letter.group_id,
        "actor": letter.actor,
        "deliveries": letter.deliveries,
        "error": letter.error,
        "traceback": letter.traceback,
        "fields": letter.fields,
        "body_bytes": len(letter.body),
        "wall": letter.wall,
    }


def _letters_text(letters: list[Letter]) -> str:
    if not letters:
        return "no dead letters"
    rows = []
    for item in letters:
        letter = item.letter
        when = datetime.fromtimestamp(letter.wall).strftime("%m-%d %H:%M:%S") if letter.wall else "-"
        who = letter.sample_id or letter.group_id or letter.entry_id
        rows.append(
            [item.id, when, letter.stream, who, letter.actor, str(letter.deliveries), shorten(letter.error, 100)]
        )
    columns = ["id", "when", "stream", "sample", "actor", "tries", "error"]
    body = table(columns, rows, right=("tries",))
    advice = "miles-async bus dead retry ID gives one another chance; bus dead list --json shows tracebacks."
    return f"{body}\n\n{plural(len(letters), 'dead letter')}. {advice}"
