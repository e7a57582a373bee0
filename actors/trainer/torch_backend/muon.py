"""Muon: momentum whose update is orthogonalised, for matrices inside the decoder layers.

Update of a matrix W [m, n] with gradient G: B = mu B + G; O = orthogonalise(G + mu B) (Nesterov); W -= lr * 0.2 sqrt(max(m, n)) O,
decoupled weight decay before it. The factor gives O the root mean square of an AdamW update, so one learning rate serves both.
Newton-Schulz iteration: K. Jordan et al., "Muon", 2024; the factor: "Muon is scalable for LLM training", arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTUM = 0.95
ITERATIONS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that pushes singular values towards 1; within 0.7 to 1.2 after five steps."""
RMS = 0.2


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly. float [m, n] -> [m, n]."""
    a, b, c = QUINTIC
    x = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    wide = x.shape[0] > x.shape[1]
    x = x.T if wide else x
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if wide else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """For 2-D parameters, whole or sharded. State: `momentum_buffer`, like the parameter."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"].mul_(MOMENTUM).add_(grad)
        mixed = grad + MOMENTUM * buffer
        if isinstance(mixed, DTensor):
            whole = orthogonalise(mixed.full_tensor())
            update: Tensor = distribute_tensor(whole, mixed.device_mesh, mixed.placements, src_data_rank=None)
        else:
            update = orthogonalise(mixed)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"] * RMS * max(p.shape) ** 0.5)
