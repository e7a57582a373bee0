"""Experts of a layer as one product each way: torch's grouped kernel over the weights of all experts, in place of Transformer
Engine's call for every expert, which leaves a GPU waiting for the host.

Weights stay parameters of their own, with Transformer Engine's names. Always true: only where they, and their gradients, lie one
behind the other in Megatron's buffers, and torch's kernel takes them, are they taken as one tensor; elsewhere Transformer Engine
computes (all of it with `--moe-expert-kernel te`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)
ELSEWHERE = ("fp8", "fp4", "delay_wgrad_compute", "moe_apply_probs_on_input", "fine_grained_activation_offloading",
             "add_bias_linear", "use_te_activation_func", "activation_func_clamp_value", "glu_linear_offset")  # fmt: skip
"""Fields of TransformerConfig that ask for what is not done here."""
ALIGNED = 16  # bytes, that rows of both matrices are a multiple of


def grouped(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The same layers with these experts in place of Transformer Engine's."""
    for layer in block.layer_specs:
        experts = getattr(getattr(layer.submodules.mlp, "submodules", None), "experts", None)
        if experts is not None and experts.module is TEGroupedMLP:
            experts.module = GroupedExperts
    return block


class _Products(torch.autograd.Function):
    """x [T, in] of experts one after the other, ends int32 [E], weight [E, out, in] -> [T, out]. The gradient of the weights is
    added to `total` [E, out, in]; they themselves get none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.total = weight, total
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        if ctx.total is not None:
            ctx.total.add_(F.grouped_mm(grad.t(), x, offs=ends))
        return F.grouped_mm(grad, ctx.weight, offs=ends), None, None, None


class GroupedExperts(TEGroupedMLP):
    """`overlapped`: gradients are sent while others are computed, and each weight has to say when its own is there."""

    overlapped = False

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        for linear in (self.linear_fc1, self.linear_fc2):
            in_order_of_buffers(linear)
        self._views: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._found = (0, 0)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden [T, width] sorted by expert, probs [T]"""
        if self.overlapped or self.activation_recompute or not hidden.numel() or not self._look():
            found: tuple[Tensor, Tensor | None] = super().forward(hidden, tokens_per_expert, probs)
            return found
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        inner = _Products.apply(hidden, ends, *self._views["fc1"])
        if self.config.bias_activation_fusion:
            inner = weighted_bias_swiglu_impl(inner, None, probs[:, None])
        else:
            gate, up = inner.chunk(2, -1)
            inner = (self.config.activation_func(gate) * up * probs[:, None]).to(hidden.dtype)
        return _Products.apply(inner, ends, *self._views["fc2"]), None

    def _look(self) -> bool:
        """Whether all weights, and gradients where they are wanted, can be taken as one tensor; looked at anew when they moved."""
        first: Any = self.linear_fc1.weight0
        total = getattr(first, "main_grad", None)
        if total is None and torch.is_grad_enabled():
            return False
        now = (first.data_ptr(), 0 if total is None else total.data_ptr())
        if now != self._found:
            self._found, self._views = now, {}
            if not any(getattr(self.config, name, None) for name in ELSEWHERE) and self.config.gated_linear_unit:
                self._views = self._taken()
            if not self._views:
                log.warning("experts are computed one by one: their weights or gradients do not lie one behind the other, or suit "
                            "no kernel of torch's")  # fmt: skip
        return bool(self._views)

    def _taken(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, linear in (("fc1", self.linear_fc1), ("fc2", self.linear_fc2)):
            weights: list[Any] = [getattr(linear, f"weight{e}") for e in range(self.num_local_experts)]
            weight, totals = as_one([w.detach() for w in weights]), [w.main_grad for w in weights if hasattr(w, "main_grad")]
            total = as_one(totals)
            if weight is None or (totals and (total is None or total.shape != weight.shape)) or not _taken_by_kernel(weight):
                return {}
            found[name] = weight, total
        return found


def _taken_by_kernel(weight: Tensor) -> bool:
    """Whether torch has a kernel for products with weights [E, out, in], and with their gradients."""
    rows = [n * weight.element_size() % ALIGNED for n in weight.shape[1:]]
    return hasattr(F, "grouped_mm") and (not weight.is_cuda or (weight.dtype == torch.bfloat16 and not any(rows)))


def in_order_of_buffers(linear: nn.Module) -> None:
    """Weights of experts are listed last to first: Megatron lays parameters into its buffers in reverse."""
    for name in reversed(list(linear._parameters)):
        linear._parameters[name] = linear._parameters.pop(name)


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """[E, ...] over E tensors of one shape at even distances in one storage; None for others, and for none."""
    if not parts:
        return None
    first = parts[0]
    step = parts[1].storage_offset() - first.storage_offset() if len(parts) > 1 else first.numel()
    for n, part in enumerate(parts):
        alike = part.shape == first.shape and part.is_contiguous() and part.dtype == first.dtype
        there = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (alike and there and part.storage_offset() == first.storage_offset() + n * step):
            return None
    if step < first.numel():
        return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()), first.storage_offset())
