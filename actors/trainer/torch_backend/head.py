"""From hidden states to log-probs of the sampled tokens, without keeping [tokens, vocabulary] in float32, and where each
tensor-parallel rank holds a part of the vocabulary (Megatron) without gathering it.

The forward goes over rows in chunks and keeps a few numbers per row, which two collectives of a few bytes a row join over ranks;
the backward makes each chunk's logits again. Where all rows fit into KEEP_ELEMENTS (small vocabularies), the log-probabilities are
kept and nothing is computed twice. The gradient is written out, with z = logits / temperature and p = softmax(z):
    d logp / d z_j = 1[j = target] - p_j,    d H / d z_j = -p_j (log p_j + H).
In half precision on a GPU a chunk of logits is never widened: Triton kernels read it once forward (keeping each row's log-sum-exp)
and turn it into its gradient in place backward.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEEP_ELEMENTS = 1 << 23
"""Entries (32 MiB in float32) up to which the log-probabilities are kept for the backward."""
CHUNK_ELEMENTS = 1 << 27
"""Entries (512 MiB in float32) of one chunk of logits."""
FUSED_CHUNK_ELEMENTS = 1 << 29
"""The same where kernels work on logits of two bytes (1 GiB)."""
KEEP_SHARE = 0.1
"""Share of the GPU's free memory that the kernels' logits may take from forward to backward; else they are made twice, and the
same."""


def token_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab: int | None = None,
    cap: float = 0.0,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    keep_elements: int = KEEP_ELEMENTS,
    fused: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), float32 or wider [R], the same on every rank of `group`.

    hidden [R, D] whole on every rank, weight [V / ranks, D] this rank's rows of one float type, targets int64 [R] over the whole
    vocabulary, temperature > 0 as one value or float32 [R]. `vocab`: tokens of the model; rows behind them are padding and take no
    part (None: there are none). `cap`: logits are cap * tanh(logit / cap) before the temperature; 0: as they are. The entropy
    carries gradient only if asked to. With several ranks the gradient of `hidden` is this rank's share, to be summed over `group`
    by the caller. `fused`: by kernels, where there are any.
    """
    rows, parted = hidden.shape[0], group is not None and group.size() > 1
    first = group.rank() * weight.shape[0] if group is not None else 0
    real = weight.shape[0] if vocab is None else min(max(vocab - first, 0), weight.shape[0])
    half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)
    if fused and half and not (parted or cap) and _kernels() is not None:
        warm = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(rows).contiguous()
        keep = torch.is_grad_enabled() and rows * real * hidden.element_size() <= _free_bytes(hidden.device) * KEEP_SHARE
        whole = weight if real == weight.shape[0] else weight[:real]
        values: tuple[Tensor, Tensor] = _FusedHead.apply(
            hidden, whole, targets, warm, entropy_gradient, max(1, FUSED_CHUNK_ELEMENTS // real), keep
        )
        return values
    chunk = max(1, chunk_elements // max(1, weight.shape[0]))
    keep = not cap and rows <= chunk and rows * real <= keep_elements
    shape = real, chunk, keep, cap, entropy_gradient
    logp, entropy = _Head.apply(hidden, weight, targets - first, temperature, group if parted else None, shape)
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


def _rows_of(x: float | Tensor, part: slice) -> float | Tensor:
    """What one value for all rows, or one for each, is for these."""
    return x[part] if isinstance(x, Tensor) else x


def _here(targets: Tensor, real: int) -> tuple[Tensor, Tensor]:
    """(whether this rank holds each target, its place here or 0)."""
    held = (targets >= 0) & (targets < real)
    return held, torch.where(held, targets, 0)


class _Head(torch.autograd.Function):
    """`shape`: rows of `weight` that are tokens, rows of `hidden` in a chunk, whether log-probabilities of the one chunk are kept,
    cap, whether entropy has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        group: dist.ProcessGroup | None,
        shape: tuple[int, int, bool, float, bool],
    ) -> tuple[Tensor, Tensor]:
        real, chunk, keep, cap, entropy_gradient = shape
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        n, z = hidden.shape[0], None
        top = torch.full((n,), -torch.inf, dtype=wide, device=hidden.device)
        # Sum of exp(z - top), the same weighted with z, logit of the target.
        sums = torch.zeros(3, n, dtype=wide, device=hidden.device)
        for first in range(0, n if real else 0, chunk):
            part = slice(first, first + chunk)
            z = _logits(hidden[part], weight[:real], _rows_of(temperature, part), cap)
            held, place = _here(targets[part], real)
            top[part] = z.amax(1)
            sums[2, part] = torch.where(held, z.gather(1, place[:, None]).squeeze(1), 0.0)
            p = (z - top[part, None]).exp_()
            sums[0, part] = p.sum(1)
            sums[1, part] = p.mul_(z).sum(1)
        if group is not None:
            here = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            sums[:2] *= (here - top).exp_()  # a rank of padding alone has -inf and counts nothing
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        lse = top + sums[0].log()
        entropy = lse - sums[1] / sums[0]
        kept = [z.sub_(lse[:, None])] if keep and z is not None else []
        ctx.save_for_backward(hidden, weight, targets, lse, entropy, *kept)
        ctx.temperature, ctx.shape = temperature, shape
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return sums[2] - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy, *kept = ctx.saved_tensors
        real, chunk, _, cap, entropy_gradient = ctx.shape
        # Chunks add up in float32: a bf16 sum of many chunks would lose the small ones.
        wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=wide)
        for first in range(0, hidden.shape[0] if real else 0, chunk):
            part = slice(first, first + chunk)
            warm, slope = _rows_of(ctx.temperature, part), None
            if kept:
                log_p = kept[0].clone()
            else:
                z = _logits(hidden[part], weight[:real], warm, cap)
                if cap:  # d tanh(x) = 1 - tanh(x) ^ 2, and z is cap * tanh / temperature
                    slope = 1 - (z * (warm[:, None] if isinstance(warm, Tensor) else warm) / cap) ** 2
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
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


@cache
def _kernels() -> ModuleType | None:
    """The Triton kernels; None where Triton is not installed."""
    try:
        from actors.trainer.torch_backend import head_kernels
    except ImportError:
        return None
    return head_kernels


def _free_bytes(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class _FusedHead(torch.autograd.Function):
    """The same by `head_kernels`: hidden and weight in half precision, temperature float32 [R]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        entropy_gradient: bool,
        chunk: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        kernels = _kernels()
        assert kernels is not None
        lse, logp, entropy = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device).unbind()
        kept = []
        for first in range(0, hidden.shape[0], chunk):
            part = slice(first, first + chunk)
            logits = hidden[part] @ weight.T
            kernels.read_rows(logits, targets[part], temperature[part], lse[part], logp[part], entropy[part])
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, temperature, lse, entropy, *kept)
        ctx.entropy_gradient, ctx.chunk = entropy_gradient, chunk
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels = _kernels()
        assert kernels is not None
        hidden, weight, targets, temperature, lse, entropy, *kept = ctx.saved_tensors
        by_logp, by_entropy = grads[0].contiguous(), grads[1].contiguous() if ctx.entropy_gradient else None
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in float32: a sum of many chunks in half precision would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for first in range(0, hidden.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            logits = kept[first // ctx.chunk] if kept else hidden[part] @ weight.T
            d = kernels.turn_into_gradient(
                logits, targets[part], temperature[part], lse[part], entropy[part], by_logp[part],
                None if by_entropy is None else by_entropy[part],
            )  # fmt: skip
            torch.mm(d, weight, out=grad_hidden[part])
            _add_product(grad_weight, d.T, hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total in float32; where torch can, without rounding the product."""
    if total.is_cuda and torch.__version__ >= (2, 11):  # type: ignore[operator, unused-ignore]
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)  # type: ignore[call-overload, unused-ignore]
    else:
        total.add_(a @ b)
