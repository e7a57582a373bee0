"""Which ready groups make the next batch (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from bus.messages.groups import GroupKept
from bus.messages.versions import VersionSpan, staleness

Policy = Literal["mask", "wait", "drop"]


class Cut(msgspec.Struct, frozen=True):
    """`take` in training order when the batch is complete, else empty; `drop` pairs group and reason; `missing` says what
    the trainer waits for."""

    take: tuple[str, ...] = ()
    drop: tuple[tuple[str, str], ...] = ()
    missing: str = ""


def spans_of(group: GroupKept) -> list[VersionSpan]:
    """All spans of a group's samples."""
    return [span for scored in group.samples for span in scored.rollout.response.spans]


def group_age(step: int, group: GroupKept) -> int:
    """Staleness of the oldest token, 0 without tokens."""
    return max((staleness(step, s.step) for s in spans_of(group)), default=0)


def hopeless(step: int, group: GroupKept, bound: int) -> bool:
    """Whether no token is within the bound."""
    spans = spans_of(group)
    return bool(spans) and all(staleness(step, s.step) > bound for s in spans)


def cut(
    *,
    ready: Mapping[str, GroupKept],
    open_order: Sequence[str],
    step: int,
    groups_per_step: int,
    bound: int,
    policy: Policy,
    lookahead: int,
) -> Cut:
    """Oldest first among what is ready.

    `open_order`: ids of all open untrained groups in issue order (only `wait` looks at it): with lookahead W a batch may
    take only from the first groups_per_step + W - 1 open ones, so that no straggler is passed by more than W groups.
    """
    drop: list[tuple[str, str]] = []
    fit: list[str] = []
    for group_id, group in ready.items():
        if hopeless(step, group, bound) or (policy == "drop" and group_age(step, group) > bound):
            drop.append((group_id, "stale"))
        else:
            fit.append(group_id)
    fit.sort(key=lambda g: (-group_age(step, ready[g]), g))
    if policy == "wait":
        window = set(open_order[: groups_per_step + max(1, lookahead) - 1])
        fit = sorted(g for g in fit if g in window)
    dropped = tuple(sorted(drop))
    if len(fit) < groups_per_step:
        return Cut(drop=dropped, missing=f"{groups_per_step - len(fit)} of {groups_per_step} groups")
    return Cut(take=tuple(fit[:groups_per_step]), drop=dropped)


__all__ = ("Cut", "Policy", "cut", "group_age", "hopeless")
