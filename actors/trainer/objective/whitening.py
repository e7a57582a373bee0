"""Whitening: advantages to mean 0 and variance 1 over all trained tokens of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.trainer.objective.segments import keep

EPS = 1e-8


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mu) / sqrt(var + 1e-8), every position shifted, statistics from masked-in positions only.

    x float [T], mask bool [T] -> float64 [T]. Two passes in float64: the one-pass form cancels when the mean is
    much larger than the spread. var has the n/(n-1) factor for n >= 2. Nothing trained: ValueError.
    """
    x = x.to(torch.float64)
    kept, n = keep(mask, x), int(mask.sum())
    mean = float(kept.sum()) / max(n, 1)
    spread = float(keep(mask, kept - mean).square().sum())
    if n == 0:
        raise ValueError("whitening a batch without a single trained token: mean and variance are undefined.")
    variance = spread / n * (n / (n - 1) if n >= 2 else 1.0)
    return (x - mean) / (variance + EPS) ** 0.5
