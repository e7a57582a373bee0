"""One sample's whole life from what its run wrote: metrics.jsonl and the record of trained samples. Only lines that name the sample
or its group are read. No bus is opened, so it starts fast; trace_live.py adds what a living run's streams tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.recorder.file import FILE as METRICS
from actors.recorder.trained import FILE as TRAINED_FILE
from actors.recorder.trained import LIVES, pages_with
from actors.recorder.trained import OLDER as TRAINED_OLDER
from bus.messages.groups import index_of
from bus.messages.reasons import meaning
from bus.messages.samples import Mark
from bus.streams.hop import id_key
from bus.topology import VERDICTS
from miles_async.console.text import plural, shorten
from miles_async.settings.errors import SettingsError
from miles_async.settings.runs import read_settings

if TYPE_CHECKING:  # as in actors/recorder/file.py
    from actors.recorder.records import Record

OF_STEPS = ("restored", "checkpoint")  # kinds that say what became of steps
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # a line that is not as this release writes it
_NAME = re.compile(r"([A-Za-z0-9_.-]{1,200})(?:/[0-9]{1,9})?")


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
    n_samples: int = 0
    """Of its group; 0 = unknown, or not looked up because the sample itself is on record."""


def group_of(sample_id: str) -> str:
    """`g0000012/3` to `g0000012`; a group id stays itself. SettingsError: it names neither."""
    if (group := _NAME.fullmatch(sample_id)) is None:
        remedy = "A sample is named as g0000042/3, its group g0000042; miles-async bus tail prompts shows some."
        raise SettingsError(f"{sample_id[:80]!r} names no sample and no group", remedy=remedy)
    return group[1]


def known(found: Trace) -> Trace:
    """The same where the sample or group is on record; otherwise SettingsError says what is."""
    name, group, n = found.sample, found.group, found.n_samples
    if 0 < n <= index_of(found.sample):
        members = f"{group}/0 to {group}/{n - 1}" if n > 1 else f"{group}/0"
        remedy = f"miles-async trace {group} tells the whole group."
        raise SettingsError(f"{name} is not on record: group {group} has {n} samples, {members}", remedy=remedy)
    if not found.found:
        remedy = "miles-async bus tail prompts shows names of this run; --run NAME asks another."
        raise SettingsError(f"nothing on record about {name}", remedy=remedy)
    return found


def size_of(run_dir: Path, group: str, records: list[Record], sample_id: str) -> int:
    """Samples of the group that this sample is said to be of, as far as the run's files tell; see Trace.n_samples."""
    if index_of(sample_id) < 0 or any(r.get("sample") == sample_id for r in records):
        return 0
    exact = [r["samples"] for r in records if r["kind"] == "drop" and r.get("group") == group and isinstance(r.get("samples"), int)]
    lives = [index_of(str(r.get("sample"))) + 1 for r in lives_of(run_dir, group, group, []) if r["kind"] in LIVES]
    asked = read_settings(run_dir).get("rollout", {}).get("n_samples_per_prompt", 0) if group.startswith("g") else 0
    return max(exact, default=0) or max([*lives, int(asked)])


def trace_file(run_dir: Path, sample_id: str) -> Trace:
    """Follow one sample in what the run left behind."""
    group = group_of(sample_id)
    lines = of_group(run_dir, group)
    records = [*lines, *lives_of(run_dir, group, sample_id, moments_of(lines, sample_id, group))]
    moments = moments_of(records, sample_id, group)
    kinds = {moment.what for moment in moments}
    unsaved = "; no checkpoint on record holds it" if "trained" in kinds and "checkpoint" not in kinds else ""
    return Trace(
        sample=sample_id,
        group=group,
        found=bool(moments),
        state=ended_state(moments) + unsaved,
        n_samples=size_of(run_dir, group, records, sample_id) if moments else 0,
        moments=tuple(sorted(moments, key=lambda m: m.wall)),
    )


