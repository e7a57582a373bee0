"""Discounted sums running backwards through packed samples of any mix of lengths, without a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.trainer.objective.segments import sample_index, starts

BLOCK = 128


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
