"""Learning rate as a pure function of the rollout number: constant, linear or cosine after a linear warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""name -> share of (lr - min_lr) left at progress in [0, 1]."""


def learning_rate(
    rollout: int, *, lr: float, style: str = "constant", total: int = 0, warmup: int = 0, min_lr: float = 0.0
) -> float:
    """Rate for rollout batch `rollout` (0-based).

    rollout < warmup: lr * (rollout + 1) / (warmup + 1), so the first step is not wasted on 0 and the full rate
    follows. Then `style` from lr down to min_lr, reached at rollout `total` and kept. total and warmup count
    rollouts. total <= warmup leaves no room to decay: min_lr after the warm-up, except for constant.
    """
    if style not in SCHEDULES:
        raise ValueError(f"lr_decay_style={style!r} is unknown. Choose one of {sorted(SCHEDULES)}.")
    if rollout < warmup:
        return lr * (rollout + 1) / (warmup + 1)
    span = total - warmup
    progress = min((rollout - warmup) / span, 1.0) if span > 0 else 1.0
    floor = 0.0 if style == "constant" else min_lr
    return floor + (lr - floor) * SCHEDULES[style](progress)
