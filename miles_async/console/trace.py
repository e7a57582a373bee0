"""One sample's whole life: from the streams while the run lives, from metrics.jsonl afterwards.

A living run is asked for everything; what only files remember (steps whose entries were trimmed) is added from them. Of logs and
files only what names the sample or its group is read, however long they are.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.file import FILE as METRICS
from actors.recorder.records import Record, records_of
from actors.recorder.trained import FILE as TRAINED_FILE
from actors.recorder.trained import LIVES, lines_with
from actors.recorder.trained import OLDER as TRAINED_OLDER
from actors.runtime.prompts import Tokenizer
from bus import BY_NAME, Bus
from bus.errors import BadMessage
from bus.identity import read_identity
from bus.inspect import all_heads, entries_with
from bus.messages.control import Event
from bus.messages.groups import OpenGroup, index_of
from bus.messages.samples import Mark
from bus.streams.hop import id_key
from bus.topology import DEAD, EVENTS, GROUPS, POLICY, TRAINED, VERDICTS
from miles_async.console.places import DOING, Place, Places, read_places
from miles_async.console.show import plain
from miles_async.console.text import shorten

OF_STEPS = ("policy.restored", "policy.checkpointed")
_SAMPLE = re.compile(r"[A-Za-z0-9_.-]+/\d+")


class Moment(msgspec.Struct, frozen=True):
    """Something that happened to the sample or to its group. `wall` 0 = unknown."""

    wall: float
    what: str
    text: str
    data: dict[str, Any] = {}


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: one sentence on where the sample is or how it ended. `task`: its prompt and sampling, if still known."""

    sample: str
    group: str
    found: bool
    state: str
    place: dict[str, Any] = {}
    task: dict[str, Any] = {}
    moments: tuple[Moment, ...] = ()


def group_of(sample_id: str) -> str:
    """`g0000012/3` to `g0000012`; a group id stays itself."""
    return sample_id.rpartition("/")[0] if _SAMPLE.fullmatch(sample_id) else sample_id


async def trace(bus: Bus, sample_id: str, run_dir: Path | None = None) -> Trace:
    """Follow one sample on a living bus, and in the run's file if there is one."""
    group = group_of(sample_id)
    places = await read_places(bus, evals=True)
    opened = places.opened(sample_id)
    place = _find(places, sample_id, group)
    task = await _task(bus, place, sample_id) if place is not None else {}
    seen = await asyncio.to_thread(_recorded, run_dir, group, sample_id) if run_dir is not None else []
    moments = _moments([*seen, *await _records(bus, group, sample_id)], sample_id, group)
    if not any(moment.what == "made" for moment in moments):
        moments += [Moment(m.wall, m.what, _told(m)) for m in _marks(task)]
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
        moments=tuple(sorted(moments, key=lambda m: m.wall)),
    )  # fmt: skip


def trace_file(run_dir: Path, sample_id: str) -> Trace:
    """Follow one sample in what the run left behind."""
    group = group_of(sample_id)
    moments = _moments(_recorded(run_dir, group, sample_id), sample_id, group)
    return Trace(
        sample=sample_id,
        group=group,
        found=bool(moments),
        state=_state(None, None, moments, 0.0),
        moments=tuple(sorted(moments, key=lambda m: m.wall)),
    )


def _recorded(run_dir: Path, group: str, sample_id: str) -> list[Record]:
    """Lines that name the sample or its group, and those that say what became of steps."""
    kinds = (b'"kind":"restored"', b'"kind":"checkpoint"')
    life = f'"sample":"{sample_id}' + ('"' if sample_id != group else "/")
    lines = list(lines_with(run_dir / METRICS, (group.encode(), *kinds)))
    for name in (TRAINED_OLDER, TRAINED_FILE):
        lines += lines_with(run_dir / name, (life.encode(),))
    return [line for line in lines if "wall" in line]


def _marks(task: dict[str, Any]) -> list[Mark]:
    """What a sample that is still under way has gone through."""
    response = task.get("rollout", task).get("response") or {}
    return msgspec.convert([list(m.values()) for m in response.get("marks") or ()], list[Mark])


def _told(mark: Mark) -> str:
    by = f" by {mark.who}" if mark.who else ""
    return f"{mark.what}{by}" + (f" with {mark.tokens} tokens" if mark.tokens else "")


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


