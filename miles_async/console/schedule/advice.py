"""What other bounds would mask and gain, from a run's own lengths (pure): sentences for the doctor and the report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actors.recorder.history import History
from miles_async.console.schedule.model import Rule, Setup, simulate
from miles_async.console.schedule.observed import Observed, observe
from miles_async.console.text import plural

BOUNDS = range(1, 7)
FEWER_SLOTS = (0.75, 0.6, 0.5, 0.4, 0.3)
MOST_SAMPLES = 256  # of a step of the model: larger batches are scaled down with their slots
ALLOWED = 0.01  # masked share that needs no change
GAIN = 0.05  # of a step's time; a smaller gain is not mentioned
STEPS, WARM = 50, 12


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and what it gives: seconds a step, share of tokens masked, requests running, groups split."""

    rule: Rule
    bound: int
    slots: int
    step_s: float
    masked: float
    running: float
    split: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """`now`: the run as it is set, by the model. `choices`: each bound with all slots and all that it admits, under `split`
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
    now = predict(seen, seen.rule, seen.bound, seen.slots, cap=seen.over_sampling)
    rule: Rule = "member" if seen.rule == "member" else "split"
    choices = tuple(predict(seen, rule, bound, seen.slots) for bound in BOUNDS)
    fewer: tuple[Choice, ...] = ()
    if (
        seen.slowdown
        and seen.bound
        and choices[seen.bound - 1 : seen.bound]
        and choices[seen.bound - 1].masked > ALLOWED
    ):
        fewer = tuple(predict(seen, rule, seen.bound, round(part * seen.slots)) for part in FEWER_SLOTS)
    return Advice(observed=seen, now=now, choices=choices, lines=tuple(_lines(seen, now, choices, fewer)))


def predict(seen: Observed, rule: Rule, bound: int, slots: int, *, cap: int = 0) -> Choice:
    """What the model says. `cap`: groups in generation at most, 0 = what the bound admits."""
    batch = max(1, round(seen.batch / max(1.0, seen.batch * seen.group / MOST_SAMPLES)))
    scale = seen.batch / batch
    setup = Setup(
        rule=rule,
        bound=bound,
        batch=batch,
        group=seen.group,
        slots=max(1, round(slots / scale)),
        over_sampling=max(1, round(cap / scale)) if cap else 0,
        train_s=seen.train_s,
        slowdown=seen.slowdown * scale,
        steps=STEPS,
        warm=WARM,
    )
    found = simulate(setup, seen.samples())
    return Choice(
        rule=rule,
        bound=bound,
        slots=slots,
        step_s=found.step_s,
        masked=found.masked,
        running=found.running * scale,
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
        f"At bound {now.bound} ({now.rule}) that masks {share(now.masked)} of the tokens, by the model, at {now.step_s:.3g} s a "
        f"step; this run's steps take {seen.step_s:.3g} s, of which the trainer works {seen.train_s:.3g} s, with "
        f"{seen.running:.0f} of {plural(now.slots, 'slot')} running.",
    ]
    if not seen.slowdown:
        lines.append("This run does not show how much requests slow each other; the model assumes that they do not.")
    enough = next((c for c in fewer if c.masked <= ALLOWED), None)
    if enough is not None:
        lines.append(
            f"With {enough.slots} slots bound {enough.bound} masks {share(enough.masked)}, at {enough.step_s:.3g} s a step."
        )
    faster = now.step_s / wished.step_s
    if faster < 1 + GAIN and now.masked <= max(ALLOWED, wished.masked):
        lines.append(f"Bound {now.bound} serves these lengths: no bound up to {BOUNDS[-1]} is {GAIN:.0%} faster.")
        return lines
    gain = f" and is {faster:.2f} times as fast" if faster >= 1 + GAIN else ""
    how = f" under {wished.rule}" if wished.rule != now.rule else ""
    how += ", with all that it admits in generation," if (wished.bound, wished.rule) == (now.bound, now.rule) else ""
    lines.append(
        f"Bound {wished.bound}{how} masks {share(wished.masked)}{gain}: {wished.step_s:.3g} s a step, "
        f"{wished.running:.0f} running."
    )
    return lines
