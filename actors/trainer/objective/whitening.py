"""Whitening: advantages to mean 0 and variance 1 over all trained tokens of the batch, all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actors.trainer.objective.segments import keep

EPS = 1e-8


def whiten(x: Tensor, mask: Tensor, *, all_reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """(x - mu) / sqrt(var + 1e-8), every position shifted, statistics from masked-in positions only.

    x float [T], mask bool [T] -> float64 [T]. Two passes in float64: the one-pass form cancels when the mean is
    much larger than the spread. var has the n/(n-1) factor for n >= 2. `all_reduce` sums a float64 vector over
    every rank that holds different tokens (data and context parallel); it is called exactly twice on each rank,
    also by ranks with nothing to train. Nothing trained anywhere: ValueError on every rank.
    """
    x = x.to(torch.float64)
    reduce = all_reduce or (lambda t: t)
    kept = keep(mask, x)
    n, total = reduce(torch.stack([mask.sum().to(torch.float64), kept.sum()])).tolist()
    mean = total / max(n, 1.0)
    spread = reduce(keep(mask, kept - mean).square().sum().reshape(1)).item()
    if n == 0:
        raise ValueError("whitening a batch without a single trained token: mean and variance are undefined.")
    variance = spread / n * (n / (n - 1) if n >= 2 else 1.0)
    return (x - mean) / (variance + EPS) ** 0.5
