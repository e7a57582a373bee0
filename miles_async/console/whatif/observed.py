"""What a run's recorded steps show of its samples, engines and trainer, in the terms of the simulation (pure).

Lengths and seconds are read from the quantiles that every step records (actors/trainer/spread.py). A simulated sample is
drawn from one step's quantiles, by one number for both: the longest is the slowest. Requests running at once follow from
Little's law: seconds that a batch's samples spent on engines over seconds a step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

import msgspec

from actors.generation.engines.records import DEFAULT, ENGINES
from actors.recorder.history import History, Step
from actors.runtime.seeds import rng_for
from actors.runtime.staleness import Rule, bound_in_steps, rule_of
from actors.trainer.spread import LENGTH, PACE, QUANTILES, RUNNING, SECONDS, STRAGGLER
from miles_async.console.whatif.setup import ASKED, SHAPES, Draw, DrawnGroup

LOOKED_AT = 64  # newest steps
STRAGGLERS = 500  # groups drawn to see what independent samples would do
FEWEST = 4
ALIKE = 0.05  # spread of the number of samples running, over its mean, below which their pace cannot be estimated
DROPPED = "filter"  # any reason of it
POINTS = [q / 100 for q in QUANTILES]


class Spread(msgspec.Struct, frozen=True):
    """Values at QUANTILES."""

    values: tuple[float, ...]

    def at(self, share: float) -> float:
        """The value that this share of the samples does not exceed."""
        i = min(bisect_right(POINTS, share), len(POINTS) - 1)
        low, high = POINTS[i - 1], POINTS[i]
        part = (share - low) / (high - low)
        return self.values[i - 1] + part * (self.values[i] - self.values[i - 1])

    def below(self, value: float) -> float:
        """Share of the samples that do not exceed a value."""
        if value >= self.values[-1]:
            return 1.0
        i = bisect_right(self.values, value)
        if i == 0:
            return 0.0
        part = (value - self.values[i - 1]) / (self.values[i] - self.values[i - 1])
        return POINTS[i - 1] + part * (POINTS[i] - POINTS[i - 1])

    @staticmethod
    def of(step: Step, name: str) -> Spread | None:
        """What a step recorded; None where it did not."""
        found = [step.metrics.get(f"{name}/p{q}") for q in QUANTILES]
        return None if None in found else Spread(tuple(float(v) for v in found if v is not None))


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it went in its newest steps."""

    lengths: list[Spread]  # tokens, a spread per step
    seconds: list[Spread]  # on the engine, as it ran
    step_s: float
    train_s: float  # with publishing and saving: a step that waits for nothing
    running: float
    slowdown: float  # per request running; 0 where the run does not show it
    batch: int
    group: int
    bound: int
    interval: int  # steps from one published version to the next
    policy: str
    over_sampling: int
    lookahead: int
    slots: int
    thrown: float = 0.0  # share of the samples that the filter drops
    thrown_length: float = 1.0  # tokens of one of those, over those of one that is trained
    apart: bool = False  # engines of ours and trainer have GPUs of their own, and never change them
    alike: float = 0.0  # share of the groups whose members take equally long; those of the others are drawn one by one

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        return rule_of(self.policy, self.bound)

    def groups(self) -> Iterator[DrawnGroup]:
        """Endless draws; seconds as if each sample ran alone."""
        alone = 1 + self.slowdown * self.running
        draw = rng_for(0, "samples")
        while True:
            members = []
            alike = self.alike > 0 and draw.random() < self.alike
            for number in range(self.group):
                if not (alike and number):
                    i, share = draw.randrange(len(self.lengths)), draw.random()
                members.append((self.lengths[i].at(share), self.seconds[i].at(share) / alone))
            gone = self.thrown > 0 and draw.random() < self.thrown
            scale = self.thrown_length if gone else 1.0
            drawn = tuple(Draw(max(1, round(scale * tokens)), scale * seconds) for tokens, seconds in members)
            yield DrawnGroup(drawn, DROPPED if gone else "")

    def versions(self, share: float) -> float:
        """Versions that are published while a sample is generated, at this quantile of seconds."""
        return median(s.at(share) for s in self.seconds) / (self.interval * self.step_s)

    @property
    def longest(self) -> float:
        """The same of the slowest sample of all."""
        return max(s.at(1.0) for s in self.seconds) / (self.interval * self.step_s)


