"""Pure sampling of one token per row. The draw depends on (seed, position) and the row's own distribution, on nothing
else.

Log-probabilities are those of softmax(logits / temperature) before any top-k or top-p cut, as SGLang reports them; a
greedy row (temperature 0) reports the untempered ones.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GREEDY_BELOW = 1e-6
"""Temperatures under this are greedy."""

ALL_TOKENS = 1 << 30
"""top_k that cuts nothing."""


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row from a counter-based hash (the finaliser of splitmix64, twice). [B] -> [B]."""
    with np.errstate(over="ignore"):
        z = _mix(seeds + np.uint64(0x9E3779B97F4A7C15) * (positions.astype(np.uint64) + np.uint64(1)))
        z = _mix(z ^ seeds)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: Tensor,
    temperatures: Tensor,
    draws: NDArray[np.float64],
    greedy: list[int],
    cut: list[int],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities float32 [B].

    logits: float32 [B, V], not kept. temperatures: float32 [B], 1 for greedy rows. draws: [B] in [0, 1). greedy: rows
    that take the most likely token. cut: rows with a top-k or top-p restriction, whose limits stand in top_k and top_p
    [B].
    """
    logprobs = torch.log_softmax(logits.div_(temperatures.unsqueeze(1)), -1)
    if len(greedy) == logits.shape[0]:
        tokens = logprobs.argmax(-1)
    else:
        # float64 keeps the running sum exact enough for large vocabularies; a token of probability 0 spans no interval.
        edges = logprobs.exp().cumsum(-1, dtype=torch.float64)
        aim = torch.from_numpy(draws).unsqueeze(1) * edges[:, -1:]
        tokens = torch.searchsorted(edges, aim, right=True).squeeze(1)
        if cut:
            tokens[cut] = _sample_cut(logprobs[cut], draws[cut], top_k[cut], top_p[cut])
        if greedy:
            tokens[greedy] = logprobs[greedy].argmax(-1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _sample_cut(logprobs: Tensor, draws: NDArray[np.float64], top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """As above among the k most likely tokens, and of these the fewest whose mass reaches p (at least one)."""
    probs, order = torch.sort(logprobs.exp(), stable=True, dim=-1, descending=True)
    before = probs.cumsum(-1) - probs
    ranks = torch.arange(probs.shape[1])
    out = (ranks >= torch.from_numpy(top_k).unsqueeze(1)) | (before > torch.from_numpy(top_p).unsqueeze(1))
    edges = probs.masked_fill_(out, 0.0).cumsum(-1, dtype=torch.float64)
    aim = torch.from_numpy(draws).unsqueeze(1) * edges[:, -1:]
    return order.gather(1, torch.searchsorted(edges, aim, right=True)).squeeze(1)