def settled(run_dir: Path, sample_id: str, *, followed: bool) -> bool:
    """Whether the files tell all that became of it: its step is in a checkpoint, or the filter dropped it and no trainer was
    restored since; `followed`: somebody writes them on, so it may be in no checkpoint yet. Of a group, whose members may end one by
    one, they never do."""
    lines = of_group(run_dir, group := group_of(sample_id))
    moments = moments_of(lines, sample_id, group)
    kinds = {moment.what for moment in moments}
    if index_of(sample_id) < 0 or "damaged" in kinds:
        return False
    restored = max((float(line["wall"]) for line in lines if line["kind"] == "restored"), default=0.0)
    if "checkpoint" in kinds or ("trained" in kinds and followed):
        return True
    return any(m.what == "dropped" and m.data["by"] == "filter" and m.wall > restored for m in moments)


def of_group(run_dir: Path, group: str) -> list[Record]:
    """Lines that name the group or one of its samples, and those that say what became of steps."""
    kinds = (b'"kind":"restored"', b'"kind":"checkpoint"')
    return [line for page in pages_with(run_dir / METRICS, (group.encode(), *kinds)) for line in page if "wall" in line]


def lives_of(run_dir: Path, group: str, sample_id: str, known: list[Moment]) -> list[Record]:
    """What is on record of how the sample was made, or each of the group. `known`: what of_group's lines say; a sample has as many
    lives there as ends."""
    ends = sum(moment.what in ("trained", "lost step", "dropped") for moment in known)
    life = f'"sample":"{sample_id}' + ('"' if sample_id != group else "/")
    enough = ends if ends and sample_id != group else math.inf
    files = (run_dir / TRAINED_FILE, run_dir / TRAINED_OLDER)
    found: list[Record] = []
    for page in chain.from_iterable(pages_with(file, [life.encode()], newest_first=True) for file in files):
        found[:0] = page
        if len({line.get("entry") for line in found}) >= enough:
            break
    return [line for line in found if "wall" in line]


def names(text: str, sample_id: str, group: str) -> bool:
    """Whether a text names the sample or its group as a whole word."""
    return re.search(rf"(?<![\w/.-])(?:{re.escape(sample_id)}|{re.escape(group)})(?![\w/])", text) is not None


def event_text(actor: str, kind: str, text: str) -> str:
    return f"{actor}: {kind}: {shorten(text, 200)}"


def told(mark: Mark) -> str:
    by = f" by {mark.who}" if mark.who else ""
    return f"{mark.what}{by}" + (f" with {mark.tokens} tokens" if mark.tokens else "")


def in_order(marks: Sequence[Mark], until: float, who: str = "") -> list[Moment]:
    """What a sample went through, in its order, which the clocks of its hosts may not tell: the first mark is of Redis's clock, and
    none is before the one before or after `until`."""
    found: list[Moment] = []
    wall = marks[0].wall if marks else 0.0
    for mark in marks:
        wall = max(wall, min(mark.wall, until))
        found.append(Moment(wall, mark.what, who + told(mark)))
    return found


def moments_of(records: list[Record], sample_id: str, group: str) -> list[Moment]:
    """What lines say about this sample or its group; each entry once, steps of a lost future marked; and how many lines cannot
    be read."""
    ordered, damaged = _ordered(records)
    restores = [(i, int(r["step"])) for i, r in enumerate(ordered) if r["kind"] == "restored"]
    saves = [(i, record) for i, record in enumerate(ordered) if record["kind"] == "checkpoint"]
    found: list[Moment] = []
    for i, record in enumerate(ordered):
        try:
            if record["kind"] == "step":
                found += _step(i, record, restores, saves, sample_id, group)
            else:
                found += _moments(record, sample_id, group)
        except DAMAGED:
            damaged += 1
    if damaged and found:
        left = "is left out" if damaged == 1 else "are left out"
        text = f"{plural(damaged, 'line')} of the record that may be about it cannot be read and {left}"
        found.append(Moment(0.0, "damaged", text))
    return found


def _ordered(records: list[Record]) -> tuple[list[Record], int]:
    """One line of each entry and what it is about, in the order of the entries; and how many lines tell no place in it."""
    by_entry: dict[tuple[str, str], Record] = {}
    keys: dict[int, tuple[int, int]] = {}
    damaged = 0
    for record in records:
        about = record["kind"] + str(record.get("sample" if record["kind"] in LIVES else "group", ""))
        try:
            keys[id(record)] = id_key(str(record.get("entry", "@0")).partition("@")[2] or "0")
            if not math.isfinite(float(record["wall"])) or (record["kind"] in OF_STEPS and int(record["step"]) < 0):
                raise ValueError(record)
        except DAMAGED:
            damaged += 1
        else:
            by_entry.setdefault((str(record.get("entry")), about), record)
    return sorted(by_entry.values(), key=lambda r: keys[id(r)]), damaged


