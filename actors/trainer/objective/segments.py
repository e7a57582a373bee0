"""Packed per-token tensors and their per-sample sums: the one tool every other file here uses.

A batch of S samples with response lengths n_i is one vector of T = sum n_i tokens, samples back to back.
`index[t]` (int64 [T]) says which sample token t belongs to. Always true: masked entries are removed with
`torch.where`, so a NaN or inf under the mask never reaches a sum or a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # tokens in a row of `reverse_scan`
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20 before exp: e^20 = 4.9e8 is far beyond any clip, and finite in float32."""
RAW_LIMIT = 80.0
"""For ratios that are bounded after exp or only reported: e^80 = 5.5e34 is the largest float32 can hold in comfort."""


def keep(mask: Tensor, x: Tensor) -> Tensor:
    """`x` where `mask`, 0 elsewhere; value and gradient. x float [T], mask bool [T]."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def sample_index(lengths: Tensor) -> Tensor:
    """int64 [S] response lengths -> int64 [T] sample of each token. Empty samples take no token."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def starts(lengths: Tensor) -> Tensor:
    """int64 [S] -> int64 [S]: position of each sample's first token."""
    return torch.cumsum(lengths, 0) - lengths


def segment_sum(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of x [T] (or [K, T]) per segment -> [count] (or [K, count])."""
    return torch.zeros((*x.shape[:-1], count), dtype=x.dtype, device=x.device).index_add(-1, index, x)


def safe_log_ratio(mask: Tensor, num: Tensor, den: Tensor, limit: float = LOG_RATIO_LIMIT) -> tuple[Tensor, Tensor]:
    """num - den [T] with the unusable removed -> (log-ratio, mask of usable tokens).

    Infinite differences become +-limit (20 is the limit of the finite case, since `ratio_of` clamps there); NaN
    ones leave the mask (the caller counts them); masked ones are 0. Finite values pass unchanged.
    """
    delta = num - den
    usable = mask & ~torch.isnan(delta)
    return keep(usable, delta).nan_to_num(nan=0.0, posinf=limit, neginf=-limit), usable


def ratio_of(log_ratio: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """exp(clamp(log_ratio, -limit, limit)); no gradient outside the clamp."""
    return torch.exp(log_ratio.clamp(-limit, limit))


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
    return (x - mean) / (variance + 1e-8) ** 0.5


def reverse_scan(x: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """G_t = x_t + factor * G_{t+1} inside each sample, G after its end = 0.

    x float [T] packed, lengths int64 [S]; returns float64 [T]. Samples are laid out in rows of 128 tokens; a
    triangular matrix of powers scans every row at once, and the rows' heads are scanned by the same function
    with factor^128. Cost T * 128, depth log_128 of the longest sample: a 100k-token sample costs two levels,
    and no memory is padded to the longest.
    """
    x = x.to(torch.float64)
    total = int(lengths.sum())
    if total == 0 or factor == 0.0:
        return x.clone()
    rows = (lengths + BLOCK - 1) // BLOCK
    index = sample_index(lengths)
    within = torch.arange(total, device=x.device) - starts(lengths)[index]
    slot = starts(rows)[index] * BLOCK + within
    table = torch.zeros(int(rows.sum()) * BLOCK, dtype=x.dtype, device=x.device)
    table[slot] = x
    steps = torch.arange(BLOCK, device=x.device)
    gap = steps[None, :] - steps[:, None]
    powers = torch.where(gap >= 0, float(factor) ** gap.clamp(min=0).to(x.dtype), 0.0)
    local = table.view(-1, BLOCK) @ powers.T
    if int(rows.max()) > 1:
        heads = reverse_scan(local[:, 0].contiguous(), rows, float(factor) ** BLOCK)
        row_sample = sample_index(rows)
        follows = torch.zeros(heads.numel(), dtype=torch.bool, device=x.device)
        follows[:-1] = row_sample[1:] == row_sample[:-1]
        carry = torch.where(follows, heads.roll(-1), 0.0)
        local = local + carry[:, None] * float(factor) ** (BLOCK - steps).to(x.dtype)[None, :]
    return local.reshape(-1)[slot]
