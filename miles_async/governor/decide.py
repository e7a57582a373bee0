"""(pure) What the governor does next: at most one change of one knob, or none, with its reason in plain words.

In this order: a change of its own that did not do what it was made for is taken back; data that are too old are made fresher; a
trainer that waits while engines have idle slots gets more under way; where neither waits, the bound goes down if that costs
nothing. What a change would give is simulated with the run's own lengths (docs/scheduling.md).
It does not oscillate: after a change from w to v, w and what lies beyond it are not tried again for REST decisions, and what makes
a change worth it is more than what makes its way back worth it. Only a falling effective sample size goes before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec

from actors.runtime.staleness import rule_of
from miles_async.console.whatif.advice import GAIN, Choice, predict, share
from miles_async.console.whatif.observed import Observed, observe
from miles_async.governor.look import AUTHOR, GovernorLook, StepMeans, read
from miles_async.governor.standing import Knob, Note, NoteKind
from miles_async.settings.errors import SettingsError
from miles_async.settings.governor import GOVERNED
from miles_async.settings.live import check_patch

IDLE = 0.1  # share of the time that a trainer may wait, and of the slots that may be empty
REST = 10  # decisions
WORTH = 0.02  # less time a step that older data must have brought
FREE = 0.02  # more time a step that fresher data may cost as simulated; GAIN is what they may cost in truth
STEP = 4 / 3  # from one value to the next, but for the bound
BOUND, OVER, SLOTS = (knob for knob, *_ in GOVERNED.values())

Check = Callable[[Mapping[str, Any], Mapping[str, object]], Mapping[str, Any]]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One patch. `reason` begins with its purpose: idle, old, fresh or back."""

    knob: str
    value: int
    reason: str


class GovernorDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a look. `now`: what was measured."""

    due: int
    now: StepMeans
    move: Move | None = None
    notes: tuple[Note, ...] = ()


def decide(seen: GovernorLook, check: Check = check_patch) -> GovernorDecision:
    """The move that is due after step `seen.due`, if any."""
    return _Case(seen, check).decision()


class _Case:
    """One look, with what is worked out of it."""

    def __init__(self, seen: GovernorLook, check: Check) -> None:
        self._look, self._check = seen, check
        self._now = read(seen.steps)
        self._most_lost, self._least_ess = (
            float(seen.values["governor_max_lost"]),
            float(seen.values["governor_min_ess"]),
        )
        self._free = [knob for knob in seen.knobs if not knob.hand]
        self._notes: list[Note] = []
        self._observed = observe(seen.seen)

    def decision(self) -> GovernorDecision:
        """The first of the rules that has something to do."""
        for knob in self._look.knobs:
            if knob.hand:
                text = f"{knob.name} was set to {knob.value} by {knob.hand} and is left alone; tune {knob.envelope} gives it back"
                self._note("hand", knob.name, text)
        for name in self._now.unusable:
            self._note("unusable", name, f"{name} is missing or no number in some steps and not used there")
        if self._observed is None:
            self._note("unusable", "the simulation", "the steps measured say too little of lengths and times to simulate them")
        move = self._back() or self._fresher() or self._masks_less() or self._busier() or self._freed()
        return GovernorDecision(due=self._look.due, now=self._now, move=move, notes=tuple(self._notes))

    # -- rules --------------------------------------------------------------------------------------------------

    def _back(self) -> Move | None:
        """Take back the newest change, if it is ours and did not do what it was for."""
        change, now = self._look.newest, self._now
        purpose = change.reason.partition(":")[0]
        if change.author != AUTHOR or purpose == "back":
            return None
        (name, value), *_ = change.values.items()
        knob = next((k for k in self._free if k.name == name), None)
        was, then = change.before.get(name), read(self._look.before)
        if knob is None or not isinstance(was, int) or not knob.holds(was):
            return None
        slower = f"a step takes {now.step_s:.3g} s, {then.step_s:.3g} s before"
        lost = f"{share(now.lost or 0)} of the tokens are lost as too old, {share(then.lost or 0)} before"
        why = ""
        if purpose == "idle":
            if now.step_s > (1 - WORTH) * then.step_s:
                why = slower
            elif self._loses(now) and not self._loses(then):
                why = lost
            elif self._is_old(now) and not self._is_old(then):
                why = f"the effective sample size fell to {now.ess:.2f}"
        elif purpose == "fresh" and now.step_s > (1 + GAIN) * then.step_s:
            why = slower
        elif purpose == "old" and self._loses(then) and (now.lost or 0.0) > (then.lost or 0.0):
            why = lost
        return Move(knob=name, value=was, reason=f"back: {name} {value} did not pay: {why}") if why else None

    def _fresher(self) -> Move | None:
        """Lower the bound where ratios spread too far."""
        if not self._is_old(self._now):
            return None
        ess = f"the effective sample size is {self._now.ess:.2f}, below {self._least_ess:g}"
        for knob in self._free:
            if knob.name != BOUND:
                continue
            if knob.value > knob.low and self._passes(knob, knob.value - 1):
                return Move(knob=BOUND, value=knob.value - 1, reason=f"old: {ess}")
            self._edge(knob, "low", ess)
        return None

    def _masks_less(self) -> Move | None:
        """Take the change that loses fewer tokens at the least time a step."""
        if not self._loses(self._now) or (now := self._present) is None:
            return None
        why = f"old: {share(self._now.lost or 0)} of the tokens are lost as too old, more than {share(self._most_lost)}"

        def serves(c: Choice) -> bool:
            return c.masked <= now.masked / 2 and c.step_s <= (1 + 5 * GAIN) * now.step_s

        return self._best(serves, why)

    def _busier(self) -> Move | None:
        """Get more under way where the trainer waits for engines that have empty slots, or that could take more."""
        seen, waits = self._observed, self._now.waits
        if waits is None or waits < IDLE or seen is None or (now := self._present) is None:
            return None
        full = seen.running >= (1 - IDLE) * seen.slots
        why = f"idle: the trainer waited {waits:.0%} of the time, with {seen.running:.0f} of {seen.slots} slots running"

        def serves(c: Choice) -> bool:
            return (c.slots > now.slots if full else c.slots == now.slots) and (
                (1 + GAIN) * c.step_s <= now.step_s and c.masked <= max(self._most_lost, now.masked)
            )

        return self._best(serves, why)

    def _freed(self) -> Move | None:
        """Lower the bound by one where that costs nothing."""
        waits = self._now.waits
        if waits is None or waits >= IDLE / 2 or (now := self._present) is None:
            return None
        for knob in self._free:
            if knob.name == BOUND and knob.value - 1 >= max(1, knob.low) and not self._rests(knob, knob.value - 1):
                c = self._predicted(knob, knob.value - 1)
                cheap = c.step_s <= (1 + FREE) * now.step_s and c.masked <= max(self._most_lost / 2, now.masked)
                if cheap and self._passes(knob, c.bound):
                    why = f"fresh: the trainer waited {waits:.0%} of the time; as simulated, {_said(c, knob)}"
                    return Move(knob=BOUND, value=c.bound, reason=f"{why}, {now.step_s:.3g} s now")
        return None

    # -- choices ------------------------------------------------------------------------------------------------

    def _best(self, serves: Callable[[Choice], bool], why: str) -> Move | None:
        """Of the changes that serve, nearly the fastest with the least change: slots, then groups, then the bound. Where only one
        beyond an envelope would serve, that is told."""
        found = [(knob, value, self._predicted(knob, value)) for knob in self._free for value in _values(knob)]
        good = [
            (knob, value, c)
            for knob, value, c in found
            if serves(c) and knob.holds(value) and not self._rests(knob, value) and self._passes(knob, value)
        ]
        if not good:
            for knob, _, c in ((k, v, c) for k, v, c in found if not k.holds(v) and serves(c)):
                self._edge(knob, "high" if knob.value == knob.high else "low", f"{why}; as simulated, {_said(c, knob)}")
            return None
        fastest = min(c.step_s for *_, c in good)
        order = (SLOTS, OVER, BOUND)
        fast = [(k, v, c) for k, v, c in good if c.step_s <= (1 + GAIN) * fastest]
        knob, value, c = min(fast, key=lambda one: (order.index(one[0].name), abs(one[1] - one[0].value)))
        now = self._present
        assert now is not None
        return Move(knob=knob.name, value=value, reason=f"{why}; as simulated, {_said(c, knob)}, {now.step_s:.3g} s now")

    def _predicted(self, knob: Knob, value: int) -> Choice:
        """What the simulation says of one knob at another value."""
        seen = self._observed
        assert seen is not None
        bound = value if knob.name == BOUND else seen.bound
        workers = max(1, round(seen.slots / max(1, int(self._look.values[SLOTS]))))
        slots = value * workers if knob.name == SLOTS else seen.slots
        cap = value if knob.name == OVER else seen.over_sampling
        return predict(seen, rule_of(seen.policy, bound), bound, slots, cap=cap)

    @cached_property
    def _present(self) -> Choice | None:
        """What the simulation says of the run as it is; None where its record says too little."""
        seen: Observed | None = self._observed
        return predict(seen, seen.rule, seen.bound, seen.slots, cap=seen.over_sampling) if seen is not None else None

    def _rests(self, knob: Knob, value: int) -> bool:
        """Whether this value, or one on the way to it, was left not long ago."""
        return any(value >= was if was > became else value <= was for was, became in self._left(knob))

    def _left(self, knob: Knob) -> Iterator[tuple[int, int]]:
        """(from, to) of our changes that are younger than REST decisions."""
        since = self._look.due - REST * int(self._look.values["governor_interval"])
        for change in reversed(self._look.changes):
            if change.first <= since:
                return
            if change.author == AUTHOR and knob.name in change.values:
                yield change.before[knob.name], change.values[knob.name]

    def _passes(self, knob: Knob, value: int) -> bool:
        """Whether the rules of settings take it."""
        try:
            self._check(self._look.values, {knob.name: value})
        except SettingsError as error:
            self._note("refused", f"{knob.name}={value}", f"{knob.name} = {value} would serve and is refused: {error}")
            return False
        return True

    # -- words --------------------------------------------------------------------------------------------------

    def _is_old(self, reading: StepMeans) -> bool:
        return reading.ess is not None and reading.ess < self._least_ess

    def _loses(self, reading: StepMeans) -> bool:
        return reading.lost is not None and reading.lost > self._most_lost

    def _edge(self, knob: Knob, end: str, why: str) -> None:
        text = f"{knob.name} = {knob.value} is at the {end} end of {knob.envelope} = {knob.low}:{knob.high}: {why}"
        self._note("edge", f"{knob.name} {end}", text)

    def _note(self, kind: NoteKind, about: str, text: str) -> None:
        if all((n.kind, n.about) != (kind, about) for n in self._notes):
            self._notes.append(Note(kind=kind, about=about, text=text))


def _values(knob: Knob) -> Iterable[int]:
    """Where a knob may go next, and one value beyond an end of its envelope that it stands at."""
    if knob.name == BOUND:
        beyond = [knob.high + 1] if knob.value == knob.high else []
        return [value for value in range(knob.low, knob.high + 1) if value != knob.value] + beyond
    up, down = max(knob.value + 1, round(knob.value * STEP)), min(knob.value - 1, round(knob.value / STEP))
    inside = {min(max(value, knob.low), knob.high) for value in (up, down)} - {knob.value}
    return [
        *sorted(inside),
        *([up] if knob.value == knob.high else []),
        *([down] if knob.value == knob.low and down > 0 else []),
    ]


def _said(c: Choice, knob: Knob) -> str:
    value = {BOUND: c.bound, SLOTS: c.slots}.get(knob.name)
    named = f"{knob.name} {value}" if knob.name == BOUND else f"{value} slots" if value else f"another {knob.name}"
    return f"{named} gives {c.step_s:.3g} s a step and masks {share(c.masked)}"
