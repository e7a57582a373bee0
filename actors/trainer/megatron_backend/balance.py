"""Losses of the routers, which keep experts evenly used and logits small: megatron-core computes them, here they get their weight.

megatron-core weighs them for gradients that are divided by tokens in the end. Here gradients are sums and the policy's loss brings
its own divisor, so each micro-batch's loss counts by its share of the step's tokens, padding left out. With a coefficient c the
gradient of a step is that of  loss + c * sum over its micro-batches of (tokens / tokens of the step) * the routers' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from actors.trainer.megatron_backend.packing import PackedStream
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.training.verbs import Work

BALANCING, SMALL = "load_balancing_loss", "router_z_loss"


class Balance:
    """Of all routers in a rank's chunks. Between `begin` and `measured` lies one pass forward and backward."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Any, groups: Groups, device: torch.device) -> None:
        self._groups, self._config = groups, config
        self._share = 0.0  # of one token in the step
        self._tokens = torch.zeros((), device=device)  # that the router under way sees, without padding
        self._seen = {
            name: torch.zeros((), device=device)
            for name, on in ((BALANCING, config.moe_aux_loss_coeff), (SMALL, config.moe_z_loss_coeff))
            if on
        }
        routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        for router in routers:
            router.attach_and_log_load_balancing_loss = self._balanced
            router.apply_z_loss = self._small
            router._apply_expert_bias = partial(_counted, router)
        layers = torch.tensor(float(len(routers)), device=device)
        dist.all_reduce(layers, group=groups.pp)
        self._layers = float(layers)

    def begin(self, work: Work) -> None:
        """A step over these micro-batches of this rank."""
        real = torch.tensor([float(sum(micro.real_tokens for _, micro in work))], dtype=torch.float64)
        total = float(self._groups.over_data(real, dist.ReduceOp.SUM))
        self._share = 1.0 / total if total else 0.0
        for seen in self._seen.values():
            seen.zero_()

    def measured(self) -> dict[str, float]:
        """The step's losses without their coefficients, mean over layers. Collective."""
        if not self._seen:
            return {}
        sums = torch.stack(list(self._seen.values()))
        dist.all_reduce(sums)  # each rank's tokens are its own
        return {name: value * self._share / self._layers for name, value in zip(self._seen, sums.tolist(), strict=True)}

    def mask(self, micro: PackedStream, chunk: Any) -> Tensor | None:
        """bool [1, tokens of this rank]: true for padding. The chunk that embeds cuts its part for sequence parallelism itself, the
        others are told theirs."""
        if get_attr_wrapped_model(chunk, "pre_process") or not self._config.sequence_parallel:
            return micro.padding
        return micro.padding.chunk(self._groups.tp.size(), 1)[self._groups.tp.rank()]

    def _balanced(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, reduce_group: dist.ProcessGroup,
        reduce_group_has_dp: bool = False, valid_token_count: Tensor | int = 0,
    ) -> Tensor:  # fmt: skip
        """`aux_loss`: this rank's part of the mean over the tokens of `reduce_group`, whose number `valid_token_count` is on some
        releases and in some layouts only."""
        tokens = self._tokens.float()
        dist.all_reduce(tokens, group=reduce_group)
        whole = aux_loss * tokens
        self._seen[BALANCING] += whole.detach() / aux_loss_coeff
        return MoEAuxLossAutoScaler.apply(activation, whole * self._share)

    def _small(self, logits: Tensor, padding_mask: Tensor) -> Tensor:
        """Sum over this rank's tokens of log(sum(exp(logits)))^2, after ST-MoE (arXiv 2202.08906). A router begins with it."""
        self._tokens = (~padding_mask).sum()
        if SMALL not in self._seen or not torch.is_grad_enabled():
            return logits
        whole = logits.logsumexp(-1).square().masked_fill(padding_mask, 0.0).sum()
        self._seen[SMALL] += whole.detach()
        return MoEAuxLossAutoScaler.apply(logits, whole * (self._config.moe_z_loss_coeff * self._share))


def _counted(router: Any, routing_map: Tensor, padding_mask: Tensor) -> None:
    """What a router with biases notes for their update; its own would multiply [tokens, experts] by the mask's [tokens]."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        router.local_tokens_per_expert += (routing_map & ~padding_mask[:, None]).sum(0)
