"""What the fast paths are measured by: log-probs from whole logits (reference section 4.1), and the bound of packing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.trainer.batch.packing import lower_bound


def token_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z / temperature)[target] and, if asked, -sum p log p; both float32 or wider [T].

    logits [T, V] of any float type, targets int64 [T]. bf16 logits are widened first. Entries of -inf (masked
    vocabulary) have probability 0 and add nothing to the entropy.
    """
    z = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if temperature != 1.0:
        z = z / temperature
    norm = torch.logsumexp(z, -1)
    logp = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - norm
    if not with_entropy:
        return logp, None
    log_p = z - norm.unsqueeze(-1)
    log_p = torch.where(torch.isneginf(log_p), torch.zeros_like(log_p), log_p)
    return logp, -(torch.softmax(z, -1) * log_p).sum(-1)


def strong_lower_bound(lengths: Sequence[int], cap: int, align: int = 1) -> int:
    """Martello and Toth's L2: as `lower_bound`, but counts what fits beside the samples above cap / 2. O(n^2)."""
    best = lower_bound(lengths, cap)
    fitting = [n for n in lengths if n <= cap]
    alone = len(lengths) - len(fitting)
    for small in {n for n in fitting if 2 * n <= cap}:
        big = sum(1 for n in fitting if n > cap - small)
        half = [n for n in fitting if 2 * n > cap and n <= cap - small]
        rest = sum(n for n in fitting if small <= n and 2 * n <= cap)
        best = max(best, alone + big + len(half) + max(0, -(-(rest - len(half) * cap + sum(half)) // cap)))
    return max(-(-best // align) * align, align)
