"""From logits to log-probs of the sampled tokens and entropy. Reference section 4.1."""

from __future__ import annotations

import torch
from torch import Tensor


def response_rows(total_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Row of the packed sequence that predicts each response token, int64 [T].

    Sequences of total_lengths [S] lie back to back; the last response_lengths [S] tokens of each are the response;
    token at position p is predicted by row p - 1 of its own sequence. A response that starts at position 0 (no
    prompt) has no such row: its first token gets row 0 of its sequence and must be masked (`prepare_batch` does).
    """
    ends = torch.cumsum(total_lengths, 0)
    index = torch.repeat_interleave(torch.arange(ends.numel(), device=ends.device), response_lengths)
    first = torch.cumsum(response_lengths, 0) - response_lengths
    offset = torch.arange(index.numel(), device=ends.device) - first[index]
    row = ends[index] - response_lengths[index] + offset - 1
    return torch.maximum(row, (ends - total_lengths)[index])


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
