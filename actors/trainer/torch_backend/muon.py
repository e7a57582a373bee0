"""Muon: momentum whose update is orthogonalised, for matrices inside the decoder layers.

Update of a matrix W [m, n] with gradient G: B = mu B + G; O = orthogonalise(G + mu B) (Nesterov); W -= lr * scale(m, n) * O,
decoupled weight decay before it. Newton-Schulz iteration: K. Jordan et al., "Muon", 2024; `like_adamw`: "Muon is scalable for LLM
training", arXiv 2502.16982. Why not torch's own: docs/dependencies.md.
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
TOGETHER = 1 << 20
"""Elements up to which matrices of one shape are taken at once: of small ones the calls are the cost, of large ones the memory."""


def like_adamw(rows: int, columns: int) -> float:
    """Gives an update the root mean square of AdamW's, so that one learning rate serves both."""
    return RMS * max(rows, columns) ** 0.5


def like_jordan(rows: int, columns: int) -> float:
    """The factor of the first publication."""
    return max(1.0, rows / columns) ** 0.5


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly; a zero matrix stays zero. float [..., m, n] -> [..., m, n]."""
    a, b, c = QUINTIC
    x = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """For 2-D parameters, whole or sharded. State: `momentum_buffer`, like the parameter."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        scale: Callable[[int, int], float] = like_adamw,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._scale = scale

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
            for shape, same in alike.items():
                n = max(1, TOGETHER // shape.numel())
                for i in range(0, len(same), n):
                    self._update(same[i : i + n], group)

    def _update(self, same: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Parameters of one shape. A sharded one is gathered once, so that ranks compute what one rank would."""
        mixed = [self._mixed(p) for p in same]
        whole = torch.stack([m.full_tensor() if isinstance(m, DTensor) else m for m in mixed])
        factor = group["lr"] * self._scale(*same[0].shape)
        for p, m, update in zip(same, mixed, orthogonalise(whole), strict=True):
            if isinstance(m, DTensor):
                update = distribute_tensor(update, m.device_mesh, m.placements, src_data_rank=None)
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-factor)

    def _mixed(self, p: nn.Parameter) -> Tensor:
        """The gradient with the momentum, which it joins."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"].mul_(MOMENTUM).add_(p.grad)
        return p.grad + MOMENTUM * buffer
