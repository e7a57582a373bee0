"""(pure) What the record shows the governor: who changed what, since which step it holds, and the steps measured since.

A change holds from the first step whose knob epoch has it. The steps after it until all open samples are its own (bound + 1
versions) are left out; then every `governor_interval` steps are one measurement, and one decision is due at the last of them.
A decision depends on steps up to that one and on changes that hold there, and all are made in their order, so that the record
alone says what was decided, however late or often one looks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import msgspec

from actors.recorder.history import History, Step
from actors.recorder.points import STALE_REASONS
from miles_async.governor.standing import Knob
from miles_async.settings.governor import GOVERNED, envelope

AUTHOR = "governor"
OURS = (AUTHOR, "launcher")  # other authors are the operator's hands
WAIT, MASKED, ESS = "perf/wait_s", "rollout/masked_fraction", "train/ess_ratio"
ACTIVATIONS = 64  # newest ones, which tell how many workers there are


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """New values of settings. `before`: what they replaced. `first`: the first step under them, 0 = none yet."""

    epoch: int
    values: dict[str, Any]
    before: dict[str, Any]
    author: str
    reason: str
    first: int


class StepMeans(msgspec.Struct, frozen=True, kw_only=True):
    """Means over some steps; None where fewer than half of them tell. `step_s`: median seconds from step to step; `waits`: share
    of them that the trainer waited; `ess`: effective sample size; `lost`: share masked, and dropped, as too old. `unusable`:
    metrics that some of the steps lack, or have as no number."""

    step_s: float
    waits: float | None
    ess: float | None
    lost: float | None
    unusable: tuple[str, ...]


class GovernorLook(msgspec.Struct, frozen=True, kw_only=True):
    """One decision's material. `due`: the step after which it is made; `steps`: what was measured, `before`: as many steps before
    the newest change; `seen`: the history with those steps only."""

    values: dict[str, Any]
    changes: tuple[Change, ...]
    knobs: tuple[Knob, ...]
    due: int
    steps: tuple[Step, ...]
    before: tuple[Step, ...]
    seen: History

    @property
    def newest(self) -> Change:
        return self.changes[-1]


def changes_of(history: History) -> list[Change]:
    """All changes that are live, oldest first. On a bus made anew epochs go on from a checkpoint: those after it are gone."""
    lineage: list[dict[str, Any]] = []
    for record in history.knobs:
        while lineage and lineage[-1]["epoch"] >= record["epoch"]:
            lineage.pop()
        if record.get("values"):
            lineage.append(record)
    found: list[Change] = []
    live: dict[str, Any] = {}
    for record in lineage:
        values, epoch = dict(record["values"]), int(record["epoch"])
        at = bisect_left(history.steps, epoch, key=lambda s: s.knob_epoch)
        found.append(
            Change(
                epoch=epoch,
                values=values,
                before={name: live.get(name) for name in values},
                author=str(record.get("author", "")),
                reason=str(record.get("reason", "")),
                first=history.steps[at].step if at < len(history.steps) else 0,
            )
        )
        live |= values
    return found


def knobs_of(values: dict[str, Any], changes: Sequence[Change]) -> list[Knob]:
    """The settings that have an envelope. One that somebody else changed after its envelope was given is left to them."""
    found = []
    for name, (knob, *_) in GOVERNED.items():
        ends = envelope(str(values.get(name) or ""))
        if ends is None or not isinstance(value := values.get(knob), int):
            continue
        given = max((c.epoch for c in changes if name in c.values or c.values.get("governor")), default=0)
        hand = next((c for c in reversed(changes) if knob in c.values and c.author not in OURS and c.epoch > given), None)
        author = (hand.author or "somebody") if hand is not None else ""
        found.append(Knob(name=knob, value=value, low=ends[0], high=ends[1], envelope=name, hand=author))
    return found


def look(history: History, after: int = 0) -> GovernorLook | None:
    """The first decision that is due after the one of step `after`; None where none is, or the governor is off."""
    changes = changes_of(history) if history.steps else []
    values: dict[str, Any] = {}
    for change in changes:
        values |= change.values
    if not values.get("governor") or not changes[-1].first:
        return None
    if history.steps[-1].knob_epoch > int(history.knobs[-1]["epoch"]):
        return None  # the two logs are read one after the other: the change that this step was made under is still to come
    restored = int(history.restores[-1]["step"]) + 1 if history.restores else 0
    settling = (int(values["max_weight_staleness"]) + 1) * int(values["update_weights_interval"])
    begin, size = max(changes[-1].first, restored) + settling, int(values["governor_interval"])
    due = begin - 1 + max(1, (after - begin + 1) // size + 1) * size
    if due > history.steps[-1].step:
        return None
    steps = between(history, due - size + 1, due)
    active = history.activations[-ACTIVATIONS:]
    return GovernorLook(
        values=values,
        changes=tuple(changes),
        knobs=tuple(knobs_of(values, changes)),
        due=due,
        steps=tuple(steps),
        before=tuple(between(history, changes[-1].first - size, changes[-1].first - 1)),
        seen=replace(history, steps=steps, knobs=[{"values": values}], activations=active),
    )


def between(history: History, first: int, last: int) -> list[Step]:
    """Steps by number, both ends included."""
    low = bisect_left(history.steps, first, key=lambda s: s.step)
    return history.steps[low : bisect_left(history.steps, last + 1, key=lambda s: s.step)]


def read(steps: Sequence[Step]) -> StepMeans:
    """What these steps show."""
    timed = [s for s in steps if s.gap_s > 0 and not s.resumed]
    usable = {name: [s.get(name) for s in steps if name in s.metrics] for name in (WAIT, MASKED, ESS)}
    mean = {name: fmean(values) if 2 * len(values) > len(steps) else None for name, values in usable.items()}
    whole_s = fmean(s.gap_s for s in timed) if timed else 0.0
    waited, masked = mean[WAIT], mean[MASKED]
    stale = sum(s.dropped.get(reason, 0) for s in steps for reason in STALE_REASONS)
    return StepMeans(
        step_s=median(s.gap_s for s in timed) if timed else 0.0,
        waits=min(1.0, waited / whole_s) if waited is not None and whole_s else None,
        ess=mean[ESS],
        lost=masked + stale / max(1, stale + sum(s.n_groups for s in steps)) if masked is not None else None,
        unusable=tuple(name for name, values in usable.items() if len(values) < len(steps)),
    )
