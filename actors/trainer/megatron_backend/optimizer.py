"""Megatron's optimizer over this rank's model chunks: one update, its gradient norm before clipping, and its rate.

Always true: weights change only where the norm over all ranks is finite, and then on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor


class Update:
    """The optimizer of the policy; its float32 masters and moments are its own, cut over data-parallel ranks if asked for."""

    def __init__(self, config: OptimizerConfig, chunks: list[Any]) -> None:
        self.optimizer: Any = get_megatron_optimizer(config, chunks, get_standard_config_overrides(config))
        self._chunks = chunks
        self._decoupled: bool = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        self._gathers_later = chunks[0].ddp_config.overlap_param_gather
        self._decay = config.weight_decay
        self.steps = 0

    def tensors(self) -> Iterator[Tensor]:
        """Masters and moments of this rank."""
        for part in self.optimizer.chained_optimizers:
            yield from part.get_parameters()
            for state in part.optimizer.state.values() if part.optimizer else ():
                yield from (t for t in state.values() if isinstance(t, Tensor))

    @torch.no_grad()
    def begin_anew(self) -> None:
        """The weights were replaced: masters are made of them, and moments begin at 0."""
        for part in self.optimizer.chained_optimizers:
            if self._decoupled and part.optimizer and not isinstance(part.optimizer, HybridDeviceOptimizer):
                part.optimizer.state.clear()  # Adam holds the masters itself, and makes them of the weights at its next step
                for group in part.optimizer.param_groups:
                    group.pop("step", None)
                continue
            for state in part.optimizer.state.values() if part.optimizer else ():
                for t in state.values():
                    if isinstance(t, Tensor):
                        t.zero_()
        self.optimizer.reload_model_params()

    def clear(self) -> None:
        """Forget all gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def norm(self) -> float:
        """Norm of the summed gradients over all ranks, before clipping; inf or nan where any is."""
        if self.optimizer.prepare_grads():
            return math.inf
        return float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float, *, lr: float, limit: float) -> None:
        """One update at rate `lr`, gradients scaled down to a norm of `limit` (0: never). After `norm`, where it is finite."""
        if 0 < limit < norm:
            for part in self.optimizer.chained_optimizers:
                if params := part.get_parameters():
                    clip_grad_by_total_norm_fp32(params, limit, norm, self._decoupled)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._decay * group.get("wd_mult", 1.0)  # 0 for gains and biases
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        if self._gathers_later:  # whoever reads weights next finds them whole on every rank
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