def _moments(records: list[Record], sample_id: str, group: str) -> list[Moment]:
    """What lines say about this sample or its group; each entry once, steps of a lost future marked."""
    by_entry: dict[tuple[str, str], Record] = {}
    for record in records:
        about = record["kind"] + str(record.get("sample" if record["kind"] in LIVES else "group", ""))
        by_entry.setdefault((str(record.get("entry")), about), record)
    ordered = sorted(by_entry.values(), key=lambda r: id_key(str(r.get("entry", "@0")).partition("@")[2] or "0"))
    restores = [(i, int(r["step"])) for i, r in enumerate(ordered) if r["kind"] == "restored"]
    saves = [(i, record) for i, record in enumerate(ordered) if record["kind"] == "checkpoint"]
    found: list[Moment] = []
    for i, record in enumerate(ordered):
        wall = float(record["wall"])
        match record["kind"]:
            case "step" if group in record["groups"] and _concerns(record.get("members", {}).get(group), sample_id):
                saved = next((s for at, s in saves if at > i and s["step"] >= record["step"]), None)
                lost = any(at > i and step < record["step"] for at, step in restores)
                text = f"trained in step {record['step']}, policy version {record['version']}, knob epoch {record['knob_epoch']}"
                text += "; that step was lost with the trainer and done again" if lost else ""
                data = {"step": record["step"], "version": record["version"], "lost": lost}
                found.append(Moment(wall, "lost step" if lost else "trained", text, data))
                if saved is not None and not lost:
                    found.append(
                        Moment(float(saved["wall"]), "checkpoint", f"in the checkpoint of step {saved['step']}: final")
                    )
            case "trained" | "dropped" if sample_id in (record["sample"], group_of(record["sample"])):
                found += _life(record, name=record["sample"] if sample_id == group else "")
            case "drop" if record["group"] == group and _concerns(record.get("members"), sample_id):
                again = ", its prompt is issued again" if record.get("reissued") else ""
                who = "filter" if str(record.get("entry")).startswith(VERDICTS.name) else "trainer"
                text = f"group dropped by the {who}: {record['reason']}{again}"
                found.append(Moment(wall, "dropped", text, {"reason": record["reason"]}))
            case "sample" if record["sample"] == sample_id:
                text = (
                    f"reward {record['reward']:g} (label {record['label']}) for\n{record['prompt']}{record['response']}"
                )
                found.append(Moment(wall, "text", text, {"prompt": record["prompt"], "response": record["response"]}))
            case "dead" if sample_id in (record["sample"], record["group"]) or record["group"] == group:
                who = "" if record["sample"] == sample_id else f"{record['sample'] or record['group']} "
                text = f"{who}became a dead letter on {record['stream']}: "
                found.append(Moment(wall, "dead", text + shorten(record["error"], 300), {"stream": record["stream"]}))
    return found


def _life(record: Record, *, name: str) -> list[Moment]:
    """What a trained or dropped sample went through. `name`: its id, where several are told."""
    who = f"{name} " if name else ""
    found = [Moment(m.wall, m.what, who + _told(m)) for m in msgspec.convert(record["marks"], list[Mark])]
    ended = found[-1].wall if found else 0.0
    spans = ", ".join(
        f"{n} tokens by version {v}" if v >= 0 else f"{n} of its environment" for v, _, n in record["spans"]
    )
    n_turns, score_s = record.get("turns", 1), record.get("score_s", 0.0)
    turns = f" in {n_turns} turns" if n_turns > 1 else ""
    text = f"{who}made{turns}: {spans}; {record['finish']} after {record['generate_s']:.3g} s on engines"
    found.append(Moment(ended, "made", text, {"spans": record["spans"], "turns": n_turns}))
    text = f"{who}scored {record['reward']:g} by {record['scorer']} in {score_s:.3g} s"
    found.append(Moment(ended, "scored", text, {"reward": record["reward"]}))
    if record["kind"] == "dropped":
        return found
    if record["judged"]:
        found.append(Moment(record["judged"], "judged", f"{who}let go by the filter"))
    share = f", {record['share']:.3%} of the weights in its step's loss" if record["share"] >= 0 else ""
    data = {"step": record["step"], "trained": record["trained"], "share": record["share"]}
    text = f"{who}in the batch of step {record['step']}: {record['trained']} tokens with gradient{share}"
    found.append(Moment(float(record["wall"]), "batch", text, data))
    return found


def _concerns(members: list[int] | None, sample_id: str) -> bool:
    """Whether a line about these members of a group, None = all, is about this sample or about the whole group."""
    index = index_of(sample_id)
    return members is None or index < 0 or index in members


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
    kinds = {m.what: m for m in moments}
    trained = kinds.get("trained")
    if place is not None:
        if trained is not None and place.head.stream == "groups":
            return f"{trained.text}; its group waits for the checkpoint that makes it final"
        return f"{DOING.get(place.head.stream, place.head.stream)}: {place.text(now)}"
    if trained is not None:
        return trained.text
    for what in ("dead", "dropped", "lost step"):
        if what in kinds:
            return kinds[what].text
    if opened is not None:
        return "its group is open but the sample is in no stream: see miles-async ledger --check"
    if "kept" in kinds:
        return "its group was kept by the filter; what came after is not on record any more"
    return "not on record"
