"""What a run's record shows of its samples, engines and trainer, in the terms of the simulation.

Looked at are the newest steps under the present settings; the first ones after a start or a change are left out, since the run
is still filling up then. Steps tell tokens and seconds of single samples (`lives`), which give whole groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from statistics import fmean, pstdev, quantiles
from typing import Annotated, Any

import msgspec

from actors.generation.slots import Limits
from actors.recorder.history import AVG_STALENESS, History, Step, history_of
from actors.recorder.records import Record
from actors.trainer.spread import RUNNING, SECONDS
from bus.inspect import wall_of
from miles_async.console.whatif.observed import live_knobs, settled, slowdown_of
from miles_async.console.whatif.setup import Draw, DrawnGroup, SimulatedKnobs, SimulatedPace
from miles_async.settings.errors import SettingsError
from miles_async.settings.flat import Flat
from miles_async.settings.live import whole
from miles_async.settings.slots import AUTO_MAX_RUNNING

LOOKED_AT = 200  # newest steps
FEWEST = 8
SURE = 0.25  # standard error of what a token costs the trainer, over the cost if all its time were for tokens


Told = Annotated[str, msgspec.Meta(pattern=r"@\d+-\d+$")]  # <stream>@<entry id>


class _Step(msgspec.Struct):
    step: int
    wall: float
    version: int
    metrics: dict[str, float]
    groups: list[str] = []
    entry: Told = "policy@0-0"
    knob_epoch: int = 0
    lives: list[tuple[int, int, int, int]] = []


class _Activated(msgspec.Struct):
    actor: str
    wall: float
    version: int
    pause_s: float
    entry: Told


class _Drop(msgspec.Struct):
    reason: str
    wall: float
    samples: int = 0
    tokens: int = 0
    members: list[int] = []


class _Slots(msgspec.Struct):
    actor: str
    slots: int
    most: int = 0


class _Knob(msgspec.Struct):
    epoch: int
    values: dict[str, object]


LINES: Mapping[str, type[msgspec.Struct]] = {
    "step": _Step, "activated": _Activated, "drop": _Drop, "slots": _Slots, "knob": _Knob
}  # fmt: skip
"""What is needed of each kind of line."""


def sound(records: Sequence[Record]) -> list[Record]:
    """Lines that hold what is needed of their kind."""
    found: list[Record] = []
    for record in records:
        try:
            msgspec.convert(record, LINES.get(str(record.get("kind")), msgspec.Struct))
        except msgspec.ValidationError:
            continue
        found.append(record)
    return found


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The run itself over the steps looked at, as `Outcome` tells it of a simulated one; `error_s`: standard error of `step_s`."""

    steps: int
    step_s: float
    error_s: float
    wait: float
    idle: float
    masked: float
    mean_age: float
    max_age: float
    dropped: dict[str, float]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A run, ready to be simulated. `drops`: of the filter: reason, share of the samples, tokens of a mean one. `notes`: what the
    record lacks. `engine_most`: samples that an engine runs at once, where `auto` met that."""

    settings: Flat
    knobs: SimulatedKnobs
    engine_most: int
    pace: SimulatedPace
    pool: tuple[tuple[Draw, ...], ...]
    drops: tuple[tuple[str, float, float], ...]
    measured: Measured
    notes: tuple[str, ...]

    def groups(self, n: int, chance: Random) -> Iterator[DrawnGroup]:
        """Endless groups of `n` samples, drawn from a pool that is itself drawn anew from what was recorded."""
        pool = chance.choices(self.pool, k=len(self.pool))
        reasons = [reason for reason, _, _ in self.drops]
        shares = [share for _, share, _ in self.drops]
        tokens = {reason: mean for reason, _, mean in self.drops}
        while True:
            seen = chance.choice(pool)
            members = tuple(chance.sample(seen, n) if n <= len(seen) else chance.choices(seen, k=n))
            reason = chance.choices(["", *reasons], [1 - sum(shares), *shares])[0] if reasons else ""
            if reason:
                scale = tokens[reason] / fmean(d.tokens for d in members)
                members = tuple(Draw(max(1, round(d.tokens * scale)), d.seconds * scale, d.score_s) for d in members)
            yield DrawnGroup(members, reason)


def recorded(records: Sequence[Record]) -> Recorded:
    """From `sound` records. SettingsError, one line, where the record does not suffice."""
    history = history_of(records)
    values = live_knobs(history)
    if not history.steps or "rollout_batch_size" not in values:
        raise SettingsError("the record holds no trained step with its settings yet", remedy="Wait for the run's first steps.")
    settings = whole(values)
    steps = _settled(history, settings)
    lines = {r["step"]: r for r in records if r["kind"] == "step"}
    notes: list[str] = []
    slots, most = _slots(settings, records, steps, notes), _engine_most(settings, records)
    knobs = knobs_of(settings, workers=_workers(history), slots=slots, engine_most=most)
    size = settings.samples_per_rollout
    step_s = fmean(s.gap_s for s in steps)
    dropped, tokens = _drops(records, steps, settings.n_samples_per_prompt)
    judged = size * len(steps) + dropped.total()
    of_one = max(1.0, fmean(s.get("rollout/tokens") for s in steps) / size)
    thrown = sum(dropped[reason] * mean / of_one for reason, mean in tokens.items()) / len(steps)
    running = (size + thrown) * fmean(s.get(f"{SECONDS}/mean") for s in steps) / step_s
    on_worker = fmean(s.get(f"{RUNNING}/mean", running / knobs.num_generation_workers) for s in steps)
    pace = _pace(history, records, steps, notes)
    stands = min(0.9, fmean(pace.pause_s) / (settings.update_weights_interval * step_s))
    alone = (1 - stands) / (1 + pace.slowdown * on_worker)
    pool = _pool(lines, steps, settings, alone)
    return Recorded(
        settings=settings,
        knobs=knobs,
        engine_most=most,
        pace=pace,
        pool=pool,
        drops=tuple((reason, dropped[reason] / judged, mean) for reason, mean in sorted(tokens.items())),
        notes=tuple(notes),
        measured=Measured(
            steps=len(steps),
            step_s=step_s,
            error_s=pstdev(s.gap_s for s in steps) / math.sqrt(len(steps)),
            wait=fmean(s.get("perf/wait_s") for s in steps) / step_s,
            idle=max(0.0, 1 - running / (knobs.slots * knobs.num_generation_workers)),
            masked=fmean(s.get("rollout/masked_fraction") for s in steps),
            mean_age=fmean(s.get(AVG_STALENESS) for s in steps),
            max_age=max(s.get("rollout/fully_async/oldest_token") for s in steps),
            dropped={reason: n / judged for reason, n in sorted(dropped.items())},
        ),
    )


def knobs_of(s: Flat, *, workers: int, slots: int, engine_most: int) -> SimulatedKnobs:
    """Settings in the simulation's terms. `slots`: of a worker at first, where the setting is auto. `engine_most`: as `Recorded`
    has it, 0 = not known."""
    fixed, bound, interval = s.sglang_server_concurrency, s.max_weight_staleness, s.update_weights_interval
    most = (s.sglang_concurrency_max or AUTO_MAX_RUNNING, engine_most)
    own: dict[str, Any] = {
        "slots": fixed or slots,
        "auto": None if fixed else Limits.of(s.sglang_concurrency_min, most, s.max_masked_fraction, bound, interval),
        "num_generation_workers": workers,
        "aborts": s.pause_generation_mode == "abort",
    }
    for name in SimulatedKnobs.__struct_fields__:
        own.setdefault(name, 0 if s.values.get(name) is None else s.values[name])
    return SimulatedKnobs(**own)


# -- steps -----------------------------------------------------------------------------------------------------------------


def _settled(history: History, settings: Flat) -> list[Step]:
    """Steps under the present settings, without those in which the run filled up."""
    fills = settings.max_weight_staleness + 2
    found = [s for s in settled(history, fills, starts=True) if s.gap_s > 0]
    if any("perf/turn_s" in s.metrics for s in found):
        raise SettingsError("engines and trainer take turns on shared GPUs, which is not simulated")
    if len(found) < FEWEST:
        why = f"under its present settings, without {fills} after each start or change in which it fills up"
        rule = f"{len(found)} steps of {len(history.steps)} count {why}; {FEWEST} are needed"
        raise SettingsError(rule, remedy="Wait for more steps of the run.")
    return found[-LOOKED_AT:]


def _workers(history: History) -> int:
    """Engines that loaded one of the newest versions."""
    newest = max((r["version"] for r in history.activations), default=0)
    return max(1, len({r["actor"] for r in history.activations if r["version"] >= newest - 2}))


def _slots(s: Flat, records: Sequence[Record], steps: Sequence[Step], notes: list[str]) -> int:
    """Slots of a worker; where they are found while the run goes: what was told last, or what ran at most."""
    if s.sglang_server_concurrency:
        return int(s.sglang_server_concurrency)
    told = {r["actor"]: r["slots"] for r in records if r["kind"] == "slots"}
    slots = round(fmean(told.values())) if told else 0
    slots = slots or math.ceil(max(s.get(f"{RUNNING}/mean") for s in steps)) or 1
    notes.append(f"sglang_server_concurrency is auto: simulated from {slots} on each worker, with keys and values that suffice")
    return slots


def _engine_most(s: Flat, records: Sequence[Record]) -> int:
    """What workers last told of the ceiling, where that is less than the settings allow; of several the largest, since some may be
    the tail's. 0: the settings alone say."""
    told = {r["actor"]: int(r.get("most", 0)) for r in records if r["kind"] == "slots"}
    most = max(told.values(), default=0)
    return most if most < (s.sglang_concurrency_max or AUTO_MAX_RUNNING) else 0