def observe(history: History, *, slots: int = 0) -> Observed | None:
    """None when the record does not suffice: too few steps, none with spreads, or turns on shared GPUs, where engines and
    trainer never work at once. `slots`: samples that the engines take at once; 0 = workers seen times the setting, or what was
    running at most."""
    knobs = live_knobs(history)
    fills = bound_in_steps(int(_number(knobs.get("max_weight_staleness"))), int(knobs.get("update_weights_interval", 1))) + 1
    steps = [s for s in settled(history, fills)[-LOOKED_AT:] if s.gap_s > 0 and not s.resumed and "perf/turn_s" not in s.metrics]
    steps = [s for s in steps if {"perf/wait_s", f"{SECONDS}/mean"} <= s.metrics.keys()]
    read = [(s, Spread.of(s, LENGTH), Spread.of(s, SECONDS)) for s in steps]
    seen = [(s, lengths, seconds) for s, lengths, seconds in read if lengths is not None and seconds is not None]
    if len(seen) < FEWEST or not knobs:
        return None
    batch, group = int(knobs.get("rollout_batch_size", 0)), int(knobs.get("n_samples_per_prompt", 0))
    if not batch or not group:
        return None
    # Not step by step: after a wave of samples that end at once one step is short, and seems to have had far more running.
    made = batch * group * len(seen)
    samples, tokens = sum(s.thrown[0] for s, _, _ in seen), sum(s.thrown[1] for s, _, _ in seen)
    length = mean(s.get(f"{LENGTH}/mean") for s, _, _ in seen)
    of_thrown = tokens / samples / length if samples and tokens and length else 1.0
    seconds = (made + samples * of_thrown) * mean(s.get(f"{SECONDS}/mean") for s, _, _ in seen)
    running = seconds / sum(s.gap_s for s, _, _ in seen)
    workers = max(1, len({str(r["actor"]) for r in history.activations[-64:]}))
    on_gpus = ENGINES.get(str(knobs.get("engine")), DEFAULT).needs_gpu
    of_each = int(_number(knobs.get("sglang_server_concurrency")))
    return Observed(
        lengths=[lengths for _, lengths, _ in seen],
        seconds=[seconds for _, _, seconds in seen],
        step_s=median(s.gap_s for s, _, _ in seen),
        train_s=median(max(0.0, s.gap_s - s.get("perf/wait_s")) for s, _, _ in seen),
        running=running,
        slowdown=slowdown_of([s for s, _, _ in seen]) / workers,
        batch=batch,
        group=group,
        bound=int(knobs.get("max_weight_staleness", 0)),
        interval=int(knobs.get("update_weights_interval", 1)),
        policy=str(knobs.get("staleness_policy", "auto")),
        lookahead=int(_number(knobs.get("staleness_lookahead"))),
        over_sampling=int(_number(knobs.get("over_sampling_batch_size"))),
        apart=on_gpus and not (knobs.get("colocate") or knobs.get("lend_trainer_gpus")),
        alike=_alike([seconds for _, _, seconds in seen], group, [s.get(f"{STRAGGLER}/mean") for s, _, _ in seen]),
        thrown=samples / (made + samples),
        thrown_length=of_thrown,
        slots=slots or of_each * workers or math.ceil(max([running, *(workers * s.get(f"{RUNNING}/mean") for s, _, _ in seen)])),
    )


def _alike(seconds: Sequence[Spread], group: int, told: Sequence[float]) -> float:
    """Share of alike groups with which the slowest of a group takes as many times the mean of it as was told (`STRAGGLER`, 0 =
    not told)."""
    straggles = [times for times in told if times > 0]
    draw = rng_for(0, "stragglers")
    apart: list[float] = []
    for _ in range(STRAGGLERS if straggles and group > 1 else 0):
        took = [draw.choice(seconds).at(draw.random()) for _ in range(group)]
        apart += [max(took) * group / sum(took)] if sum(took) > 0 else []
    if not apart or mean(apart) <= 1:
        return 0.0
    return min(1.0, max(0.0, (mean(apart) - mean(straggles)) / (mean(apart) - 1)))


def settled(history: History, fills: int, *, starts: bool = False) -> list[Step]:
    """Steps under the present settings, without so many after a change in which the run fills up or drains; with `starts`
    without those after each start as well."""
    patches: list[int] = []
    for record in history.knobs[1:]:
        while patches and patches[-1] >= int(record["epoch"]):  # on a bus made anew epochs go on from a checkpoint
            patches.pop()
        if {*ASKED, *SHAPES} & record["values"].keys():
            patches.append(int(record["epoch"]))
    changed, found = patches[-1] if patches else -1, []
    left = fills if starts else 0
    for step in history.steps:
        before = max(0, step.knob_epoch) < changed
        left = fills if before or (starts and step.resumed) else left - 1
        if left < 0:
            found.append(step)
    return found


def live_knobs(history: History) -> dict[str, Any]:
    """The newest values of all knobs that the run recorded."""
    values: dict[str, Any] = {}
    for record in history.knobs:
        values |= record["values"]
    return values


def _number(value: Any) -> float:
    """0 for a knob that is no number (a setting of `auto`)."""
    return float(value) if isinstance(value, int | float) else 0.0


def slowdown_of(steps: Sequence[Step]) -> float:
    """How much one sample more on a worker slows its others, as a share of a lone one's pace, from the samples of all these
    steps together; 0 where they do not tell: too alike, or no slower."""
    wanted = {f"{RUNNING}/variance", f"{RUNNING}/mean", f"{PACE}/mean", f"{PACE}/per_running"}
    told = [s for s in steps if wanted <= s.metrics.keys()]
    if not told:
        return 0.0
    running, pace = [s.get(f"{RUNNING}/mean") for s in told], [s.get(f"{PACE}/mean") for s in told]
    middle, typical = mean(running), mean(pace)
    within = [s.get(f"{RUNNING}/variance") for s in told]
    variance = mean(within) + mean((r - middle) ** 2 for r in running)
    if variance < (ALIKE * middle) ** 2:
        return 0.0
    shared = mean(v * s.get(f"{PACE}/per_running") for v, s in zip(within, told, strict=True))
    shared += mean((r - middle) * (p - typical) for r, p in zip(running, pace, strict=True))
    slope = shared / variance
    alone = typical - slope * middle
    return slope / alone if slope > 0 and alone > 0 else 0.0
