"""Staleness per token and the mask that enforces the bound: no token older than the bound ever has gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StaleTokenError(AssertionError):
    """A token beyond the staleness bound would have been trained. A bug, never data: stop."""


def token_steps(spans: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Spans [(step of the weights, tokens), ...] in token order -> each token's step, int64 [length]; ValueError if they do not
    cover it."""
    steps = torch.tensor([step for step, _ in spans], dtype=torch.int64)
    counts = torch.tensor([n for _, n in spans], dtype=torch.int64)
    if int(counts.sum()) != length or bool((counts < 0).any()):
        raise ValueError(f"spans of the weights cover {int(counts.sum())} tokens, the response has {length}.")
    return torch.repeat_interleave(steps, counts)


def staleness(steps: Tensor, current: int) -> Tensor:
    """Steps between the weights that made each token and the weights being trained, >= 0, on either side: of tokens of a lost
    future as `bus.messages.versions.staleness` has it. int64 [T]."""
    return (current - steps).abs()


def fresh(steps: Tensor, current: int, bound: int | None) -> Tensor:
    """bool [T]: tokens within the bound. bound None: all."""
    if bound is None:
        return torch.ones_like(steps, dtype=torch.bool)
    return staleness(steps, current) <= bound


def assert_fresh(steps: Tensor, mask: Tensor, current: int, bound: int | None) -> None:
    """Raises StaleTokenError if any trained token is older than the bound; called right before the gradient step."""
    late = mask & ~fresh(steps, current, bound)
    if bool(late.any()):
        worst = int(staleness(steps, current)[late].max())
        raise StaleTokenError(
            f"{int(late.sum())} trained tokens exceed max_staleness={bound} (oldest: {worst} behind {current}). "
            "The staleness mask was not applied; the step is not taken."
        )