def _pace(history: History, records: Sequence[Record], steps: Sequence[Step], notes: list[str]) -> SimulatedPace:
    tokens, seconds = [s.get("rollout/tokens") for s in steps], [s.get("perf/train_s") for s in steps]
    middle, typical = fmean(tokens), fmean(seconds)
    a_token = _slope(tokens, seconds)
    base = typical - a_token * middle
    told = {r["version"]: _at(r) for r in records if r["kind"] == "step" and "entry" in r}
    loads = [r for r in history.activations if r["wall"] >= steps[0].wall and r["version"] in told]
    if not loads:
        notes.append("the record does not tell when versions were served: taken as at once")
    return SimulatedPace(
        train_s=base,
        train_token_s=a_token,
        train_noise_s=tuple(y - base - a_token * t for t, y in zip(tokens, seconds, strict=True)),
        between_s=tuple(max(0.0, s.gap_s - s.get("perf/wait_s") - s.get("perf/train_s")) for s in steps),
        turned_s=tuple(s.get("perf/turned_s") for s in steps),
        publish_s=tuple(max(0.0, _at(r) - told[r["version"]]) for r in loads) or (0.0,),
        pause_s=tuple(r["pause_s"] for r in loads) or (0.0,),
        # The filter's word is two messages away from the trainer's own; often it comes after others that take time.
        hop_s=quantiles((s.get("perf/turned_s") for s in steps), n=4)[0] / 2,
        slowdown=slowdown_of(steps),
    )


