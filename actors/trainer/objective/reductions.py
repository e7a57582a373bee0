"""From per-token values to the scalar loss.

per_sample: (1/R) sum_i [sum_t m x]_i / max(D_i, 1), D_i the trained tokens of sample i's whole rollout, R the
rollouts of the step: the mean over rollouts of token means (siblings of one trajectory count once).
per_token: sum m x / N, N the trained tokens of the step. constant: (1/R) sum m x / c (Dr. GRPO).
Everything global (D_i, R, N) is fixed before the step is cut into micro-batches, so the sum over micro-batches
and ranks does not depend on packing, order or rank count. Reference section 4.8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actors.trainer.objective.segments import keep

REDUCERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "per_sample": lambda totals, constant: 1.0 / totals.clamp(min=1),
    "per_token": lambda totals, constant: torch.ones_like(totals),
    "constant": lambda totals, constant: torch.full_like(totals, 1.0 / constant),
}
"""name -> (mask totals of the rollout of each sample [S], constant) -> weight of a token of each sample [S]."""


def token_weights(name: str, denominators: Tensor, index: Tensor, constant: float = 1.0) -> Tensor:
    """float [T]: what each token counts in the reduced sum. denominators float [S], index int64 [T]."""
    return REDUCERS[name](denominators, constant)[index]


def reduce_sum(x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """sum_t m_t w_t x_t, undivided; x [T] (or [K, T]) -> [] (or [K]). Masked x may be anything."""
    return keep(mask, x) @ weights


def divisor(name: str, rollouts: int, trained_tokens: int) -> float:
    """The step's global divisor, at least 1 so that a step with nothing to train is 0 and not NaN."""
    return float(max(trained_tokens if name == "per_token" else rollouts, 1))
