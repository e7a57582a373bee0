"""One sample's whole life while the run lives: from the streams, and from its files what they do not remember any more (steps whose
entries were trimmed). Of logs only what names the sample or its group is read, however long they are.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.file import FILE as METRICS
from actors.recorder.file import newest_entries
from actors.recorder.records import Record, records_of
from actors.recorder.trained import FILE as TRAINED_FILE
from bus import BY_NAME, Bus, Entry, Stream
from bus.errors import BadMessage
from bus.identity import read_identity
from bus.inspect import entries_with, wall_of
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.messages.groups import GroupVerdict, OpenGroup
from bus.messages.samples import Mark
from bus.streams.hop import id_key
from bus.topology import DEAD, EVENTS, GROUPS, POLICY, PROMPTS, TRAINED, VERDICTS
from miles_async.console.places import DOING, EntryPlace, EntryPlaces, read_places
from miles_async.console.show import plain
from miles_async.console.trace import (
    Moment,
    Trace,
    ended_state,
    event_text,
    group_of,
    in_order,
    lives_of,
    moments_of,
    names,
    of_group,
    size_of,
)

OF_STEPS = ("policy.restored", "policy.checkpointed")
LOGS: tuple[tuple[Stream, tuple[str, ...]], ...] = ((POLICY, OF_STEPS), (VERDICTS, ()), (DEAD, ()), (TRAINED, ()), (EVENTS, ()))
ALL_LOGS = tuple(stream.name for stream, _ in LOGS)
WHOLE_ON_FILE = (POLICY.name, DEAD.name, TRAINED.name)  # of the others the recorder leaves out what a trace tells


async def trace(bus: Bus, sample_id: str, run_dir: Path | None = None) -> Trace:
    """Follow one sample on a living bus, and in the run's file if there is one."""
    group = group_of(sample_id)
    places = await read_places(bus, evals=True)
    opened = places.opened(sample_id)
    place = _find(places, sample_id, group)
    task = await _task(bus, place, sample_id) if place is not None else {}
    on_file = await asyncio.to_thread(_on_file, run_dir) if run_dir is not None else {}  # first: the file grows
    seen = await asyncio.to_thread(of_group, run_dir, group) if run_dir is not None else []
    if run_dir is not None and (place is None or place.head.stream == GROUPS.name):  # else it is not judged yet
        seen += await asyncio.to_thread(lives_of, run_dir, group, sample_id, moments_of(seen, sample_id, group))
    # Nothing was said of a sample before there was one.
    since = _issued(place, task, moments_of(seen, sample_id, group)) if sample_id != group else "0"
    entries = await _entries(bus, group, {name: max(since, on_file.get(name, "0"), key=id_key) for name in ALL_LOGS})
    news, notes = await _told(bus, entries, sample_id, group)
    records = [*seen, *news]
    moments = [*moments_of(records, sample_id, group), *notes]
    n_samples = 0
    if place is None and (whole := opened or places.opened(group)) is not None:
        n_samples = whole.n_samples
    elif place is None and moments and run_dir is not None:
        n_samples = size_of(run_dir, group, records, sample_id)
    if not any(moment.what == "made" for moment in moments):
        moments += in_order(_marks(task), bus.clock.wall())
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


def _find(places: EntryPlaces, sample_id: str, group: str) -> EntryPlace | None:
    found: EntryPlace | None = None
    for name, heads in places.heads.items():
        for head in heads:
            if head.sample == sample_id or (name == GROUPS.name and places.holds(head, sample_id, group)):
                found = places.place(head)
    return found


async def _task(bus: Bus, place: EntryPlace, sample_id: str) -> dict[str, Any]:
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
    from actors.runtime.prompts import Tokenizer  # takes long to load

    return value | {"text": await asyncio.to_thread(lambda: Tokenizer(str(directory)).decode(tokens))}


def _on_file(run_dir: Path) -> dict[str, str]:
    """By stream, the newest entry that is on file with all before it: those need not be asked of the bus."""
    found = newest_entries(run_dir / METRICS) | newest_entries(run_dir / TRAINED_FILE)
    return {name: at for name, at in found.items() if name in WHOLE_ON_FILE}


def _issued(place: EntryPlace | None, task: dict[str, Any], seen: list[Moment]) -> str:
    """An id that all entries about the sample come after: that of its first one on the bus; "0" = not known, as of a dead letter
    that was tried again."""
    if any(moment.what == "dead" for moment in seen):
        return "0"
    walls = [mark.wall for mark in _marks(task) if mark.what == "issued"]
    walls += [m.wall for m in seen if m.what == "issued" and m.wall]
    if place is not None and place.head.stream == PROMPTS.name:
        walls.append(place.head.wall)
    return f"{int(1000 * min(walls)) - 1}-0" if walls else "0"


async def _entries(bus: Bus, group: str, after: dict[str, str]) -> list[Entry]:
    """Of the logs, what names the group, and what says what became of steps; by stream, behind an id."""
    found = await asyncio.gather(*(entries_with(bus, s, group, types, after=after[s.name]) for s, types in LOGS))
    return [entry for entries in found for entry in entries]


async def _told(bus: Bus, entries: list[Entry], sample_id: str, group: str) -> tuple[list[Record], list[Moment]]:
    """Lines that the recorder writes of them, and what it does not: that the group was kept, and mere notes of actors that name
    the sample or its group."""
    records: list[Record] = []
    notes: list[Moment] = []
    for entry in entries:
        try:
            message = await bus.message(entry)
        except BadMessage:
            continue
        match message:
            case Event(kind=EventKind.SAMPLE):  # a text that was kept, which `samples` shows
                continue
            case Event():
                if message.level != "info" and names(message.text, sample_id, group):
                    records += records_of(entry, message)
                elif names(f"{message.text} {message.data}", sample_id, group):
                    notes.append(Moment(message.wall, "event", event_text(message.actor, message.kind, message.text)))
            case GroupVerdict(kept=True):
                if message.group_id == group:
                    notes.append(Moment(wall_of(entry.id), "kept", f"group kept by the filter, {message.tokens} tokens"))
            case _:
                records += records_of(entry, message)
    as_written: list[Record] = msgspec.json.decode(msgspec.json.encode(records))  # no structs: as read from the files
    return as_written, notes


def _state(place: EntryPlace | None, opened: OpenGroup | None, moments: list[Moment], now: float) -> str:
    trained = next((m for m in reversed(moments) if m.what == "trained"), None)
    if place is not None:
        if trained is not None and place.head.stream == "groups":
            return f"{trained.text}; its group waits for the checkpoint that makes it final"
        return f"{DOING.get(place.head.stream, place.head.stream)}: {place.text(now)}"
    return ended_state(moments, is_open=opened is not None)
