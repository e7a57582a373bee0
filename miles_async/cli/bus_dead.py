"""`miles-async bus dead`: entries that failed for good are listed, given another chance, or dropped."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from bus import Bus
from bus.dead import Letter, drop, find_letter, read_letters, retry
from miles_async.cli.options import print_json
from miles_async.console.text import plural, shorten, table


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
    letter, same = item.letter, ("stream", "entry_id", "actor", "deliveries", "error", "traceback", "fields", "wall")
    found = {"id": item.id, "sample": letter.sample_id, "group": letter.group_id, "body_bytes": len(letter.body)}
    return found | {name: getattr(letter, name) for name in same}


def _letters_text(letters: list[Letter]) -> str:
    if not letters:
        return "no dead letters"
    rows = []
    for item in letters:
        letter = item.letter
        when = datetime.fromtimestamp(letter.wall).strftime("%m-%d %H:%M:%S") if letter.wall else "-"
        who = letter.sample_id or letter.group_id or letter.entry_id
        rows.append([item.id, when, letter.stream, who, letter.actor, str(letter.deliveries), shorten(letter.error, 100)])
    columns = ["id", "when", "stream", "sample", "actor", "tries", "error"]
    body = table(columns, rows, right=("tries",))
    advice = "miles-async bus dead retry ID gives one another chance; bus dead list --json shows tracebacks."
    return f"{body}\n\n{plural(len(letters), 'dead letter')}. {advice}"
