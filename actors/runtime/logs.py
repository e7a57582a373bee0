"""Logs read without acknowledgement: whatever lies there, the reader goes on.

An entry that cannot be read, or that the reader cannot take in, is skipped, counted and said once. The role that is named in
`LETTERS` also writes it to the dead letters; the state field `unread/<stream>` remembers how far, so that a reader that begins
the log anew does not write it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

from actors.runtime.consume import STOPS, letter
from actors.runtime.content import fault_of
from actors.runtime.context import Context
from bus import Commit, Entry, Out
from bus.errors import BadMessage
from bus.messages.events import EventKind
from bus.streams.hop import id_key
from bus.topology import DEAD

LETTERS = {"verdicts": "sampler", "policy": "sampler", "active": "sampler", "events": "publisher", "eval.results": "evaluator"}


async def fold_log(
    context: Context, entries: Iterable[Entry], fold: Callable[[Entry, Any], Any], *, types: Container[str] | None = None
) -> None:
    """Hand each entry with its message to `fold`, in order. `types`: by the readable field, those that matter; the others are
    not even decoded."""
    for entry in entries:
        if types is not None and entry.fields.get("type") not in types:
            continue
        try:
            message = await context.bus.message(entry)
            if fault := fault_of(message):
                raise BadMessage(f"message on log {entry.stream.name}: {fault}")
            done = fold(entry, message)
            if inspect.isawaitable(done):
                await done
        except STOPS:
            raise
        except Exception as error:  # noqa: BLE001 - a log is for all: no entry of it may end a reader
            await _skip(context, entry, error)


async def _skip(context: Context, entry: Entry, error: Exception) -> None:
    name = entry.stream.name
    await context.refusals.add(f"log/{name}", f"{entry.id}: {type(error).__name__}: {error}", kind=EventKind.UNREADABLE)
    if LETTERS.get(name) != context.spec.role:
        return
    field = f"unread/{name}"
    written = await context.bus.state(field)
    if not written or id_key(written) < id_key(entry.id):
        dead = letter(context, entry, error)
        await context.bus.commit(Commit(append=(Out(DEAD, dead),), state={field: entry.id}))
