"""From logits to log-probs of the sampled tokens and entropy. Reference section 4.1."""

from __future__ import annotations

import torch
from torch import Tensor


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
