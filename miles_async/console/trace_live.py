"""One sample's whole life while the run lives: from the streams, and from its files what they do not remember any more (steps whose
entries were trimmed). Of logs only what names the sample or its group is read, however long they are.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.records import Record, records_of
from actors.runtime.prompts import Tokenizer
from bus import BY_NAME, Bus
from bus.errors import BadMessage
from bus.identity import read_identity
from bus.inspect import all_heads, entries_with
from bus.messages.control import Event
from bus.messages.groups import OpenGroup
from bus.messages.samples import Mark
from bus.topology import DEAD, EVENTS, GROUPS, POLICY, TRAINED, VERDICTS
from miles_async.console.places import DOING, Place, Places, read_places
from miles_async.console.show import plain
from miles_async.console.text import shorten
from miles_async.console.trace import Moment, Trace, ended_state, group_of, moments_of, recorded, size_of, told

OF_STEPS = ("policy.restored", "policy.checkpointed")


async def trace(bus: Bus, sample_id: str, run_dir: Path | None = None) -> Trace:
    """Follow one sample on a living bus, and in the run's file if there is one."""
    group = group_of(sample_id)
    places = await read_places(bus, evals=True)
    opened = places.opened(sample_id)
    place = _find(places, sample_id, group)
    task = await _task(bus, place, sample_id) if place is not None else {}
    seen = await asyncio.to_thread(recorded, run_dir, group, sample_id) if run_dir is not None else []
    records = [*seen, *await _records(bus, group, sample_id)]
    moments = moments_of(records, sample_id, group)
    n_samples = 0
    if place is None and (whole := opened or places.opened(group)) is not None:
        n_samples = whole.n_samples
    elif place is None and moments and run_dir is not None:
        n_samples = size_of(run_dir, group, records, sample_id)
    if not any(moment.what == "made" for moment in moments):
        moments += [Moment(m.wall, m.what, told(m)) for m in _marks(task)]
    moments += await _events(bus, sample_id, group)
    moments += await _kept(bus, group)
    saved = len(await bus.load_prefix(sample_id))
    if opened is not None:
        text = f"group issued at step {opened.step}, prompt {opened.prompt_id} (row {opened.source_index}, "
        text += f"epoch {opened.epoch}), {opened.n_samples} samples" + (", issued again" if opened.attempt else "")
        moments.append(Moment(0.0, "issued", text, plain(opened)))
    now = bus.clock.wall()
    state = _state(place, opened, moments, now)
    if saved:
        state += f"; {saved} saved pieces of its prefix wait for whoever resumes it"
    return Trace(
        sample=sample_id,
        group=group,
        found=place is not None or opened is not None or bool(moments),
        state=state,
        place={"stream": place.head.stream, "entry": place.head.id, "fields": place.head.fields,
               **(plain(place.pending) if place.pending else {})} if place else {},
        task=task,
        n_samples=n_samples,
        moments=tuple(sorted(moments, key=lambda m: m.wall)),
    )  # fmt: skip


def _marks(task: dict[str, Any]) -> list[Mark]:
    """What a sample that is still under way has gone through."""
    response = task.get("rollout", task).get("response") or {}
    return msgspec.convert([list(m.values()) for m in response.get("marks") or ()], list[Mark])


def _find(places: Places, sample_id: str, group: str) -> Place | None:
    found: Place | None = None
    for name, heads in places.heads.items():
        for head in heads:
            if head.sample == sample_id or (name == GROUPS.name and places.holds(head, sample_id, group)):
                found = places.place(head)
    return found


async def _task(bus: Bus, place: Place, sample_id: str) -> dict[str, Any]:
    """Prompt, sampling and response of the sample in its entry, decoded and never executed."""
    stream = BY_NAME[place.head.stream]
    entries = await bus.scan(stream, start=place.head.id, count=1)
    if not entries or entries[0].id != place.head.id:
        return {}  # it moved on meanwhile
    try:
        message = await bus.message(entries[0])
    except BadMessage as error:
        return {"undecodable": str(error)}
    value = plain(message)
    members = [m for m in value.get("samples", []) if m["rollout"]["task"]["sample_id"] == sample_id]
    return await _with_text(bus, dict(members[0] if members else value))


async def _with_text(bus: Bus, value: dict[str, Any]) -> dict[str, Any]:
    """With its response in words, where this host has the run's tokenizer."""
    tokens = value.get("rollout", value).get("response", {}).get("tokens")
    known = await read_identity(bus)
    directory = Path(str(known.worker.get("model_path", "")) if known is not None else "")
    if not tokens or not (directory / "tokenizer.json").exists():
        return value
    return value | {"text": await asyncio.to_thread(lambda: Tokenizer(str(directory)).decode(tokens))}


async def _records(bus: Bus, group: str, sample_id: str) -> list[Record]:
    """Lines that the recorder would write, for entries that name this sample or group."""
    found: list[Record] = []
    for stream, types in ((POLICY, OF_STEPS), (VERDICTS, ()), (DEAD, ()), (TRAINED, ())):
        for entry in await entries_with(bus, stream, group, types):
            try:
                message = await bus.message(entry)
            except BadMessage:
                continue
            found += records_of(entry, message)
    return found


async def _kept(bus: Bus, group: str) -> list[Moment]:
    found: list[Moment] = []
    for head in await all_heads(bus, VERDICTS):
        if head.group == group and head.fields.get("note") == "kept":
            found.append(
                Moment(head.wall, "kept", f"group kept by the filter, {head.fields.get('tokens', '?')} tokens")
            )
    return found


async def _events(bus: Bus, sample_id: str, group: str) -> list[Moment]:
    """Notes of actors that name the sample or its group as a whole word."""
    word = re.compile(rf"(?<![\w/.-])(?:{re.escape(sample_id)}|{re.escape(group)})(?![\w/])")
    found: list[Moment] = []
    for entry in await entries_with(bus, EVENTS, group):
        try:
            event = await bus.message(entry)
        except BadMessage:
            continue
        if isinstance(event, Event) and (word.search(event.text) or word.search(str(event.data))):
            found.append(Moment(event.wall, "event", f"{event.actor}: {event.kind}: {shorten(event.text, 200)}"))
    return found


def _state(place: Place | None, opened: OpenGroup | None, moments: list[Moment], now: float) -> str:
    trained = next((m for m in reversed(moments) if m.what == "trained"), None)
    if place is not None:
        if trained is not None and place.head.stream == "groups":
            return f"{trained.text}; its group waits for the checkpoint that makes it final"
        return f"{DOING.get(place.head.stream, place.head.stream)}: {place.text(now)}"
    return ended_state(moments, is_open=opened is not None)
