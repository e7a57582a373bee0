"""Mixture of experts on the torch backend: routers in float32 that can be told whom to choose, grouped products on CUDA.

Losses that balance experts are of the Megatron backend alone: here the policy that is trained is the one that sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from actors.trainer.training.routes import RouteShape, Routing, choose, recorded

FAMILIES = ("qwen3_moe",)


class ReplayedRouter(Qwen3MoeTopKRouter):
    """transformers' router in float32. `given`: experts to choose, integers [T, k]; `made`: where to keep what was chosen."""

    given: Tensor | None = None
    made: Tensor | None = None
    tally: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., D] -> logits [T, E], weights [T, k], experts int64 [T, k]"""
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
        probs = torch.softmax(logits, -1)
        values, index = torch.topk(probs, self.top_k, dim=-1)
        if self.given is not None and self.tally is not None:
            index = choose(index, self.given, self.num_experts, self.tally)
            values = probs.gather(1, index)
        if self.made is not None:
            self.made.copy_(index)
        if self.norm_topk_prob:
            values = values / values.sum(-1, keepdim=True)
        return logits, values, index


def prepare(hf: Any) -> None:
    """A model of one of FAMILIES as it is trained; others stay as they are."""
    if hf.config.model_type in FAMILIES:
        for module in hf.modules():
            if type(module) is Qwen3MoeTopKRouter:
                module.__class__ = ReplayedRouter


def implementation(device: torch.device) -> str:
    """Of the products of all experts: one kernel for all on CUDA, one after the other elsewhere."""
    return "grouped_mm" if device.type == "cuda" else "eager"


def shape_of(config: Any) -> RouteShape | None:
    """None: the model has no experts."""
    if config.model_type not in FAMILIES:
        return None
    return RouteShape(config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)


class Replay:
    """The routers of one model, layer by layer."""

    def __init__(self, blocks: list[nn.Module], shape: RouteShape, device: torch.device) -> None:
        self.shape, self._device = shape, device
        gates: list[Any] = [getattr(getattr(block, "mlp", None), "gate", None) for block in blocks]
        self._routers: dict[int, ReplayedRouter] = {n: gate for n, gate in enumerate(gates) if isinstance(gate, ReplayedRouter)}

    @contextmanager
    def playing(self, routing: Routing) -> Iterator[None]:
        """Routers choose what `routing` knows, also in what computes again inside the body."""
        if (told := routing.on(self._device)) is None:
            yield
            return
        table, tally = told
        for n, router in self._routers.items():
            router.given, router.tally = table[:, n], tally
        try:
            yield
        finally:
            for router in self._routers.values():
                router.given = router.tally = None

    @contextmanager
    def recording(self, routing: Routing, tokens: int) -> Iterator[None]:
        """What routers choose for `tokens` tokens in the body is kept in `routing`."""
        made = torch.empty(len(self._routers), tokens, self.shape.top_k, dtype=torch.int16, device=self._device)
        for part, router in zip(made, self._routers.values(), strict=True):
            router.made = part
        try:
            yield
        finally:
            for router in self._routers.values():
                router.made = None
        recorded(routing, [(n, 0, part) for n, part in zip(self._routers, made, strict=True)], tokens, self.shape)
