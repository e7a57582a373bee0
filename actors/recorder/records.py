"""What the bus says, as lines of metrics.jsonl (pure).

A line is one JSON object: `kind`, `wall` (seconds), `entry` ("<stream>@<entry id>", unique and ordered within a stream),
then what the kind has:

step        step, version, trained_on, knob_epoch, groups, members (of groups trained in part: indexes by group), dropped,
            metrics, lives (of each sample or a share of them: which of `groups`, tokens, ms on engines, ms of scoring)
eval        step, version, name, n_samples, duration_s, metrics, versions (tokens by version), error
announced   step, version, prepare_s, n_bytes
activated   step, version, actor, pause_s, total_s, transport, requests (kept | sent again | ended),
            compared (tensors)
slots       actor, slots, why                                      samples at once on its engine, by auto
checkpoint  step, path, save_s
restored    step, version, checkpoint, lost (steps recorded before that are a lost future)
knob        epoch, values, author, reason, planned and at_step (of a plan), plan (epoch of the one that it ends)
drop        group, prompt, reason, samples, tokens, reward, members (indexes; absent = all of it)
                                                                   what of a prompt group will not be trained
dead        stream, sample, group, actor, error
fault       actor, event, text, level
finished    step, version
system      source, values                                         what a host (its name) or `Redis` uses: numbers by name
ledger      accounts                                               samples and tokens by account, at checkpoints and ends
trained     step, sample, marks, spans, finish, turns, generate_s, reward, scorer, score_s, judged, trained, share
                                                                   one trained sample, see bus.messages.policy.SampleTrained;
                                                                   in trained.jsonl
dropped     the same without step, judged, trained and share       one that the filter dropped; in trained.jsonl
sample      step, sample, group, version, reward, rewards, scorer, label, tokens, finish, prompt, response
                                                                   what the policy writes, now and then: texts as decoded, of at
                                                                   most 2,000 characters, their middle left out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from actors.runtime.readable import readable
from bus import Entry
from bus.inspect import wall_of
from bus.messages.base import Packed, unpack_ints
from bus.messages.control import DeadLetter, EvalDone, Event, KnobPatch
from bus.messages.events import EventKind
from bus.messages.groups import GroupVerdict, index_of
from bus.messages.policy import (
    ALREADY_TRAINED,
    Checkpointed,
    Finished,
    GroupsGivenUp,
    PolicyAnnounced,
    Restored,
    SamplesTrained,
    SampleTrained,
    StepDone,
)
from bus.messages.samples import Scored
from bus.topology import DEAD, EVAL_RESULTS, EVENTS, KNOBS, POLICY, VERDICTS

Record = dict[str, Any]
RECORDED = (POLICY, EVAL_RESULTS, KNOBS, EVENTS, VERDICTS, DEAD)


def records_of(entry: Entry, message: Any) -> list[Record]:
    """Lines for one message, mostly one or none."""
    head = {"wall": wall_of(entry.id), "entry": f"{entry.stream.name}@{entry.id}"}
    make = _MAKERS.get(type(message))
    if make is None:
        return []
    return [{"kind": kind, **head, **fields} for kind, fields in make(message)]


def sample_event(scored: Scored, step: int, decode: Callable[[Iterable[int]], str], wall: float) -> Event:
    """News that shows one scored sample in words. `step`: the newest when it was looked at; `wall`: now."""
    data = {"step": step, **readable(scored, decode)}
    return Event(actor="recorder", kind=EventKind.SAMPLE, text=scored.sample_id, wall=wall, data=data)


Made = list[tuple[str, Record]]


def _step(m: StepDone) -> Made:
    fields: Record = {"step": m.step, "version": m.version.id, "trained_on": m.trained_on.id, "knob_epoch": m.knob_epoch}
    fields["groups"] = list(m.groups)
    if in_part := _in_part(m.samples):
        fields["members"] = in_part
    fields |= {"dropped": [list(pair) for pair in m.dropped], "metrics": dict(m.metrics)}
    if isinstance(m.lives, memoryview):
        fields["lives"] = _lives(m.lives)
    return [("step", fields | ({"wall": m.wall} if m.wall else {}))]


def _lives(packed: Packed) -> list[list[int]]:
    numbers = unpack_ints(packed[: len(packed) // 16 * 16])
    return [numbers[i : i + 4] for i in range(0, len(numbers), 4)]


def _in_part(samples: Sequence[str]) -> dict[str, list[int]]:
    """Indexes by group of the groups of which a step trained fewer samples than a group has, as far as its samples show."""
    found = _indexes_by_group(samples)
    most = 1 + max((index for indexes in found.values() for index in indexes), default=-1)
    return {group: indexes for group, indexes in found.items() if len(indexes) < most}


def _indexes_by_group(samples: Sequence[str]) -> dict[str, list[int]]:
    """Indexes by group of sample ids."""
    found: dict[str, list[int]] = {}
    for sample in samples:
        found.setdefault(sample.rpartition("/")[0], []).append(index_of(sample))
    return found


def _eval(m: EvalDone) -> Made:
    fields: Record = {"step": m.step, "version": m.version, "name": m.name, "n_samples": m.n_samples}
    fields["duration_s"] = m.duration_s
    versions = {str(version): n for version, n in (m.versions or {}).items()}
    return [("eval", {**fields, "metrics": dict(m.metrics), "versions": versions, "error": m.error or ""})]


def _announced(m: PolicyAnnounced) -> Made:
    fields = {"step": m.version.step, "version": m.version.id, "prepare_s": m.prepare_s, "n_bytes": m.manifest.n_bytes}
    return [("announced", fields)]


def _event(m: Event) -> Made:
    if m.kind == EventKind.ACTIVATED:
        seconds = {name: float(m.data.get(name, 0.0)) for name in ("pause_s", "total_s")}
        numbers = {name: int(m.data.get(name, -1)) for name in ("step", "version")}
        how = {"transport": str(m.data.get("transport", "")), "requests": str(m.data.get("requests", ""))}
        return [("activated", {**numbers, "actor": m.actor, **seconds, **how, "compared": int(m.data.get("compared", 0))})]
    if m.kind == EventKind.SAMPLE:
        return [("sample", dict(m.data))]
    if m.kind == EventKind.SLOTS:
        most = {"most": int(m.data["most"])} if "most" in m.data else {}
        return [("slots", {"actor": m.actor, "slots": int(m.data.get("slots", 0)), "why": str(m.data.get("why", "")), **most})]
    if m.kind == EventKind.USAGE:
        return [("system", {"source": str(m.data["source"]), "values": {str(k): float(v) for k, v in m.data["values"].items()}})]
    if m.level == "info":
        return []
    return [("fault", {"actor": m.actor, "event": m.kind, "text": m.text, "level": m.level})]


def _trained(m: SamplesTrained) -> Made:
    return [("trained", {"step": m.step, "sample": one.sample_id, **_fields(one)}) for one in m.samples]


def _fields(one: SampleTrained) -> Record:
    """Without what says nothing: most samples have one turn."""
    values = {name: getattr(one, name) for name in one.__struct_fields__ if name != "sample_id"}
    return {name: value for name, value in values.items() if (name, value) not in (("turns", 1), ("score_s", 0.0))}


OF_A_STEP = ("judged", "trained", "share")


def _dropped(one: SampleTrained) -> Record:
    return {"sample": one.sample_id, **{name: value for name, value in _fields(one).items() if name not in OF_A_STEP}}


def _verdict(m: GroupVerdict) -> Made:
    if m.kept:
        return []
    fields = {"group": m.group_id, "prompt": m.prompt_id, "reason": m.reason, "samples": m.n_samples}
    members = {"members": list(m.members)} if m.members else {}
    lives = [("dropped", _dropped(one)) for one in m.lives or ()]
    return [*lives, ("drop", {**fields, "tokens": m.tokens, "reward": m.mean_reward, **members})]


def _given_up(m: GroupsGivenUp) -> Made:
    prompts = dict(zip((g for g, _ in m.groups), m.prompts, strict=False))
    members = _indexes_by_group(m.samples)
    made: Made = []
    for group, reason in m.groups:
        if reason == ALREADY_TRAINED:  # no drop: a step has them
            continue
        fields = {"group": group, "prompt": prompts.get(group, ""), "reason": reason, "reissued": m.reissue}
        made.append(("drop", fields | ({"members": members[group]} if group in members else {})))
    return made


def _knob(m: KnobPatch) -> Made:
    plan = {name: value for name in ("planned", "at_step", "plan") if (value := getattr(m, name)) is not msgspec.UNSET}
    return [("knob", {"epoch": m.epoch, "values": dict(m.values), "author": m.author, "reason": m.reason, **plan})]


def _dead(m: DeadLetter) -> Made:
    fields = {"stream": m.stream, "sample": m.sample_id, "group": m.group_id, "actor": m.actor, "error": m.error}
    return [("dead", fields)]


MOST_PARTED = 4096  # groups, several times as many as are open at once


class Parts:
    """Tells parts of a group apart from groups: a group that leaves the filter in parts is dropped once for each reason."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], None] = {}  # the newest MOST_PARTED

    def is_new(self, drop: Record) -> bool:
        """Whether a `drop` is the first of its group for its reason."""
        if not drop.get("members"):
            return True
        key = str(drop.get("group", "")), str(drop["reason"])
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > MOST_PARTED:
            del self._seen[next(iter(self._seen))]
        return True


_MAKERS: dict[type, Callable[[Any], Made]] = {
    StepDone: _step,
    EvalDone: _eval,
    PolicyAnnounced: _announced,
    Event: _event,
    GroupVerdict: _verdict,
    GroupsGivenUp: _given_up,
    DeadLetter: _dead,
    Checkpointed: lambda m: [("checkpoint", {"step": m.step, "path": m.path, "save_s": m.save_s})],
    Restored: lambda m: [("restored", {"step": m.step, "version": m.version.id, "checkpoint": m.checkpoint})],
    SamplesTrained: _trained,
    Finished: lambda m: [("finished", {"step": m.step, "version": m.version.id})],
    KnobPatch: _knob,
}