def _step(
    i: int, record: Record, restores: list[tuple[int, int]], saves: list[tuple[int, Record]], sample_id: str, group: str
) -> list[Moment]:
    """Of the `i`-th line, a training step: with the first checkpoint behind it that holds it."""
    if group not in record["groups"] or not _concerns(record.get("members", {}).get(group), sample_id):
        return []
    saved = next((s for at, s in saves if at > i and s["step"] >= record["step"]), None)
    lost = any(at > i and step < record["step"] for at, step in restores)
    text = f"trained in step {record['step']}, policy version {record['version']}, knob epoch {record['knob_epoch']}"
    text += "; that step was lost with the trainer and done again" if lost else ""
    data = {"step": record["step"], "version": record["version"], "lost": lost}
    found = [Moment(float(record["wall"]), "lost step" if lost else "trained", text, data)]
    if saved is not None and not lost:
        found.append(Moment(float(saved["wall"]), "checkpoint", f"in the checkpoint of step {saved['step']}: final"))
    return found


def _moments(record: Record, sample_id: str, group: str) -> list[Moment]:
    """Of a line that stands for itself."""
    wall = float(record["wall"])
    match record["kind"]:
        case "trained" | "dropped" if sample_id in (record["sample"], record["sample"].rpartition("/")[0]):
            return _life(record, name=record["sample"] if sample_id == group else "")
        case "drop" if record["group"] == group and _concerns(record.get("members"), sample_id):
            again = ", its prompt is issued again" if record.get("reissued") else ""
            who = "filter" if str(record.get("entry")).startswith(VERDICTS.name) else "trainer"
            text = f"group dropped by the {who}: {record['reason']}{again}"
            text += f" ({meaning(str(record['reason']))})"
            return [Moment(wall, "dropped", text, {"reason": record["reason"], "by": who})]
        case "sample" if record["sample"] == sample_id:
            text = f"reward {record['reward']:g} (label {record['label']}) for\n{record['prompt']}{record['response']}"
            return [Moment(wall, "text", text, {"prompt": record["prompt"], "response": record["response"]})]
        case "fault" if names(str(record["text"]), sample_id, group):
            return [Moment(wall, "event", event_text(record["actor"], record["event"], str(record["text"])))]
        case "dead" if sample_id in (record["sample"], record["group"]) or record["group"] == group:
            who = "" if record["sample"] == sample_id else f"{record['sample'] or record['group']} "
            text = f"{who}became a dead letter on {record['stream']}: "
            return [Moment(wall, "dead", text + shorten(record["error"], 300), {"stream": record["stream"]})]
    return []


def _life(record: Record, *, name: str) -> list[Moment]:
    """What a trained or dropped sample went through. `name`: its id, where several are told."""
    who = f"{name} " if name else ""
    found = in_order(msgspec.convert(record["marks"], list[Mark]), float(record.get("judged") or record["wall"]), who)
    ended = found[-1].wall if found else 0.0
    spans = ", ".join(f"{n} tokens by version {v}" if v >= 0 else f"{n} of its environment" for v, _, n in record["spans"])
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


def ended_state(moments: list[Moment], *, is_open: bool = False) -> str:
    """How it ended, in one sentence; of one that is in no stream."""
    kinds = {m.what: m for m in moments}
    for what in ("trained", "dead", "dropped", "lost step"):
        if what in kinds:
            gone = what == "trained" and "batch" not in kinds
            return kinds[what].text + ("; how it was made is not on record, which holds the newest samples" if gone else "")
    if is_open:
        return "its group is open but the sample is in no stream: see miles-async ledger --check"
    if "batch" in kinds:
        return f"{kinds['batch'].text}; what became of that step is not on record any more"
    if "kept" in kinds:
        return "its group was kept by the filter; what came after is not on record any more"
    return "not on record"
