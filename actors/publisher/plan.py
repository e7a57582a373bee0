"""Who activates next, and which way (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bus.messages.policy import PolicyActive
from bus.messages.weights import WeightPlan

SLOTS_TOLD = 0.1  # change of a worker's slots, since they were said, that is worth saying


class Ways(NamedTuple):
    """Workers to order by the way that was announced; by files beside it; and those that files must still be written for."""

    announced: list[str]
    files: list[str]
    lacking: list[str]


def choose_ways(
    wave: Sequence[str],
    *,
    serving: Mapping[str, int],
    plan: WeightPlan | None,
    files_only: Collection[str],
    have_files: bool,
) -> Ways:
    """The way of each worker of a wave. `plan` None: whole files were announced, good for all. `files_only`: workers whose
    engine is new or whom another way failed; they get files until they activated a version."""
    if plan is None:
        return Ways(list(wave), [], [])
    announced = [name for name in wave if name not in files_only and plan.suits(name, serving[name])]
    rest = [name for name in wave if name not in announced]
    return Ways(announced, rest, []) if have_files else Ways(announced, [], rest)


def next_wave(
    *, serving: Mapping[str, int], target: int, fraction: float, in_progress: Collection[str], late: Collection[str] = ()
) -> list[str]:
    """Workers to order to `target` now.

    `fraction` 1.0 = all at once; 1/k = rolling: at most that share of those that serve a version (`serving` >= 0), but one at
    least, is away at any time. Who serves nothing is missed by nobody and goes at once. Workers already there or on their way are
    left alone. By name, so that the choice does not depend on arrival; the `late` ones last, so that they hold nobody back.
    """
    behind = sorted(name for name, version in serving.items() if version < target and name not in in_progress)
    if fraction >= 1.0:
        return behind
    idle = [name for name in behind if serving[name] < 0]
    at_work = sorted((name for name in behind if serving[name] >= 0), key=lambda name: name in late)
    away = sum(serving.get(name, -1) >= 0 for name in in_progress)
    allowed = max(1, int(sum(version >= 0 for version in serving.values()) * fraction))
    return idle + at_work[: max(0, allowed - away)]


def worth_saying(new: PolicyActive, said: PolicyActive | None) -> bool:
    """Whether `new` differs from what was said last by more than a little in somebody's slots, which may move every second."""
    if said is None or msgspec.structs.replace(new, slots=said.slots) != said or new.slots.keys() != said.slots.keys():
        return True
    return any(abs(slots - said.slots[name]) > SLOTS_TOLD * said.slots[name] for name, slots in new.slots.items())


__all__ = ("Ways", "choose_ways", "next_wave", "worth_saying")