def _at(record: Record) -> float:
    """Server time of the entry that a record was made from."""
    return wall_of(record["entry"].partition("@")[2])


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """What one of `x` adds to `y`, between nothing and all of it; all where the record does not tell it to a quarter."""
    middle, typical = fmean(x), fmean(y)
    every = typical / middle if middle else 0.0
    spread = sum((a - middle) ** 2 for a in x)
    if not spread:
        return every
    found = sum((a - middle) * (b - typical) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - typical - found * (a - middle)) ** 2 for a, b in zip(x, y, strict=True)) / (len(x) - 2)
    return min(every, max(0.0, found)) if math.sqrt(rest / spread) < SURE * every else every


# -- samples ---------------------------------------------------------------------------------------------------------------


def _pool(lines: Mapping[int, Record], steps: Sequence[Step], settings: Flat, alone: float) -> tuple[tuple[Draw, ...], ...]:
    """Groups as they were generated; seconds as if each sample ran alone."""
    n, edge = settings.n_samples_per_prompt, settings.max_weight_staleness + 2
    first, last = steps[0].step, steps[-1].step
    found: dict[str, list[Draw]] = {}
    began: dict[str, int] = {}
    for number in range(first - edge, last + 1):
        for name, draw in _lives(lines.get(number, {}), alone):
            found.setdefault(name, []).append(draw)
            began.setdefault(name, number)
    # Of groups that began at the end of what is looked at, the members that took longest may be missing.
    pool = [tuple(draws) for name, draws in found.items() if first <= began[name] <= last - edge]
    pool = pool or [tuple(draws) for name, draws in found.items() if began[name] >= first and len(draws) == n]
    if not pool:
        raise SettingsError("the record tells no group of samples from its first to its last: nothing to simulate")
    return tuple(pool)


def _lives(line: Record, alone: float) -> Iterator[tuple[str, Draw]]:
    """(group, sample) of each that a step tells; what cannot be is left out."""
    groups = line.get("groups", [])
    for at, tokens, ms, score_ms in line.get("lives", []):
        if 0 <= at < len(groups) and tokens > 0 and ms > 0:
            yield groups[at], Draw(tokens, ms / 1e3 * alone, max(0, score_ms) / 1e3)


def _drops(records: Sequence[Record], steps: Sequence[Step], whole: int) -> tuple[Counter[str], dict[str, float]]:
    """Samples dropped by reason meanwhile, and tokens of a mean one for each reason of the filter. `whole`: samples of a group."""
    since, until = steps[0].wall - steps[0].gap_s, steps[-1].wall
    dropped: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for r in records:
        if r["kind"] == "drop" and since <= r["wall"] <= until:
            dropped[r["reason"]] += r.get("samples") or len(r.get("members", ())) or whole
            if "tokens" in r:  # what the trainer gives up is told without
                tokens[r["reason"]] += r["tokens"]
    return dropped, {reason: max(1.0, total / dropped[reason]) for reason, total in tokens.items()}
