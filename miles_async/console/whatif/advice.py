"""What other bounds would mask and gain, from a run's own lengths (pure): sentences for the doctor and the report, choices for the
governor. Its simulations are short ones, of a batch scaled down: see `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from actors.recorder.history import History
from actors.recorder.points import STALE_REASONS
from actors.runtime.seeds import rng_for
from actors.runtime.staleness import Rule, bound_in_steps
from miles_async.console.text import plural
from miles_async.console.whatif.observed import Observed, observe
from miles_async.console.whatif.setup import SimulatedKnobs, SimulatedPace
from miles_async.console.whatif.simulation import Simulation, Stands

BOUNDS = range(1, 7)
FEWER_SLOTS = (0.75, 0.6, 0.5, 0.4, 0.3)
MOST_SAMPLES, FEWEST_SAMPLES = 128, 32
"""Of a simulated step, with those that the filter drops, and without them: larger batches are scaled down with their slots."""
ALLOWED = 0.01  # masked share that needs no change
GAIN = 0.05  # of a step's time; a smaller gain is not mentioned
FULL, IDLE = 0.95, 0.6  # engines are the limit where so many slots run and the trainer works less than this of a step
STEPS, WARM = 32, 8


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and what it gives: seconds a step, share of tokens masked (with samples dropped as too old), requests running,
    groups split."""

    rule: Rule
    bound: int
    slots: int
    step_s: float
    masked: float
    running: float
    split: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`now`: the run as it is set, simulated. `choices`: each bound with all slots and all that it admits, under `split`
    if the run may split, else under its own rule. `lines`: the text; its last line is the advice."""

    observed: Observed
    now: Choice
    choices: tuple[Choice, ...]
    lines: tuple[str, ...]


def advise(history: History, *, slots: int = 0) -> Advice | None:
    """None when the run has recorded too little; see `observe`."""
    seen = observe(history, slots=slots)
    if seen is None:
        return None
    rule: Rule = "member" if seen.rule == "member" else "split"
    choices = tuple(predict(seen, rule, bound, seen.slots) for bound in BOUNDS)
    among = seen.rule == rule and not seen.over_sampling and seen.bound in BOUNDS
    now = choices[BOUNDS.index(seen.bound)] if among else predict(seen, seen.rule, seen.bound, seen.slots, cap=seen.over_sampling)
    fewer: tuple[Choice, ...] = ()
    if seen.slowdown and seen.bound and choices[seen.bound - 1 : seen.bound] and choices[seen.bound - 1].masked > ALLOWED:
        fewer = tuple(predict(seen, rule, seen.bound, round(part * seen.slots)) for part in FEWER_SLOTS)
    return Advice(observed=seen, now=now, choices=choices, lines=tuple(_lines(seen, now, choices, fewer)))


def predict(seen: Observed, rule: Rule, bound: int, slots: int, *, cap: int = 0) -> Choice:
    """What the simulation says. `cap`: groups in generation at most, 0 = what the bound admits. `step_s` is infinite where the run
    would stand still."""
    most = max(FEWEST_SAMPLES, MOST_SAMPLES * (1 - seen.thrown))
    batch = max(1, round(seen.batch / max(1.0, seen.batch * seen.group / most)))
    scale = seen.batch / batch
    knobs = SimulatedKnobs(
        max_weight_staleness=bound,
        staleness_policy=rule,
        rollout_batch_size=batch,
        n_samples_per_prompt=seen.group,
        over_sampling_batch_size=max(1, round(cap / scale)) if cap else 0,
        update_weights_interval=seen.interval,
        staleness_lookahead=max(1, round(seen.lookahead / scale)),
        slots=max(1, round(slots / scale)),
    )
    pace = SimulatedPace(train_s=seen.train_s, slowdown=seen.slowdown * scale)
    simulation = Simulation(knobs, pace, seen.groups(), rng_for(0, "advice"))
    try:
        found = simulation.play(STEPS, WARM + bound_in_steps(bound, seen.interval))
    except Stands:
        return Choice(rule=rule, bound=bound, slots=slots, step_s=inf, masked=0.0, running=0.0, split=0.0)
    return Choice(
        rule=rule,
        bound=bound,
        slots=slots,
        step_s=found.step_s,
        masked=found.masked + sum(found.dropped.get(reason, 0.0) for reason in STALE_REASONS),
        running=(1 - found.idle) * knobs.slots * scale,
        split=found.split,
    )


def best(choices: Sequence[Choice]) -> Choice:
    """The lowest bound that masks no more than ALLOWED and is nearly as fast as any; of the fast ones the one that masks
    least, if none masks so little."""
    fastest = min(c.step_s for c in choices)
    fast = [c for c in choices if c.step_s <= (1 + GAIN) * fastest]
    return next((c for c in fast if c.masked <= ALLOWED), min(fast, key=lambda c: (c.masked, c.bound)))


def share(value: float) -> str:
    """`0 %`, `0.1 %`, `12 %`."""
    percent = 100 * value
    return "0 %" if percent < 0.05 else f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def _lines(seen: Observed, now: Choice, choices: Sequence[Choice], fewer: Sequence[Choice]) -> list[str]:
    wished = best(choices)
    lines = [
        f"One sample in 100 takes {seen.versions(0.99):.1f} versions or more, the longest {seen.longest:.1f}; half of them take "
        f"less than {seen.versions(0.5):.1f}.",
        f"At bound {now.bound} ({now.rule}) that masks {share(now.masked)} of the tokens, as simulated, at {now.step_s:.3g} s a "
        f"step; this run's steps take {seen.step_s:.3g} s, of which the trainer works {seen.train_s:.3g} s, with "
        f"{seen.running:.0f} of {plural(now.slots, 'slot')} running.",
    ]
    if not seen.slowdown:
        lines.append("This run does not show how much requests slow each other; it is taken that they do not.")
    enough = next((c for c in fewer if c.masked <= ALLOWED), None)
    if enough is not None:
        lines.append(
            f"With {enough.slots} slots bound {enough.bound} masks {share(enough.masked)}, at {enough.step_s:.3g} s a step."
        )
    if wished.running >= FULL * wished.slots and seen.train_s < IDLE * wished.step_s:
        own = ", and so would engines on the trainer's GPUs (--colocate --no-offload, --lend-trainer-gpus)" if seen.apart else ""
        lines.append(
            f"The engines are the limit: {plural(wished.slots, 'slot')} are full, and the trainer works "
            f"{share(seen.train_s / wished.step_s)} of a step. More engines, or slots, would shorten it{own}."
        )
    faster = now.step_s / wished.step_s
    if faster < 1 + GAIN and now.masked <= max(ALLOWED, wished.masked):
        lines.append(f"Bound {now.bound} serves these lengths: no bound up to {BOUNDS[-1]} is {GAIN:.0%} faster.")
        return lines
    gain = f" and is {faster:.2f} times as fast" if faster >= 1 + GAIN else ""
    how = f" under {wished.rule}" if wished.rule != now.rule else ""
    how += ", with all that it admits in generation," if (wished.bound, wished.rule) == (now.bound, now.rule) else ""
    lines.append(
        f"Bound {wished.bound}{how} masks {share(wished.masked)}{gain}: {wished.step_s:.3g} s a step, {wished.running:.0f} running."
    )
    return lines
