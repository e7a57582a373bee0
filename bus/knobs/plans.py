"""Plans: patches that hold from a training step on. They wait on the knobs stream, so that they outlive every process.

Reads and writes  knobs
A plan changes nothing. When the trainer begins its step it appends the plan's values under a new epoch, naming the plan, and takes
them up before the step's batch is cut: its own settings hold from exactly that step. Everybody else takes them as any patch, in
the moment in which that step begins. A plan that was made too late for its step holds from the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bus.errors import KnobRejected
from bus.knobs.kinds import checked
from bus.knobs.live import (
    Check,
    KnobValues,
    append_made,
    changed,
    leaves_plans,
    pending,
    refuse_empty,
)
from bus.messages.control import KnobPatch
from bus.streams.redis import Bus


async def plan(
    bus: Bus, patch: Mapping[str, object], *, at_step: int, author: str, reason: str = "", check: Check | None = None
) -> KnobPatch:
    """Append a plan. It is checked against the values that plans before it leave, and what comes after it must still hold; an
    error of `check`, or KnobRejected, changes nothing."""
    refuse_empty(patch)

    def make(history: list[KnobPatch], live: KnobValues) -> KnobPatch:
        plans = pending(history)
        values: dict[str, Any] = dict(live.values)
        for earlier in plans:
            if earlier.from_step <= at_step:
                values |= earlier.planned or {}
        there = msgspec.structs.replace(live, values=values)
        changes = changed(there, patch, check)
        leaves_plans({**values, **changes}, [p for p in plans if p.from_step > at_step], check, patch)
        return KnobPatch(epoch=0, values={}, planned=changes, at_step=at_step, author=author, reason=reason)

    return await append_made(bus, make)


async def cancel(bus: Bus, epoch: int, *, author: str, reason: str = "", check: Check | None = None) -> KnobPatch:
    """End a plan before its step; KnobRejected when it is none that waits, or a later plan needs it."""

    def make(history: list[KnobPatch], live: KnobValues) -> KnobPatch:
        plans = pending(history)
        _waits(plans, epoch)
        leaves_plans(live.values, [p for p in plans if p.epoch != epoch], check, {"--cancel": epoch})
        return KnobPatch(epoch=0, values={}, plan=epoch, author=author, reason=reason)

    return await append_made(bus, make)


async def carry_out(bus: Bus, planned: KnobPatch, *, step: int) -> KnobPatch:
    """The trainer begins `step`: the plan's values, under a new epoch. One whose values are of no kind any more (another release)
    is cancelled instead, with the reason. KnobRejected when somebody ended it first."""

    def make(history: list[KnobPatch], live: KnobValues) -> KnobPatch:
        _waits(pending(history), planned.epoch)
        why = f"planned for step {planned.at_step} as epoch {planned.epoch}" + (f": {planned.reason}" if planned.reason else "")
        ended = KnobPatch(epoch=0, values={}, plan=planned.epoch, author=planned.author, reason=why)
        try:
            values = {name: checked(name, value, live.kinds) for name, value in (planned.planned or {}).items()}
        except KnobRejected as error:
            return msgspec.structs.replace(ended, reason=f"{why}; given up: {error}")
        values = {name: value for name, value in values.items() if live.values.get(name) != value}
        return msgspec.structs.replace(ended, values=values, at_step=step)

    return await append_made(bus, make)


def _waits(plans: list[KnobPatch], epoch: int) -> None:
    if epoch not in [p.epoch for p in plans]:
        known = ", ".join(f"{p.epoch} (step {p.at_step})" for p in plans) or "none"
        raise KnobRejected(
            knob="epoch", value=epoch, rule=f"no plan of this epoch waits; plans: {known}", remedy="Name one of them."
        )
