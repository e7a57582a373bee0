"""From hidden states to log-probs of the sampled tokens, without keeping [tokens, vocabulary] in float32.

The forward goes over rows in chunks and keeps a few numbers per row; the backward makes each chunk's logits again. Where all
rows fit into KEEP_ELEMENTS (small vocabularies), the log-probabilities are kept and nothing is computed twice.
Same values as log_softmax of whole logits; the gradient is written out, with z = logits / temperature:
    d logp / d z_j = 1[j = target] - p_j,    d H / d z_j = -p_j (log p_j + H).
In half precision on a GPU a chunk of logits is never widened: Triton kernels read it once forward (keeping each row's log-sum-exp)
and turn it into its gradient in place backward.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
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
    *,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    keep_elements: int = KEEP_ELEMENTS,
    fused: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), float32 or wider [R].

    hidden [R, D], weight [V, D] of one float type, targets int64 [R], temperature > 0 as one value or float32 [R].
    The entropy carries gradient only if asked to. `fused`: by kernels, where there are any.
    """
    if fused and hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and _kernels() is not None:
        rows, vocab = hidden.shape[0], weight.shape[0]
        warm = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(rows).contiguous()
        keep = torch.is_grad_enabled() and rows * vocab * hidden.element_size() <= _free_bytes(hidden.device) * KEEP_SHARE
        values: tuple[Tensor, Tensor] = _FusedHead.apply(
            hidden, weight, targets, warm, entropy_gradient, max(1, FUSED_CHUNK_ELEMENTS // vocab), keep
        )
        return values
    chunk = max(1, chunk_elements // weight.shape[0])
    keep = hidden.shape[0] <= chunk and hidden.shape[0] * weight.shape[0] <= keep_elements
    logp, entropy = _TokenHead.apply(hidden, weight, targets, temperature, chunk, keep, entropy_gradient)
    return logp, entropy


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float | Tensor) -> Tensor:
    """float32 or wider [R, V]."""
    z = hidden @ weight.T
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    if isinstance(temperature, Tensor):
        z = z / temperature[:, None]
    elif temperature != 1.0:
        z = z / temperature
    return torch.log_softmax(z, -1)


def rows_of(x: float | Tensor, part: slice) -> float | Tensor:
    """What one value for all rows, or one for each, is for these."""
    return x[part] if isinstance(x, Tensor) else x


class _TokenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        chunk: int,
        keep: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        entropy = torch.empty_like(logp)
        kept = []
        for first in range(0, hidden.shape[0], chunk):
            part = slice(first, first + chunk)
            log_p = _log_softmax(hidden[part], weight, rows_of(temperature, part))
            logp[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(log_p.exp() * log_p).sum(1)
            if keep:
                kept.append(log_p)
        ctx.save_for_backward(hidden, weight, targets, entropy, *kept)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, *kept = ctx.saved_tensors
        # Chunks add up in float32: a bf16 sum of many chunks would lose the small ones.
        wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None  # LoRA's head is frozen
        for first in range(0, hidden.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            warm = rows_of(ctx.temperature, part)
            log_p = kept[0] if kept else _log_softmax(hidden[part], weight, warm)
            g = grads[0][part, None]
            d = -log_p.exp() * (g + (log_p + entropy[part, None]) * grads[1][part, None] if ctx.entropy_gradient else g)
            d.scatter_add_(1, targets[part, None], g)
            if isinstance(warm, Tensor):
                d /= warm[:, None]
            elif warm != 1.0:
                d /= warm
            d = d.to(hidden.dtype)
            grad_hidden[part] = d @ weight
            if grad_weight is not None:
                grad_weight += d.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


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
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for first in range(0, hidden.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            logits = kept[first // ctx.chunk] if kept else hidden[part] @ weight.T
            d = kernels.turn_into_gradient(
                logits, targets[part], temperature[part], lse[part], entropy[part], by_logp[part],
                None if by_entropy is None else by_entropy[part],
            )  # fmt: skip
            torch.mm(d, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, d.T, hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total in float32; where torch can, without rounding the product."""
    if total.is_cuda and torch.__version__ >= (2, 11):  # type: ignore[operator, unused-ignore]
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)  # type: ignore[call-overload, unused-ignore]
    else:
        total.add_(a @ b)
