"""From hidden states to log-probs of the sampled tokens where each tensor-parallel rank holds a part of the vocabulary.

Rows go in chunks, so that float32 logits exist for one chunk alone; of each row three numbers are kept here and two collectives
of a few bytes a row join the ranks: the vocabulary is never gathered. The backward makes each chunk's logits again, with
z = logits / temperature and p = softmax(z) over the whole vocabulary:
    d logp / d z_j = 1[j = target] - p_j,    d H / d z_j = -p_j (log p_j + H).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.torch_backend.head import rows_of

CHUNK_ELEMENTS = 1 << 27
"""Entries (512 MiB in float32) of one chunk of logits."""


def vocab_parallel_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab: int,
    cap: float = 0.0,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), float32 or wider [R], the same on every rank of `group`.

    hidden [R, D] whole on every rank, weight [V / ranks, D] this rank's rows of one float type, targets int64 [R] over the whole
    vocabulary, temperature > 0 as one value or float32 [R]. `vocab`: tokens of the model; rows behind them are padding and take no
    part. `cap`: logits are cap * tanh(logit / cap) before the temperature; 0: as they are. The gradient of `hidden` is this rank's
    share, to be summed over `group` by the caller; entropy carries gradient only if
    asked to.
    """
    chunk = max(1, chunk_elements // max(1, weight.shape[0]))
    first = 0 if group is None else group.rank() * weight.shape[0]
    real = min(max(vocab - first, 0), weight.shape[0])
    logp, entropy = _Head.apply(hidden, weight, targets - first, temperature, group, real, chunk, cap, entropy_gradient)
    return logp, entropy


def _logits(hidden: Tensor, weight: Tensor, temperature: float | Tensor, cap: float) -> Tensor:
    """float32 or wider [R, V]."""
    z = hidden @ weight.T
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    if cap:
        z = z.div_(cap).tanh_().mul_(cap)
    if isinstance(temperature, Tensor):
        return z.div_(temperature[:, None])
    return z if temperature == 1.0 else z.div_(temperature)


def _here(targets: Tensor, real: int) -> tuple[Tensor, Tensor]:
    """(whether this rank holds each target, its place here or 0)."""
    held = (targets >= 0) & (targets < real)
    return held, torch.where(held, targets, 0)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        group: dist.ProcessGroup | None,
        real: int,
        chunk: int,
        cap: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        n = hidden.shape[0]
        top = torch.full((n,), -torch.inf, dtype=wide, device=hidden.device)
        # Sum of exp(z - top), the same weighted with z, logit of the target.
        sums = torch.zeros(3, n, dtype=wide, device=hidden.device)
        for first in range(0, n if real else 0, chunk):
            part = slice(first, first + chunk)
            z = _logits(hidden[part], weight[:real], rows_of(temperature, part), cap)
            held, place = _here(targets[part], real)
            top[part] = z.amax(1)
            sums[2, part] = torch.where(held, z.gather(1, place[:, None]).squeeze(1), 0.0)
            p = (z - top[part, None]).exp_()
            sums[0, part] = p.sum(1)
            sums[1, part] = p.mul_(z).sum(1)
        if group is not None and group.size() > 1:
            here = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            sums[:2] *= (here - top).exp_()  # a rank of padding alone has -inf and counts nothing
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        lse = top + sums[0].log()
        entropy = lse - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.rest = temperature, real, chunk, cap, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return sums[2] - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        temperature, real, chunk, cap, entropy_gradient = ctx.rest
        # Chunks add up in float32: a bf16 sum of many chunks would lose the small ones.
        wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=wide)
        for first in range(0, hidden.shape[0] if real else 0, chunk):
            part = slice(first, first + chunk)
            warm = rows_of(temperature, part)
            z = _logits(hidden[part], weight[:real], warm, cap)
            # d tanh(x) = 1 - tanh(x) ^ 2, and z is cap * tanh / temperature
            slope = 1 - (z * (warm[:, None] if isinstance(warm, Tensor) else warm) / cap) ** 2 if cap else None
            log_p = z.sub_(lse[part, None])
            g = grads[0][part, None]
            scale = g + (log_p + entropy[part, None]) * grads[1][part, None] if entropy_gradient else g
            d = log_p.exp_().mul_(scale).neg_()
            held, place = _here(targets[part], real)
            d.scatter_add_(1, place[:, None], torch.where(held[:, None], g, 0.0))
            if isinstance(warm, Tensor):
                d /= warm[:, None]
            elif warm != 1.0:
                d /= warm
            if slope is not None:
                d *= slope
            d = d.to(hidden.dtype)
            grad_hidden[part] = d @ weight[:real]
            grad_weight[:real] += d.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None, None
