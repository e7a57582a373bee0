"""Resume, restart or give up a prefix, and in which order (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from bus.messages.samples import Parked, Response
from bus.messages.versions import staleness

Action = Literal["resume", "restart", "drop"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class Waiting(msgspec.Struct, frozen=True):
    """A parked sample as the policies see it. `order` is its place of arrival."""

    order: int
    parked: Parked


class Plan(msgspec.Struct, frozen=True):
    """What to do with one waiting sample."""

    order: int
    action: Action


BufferPolicy = Callable[[int, Sequence[Waiting]], list[Plan]]


def fifo(step: int, waiting: Sequence[Waiting]) -> list[Plan]:
    """First parked, first resumed; nothing is given up."""
    return [Plan(w.order, "resume") for w in sorted(waiting, key=lambda w: w.order)]


def freshness_first(step: int, waiting: Sequence[Waiting]) -> list[Plan]:
    """Oldest prefixes first, so that they end while they may still be trained; among equals the longest."""

    def key(w: Waiting) -> tuple[int, int, int]:
        oldest = max((staleness(step, s.step) for s in w.parked.response.spans), default=0)
        return -oldest, -w.parked.response.n_tokens, w.order

    return [Plan(w.order, "resume") for w in sorted(waiting, key=key)]


def restart_stale(step: int, waiting: Sequence[Waiting]) -> list[Plan]:
    """First in, first out, but a prefix whose every token is older than one step starts again."""
    return [
        Plan(w.order, "restart" if _all_older(step, w.parked.response) else "resume")
        for w in sorted(waiting, key=lambda w: w.order)
    ]


def _all_older(step: int, response: Response) -> bool:
    return bool(response.spans) and all(staleness(step, s.step) > 1 for s in response.spans)


POLICIES: dict[str, BufferPolicy] = {
    "fifo": fifo,
    "freshness_first": freshness_first,
    "restart_stale": restart_stale,
}


def mask_prefix(response: Response) -> Response:
    """The same tokens, none of them trainable (mask_offpolicy_in_partial_rollout)."""
    return msgspec.structs.replace(response, loss_mask=memoryview(bytes(len(response.loss_mask))))
