"""Experts that are told to megatron-core's routers, or kept of them: ours in the place of its RouterReplay, which knows no tokens
without experts, and which stages of a pipeline cannot use.

A router asks by its layer. Always true: what is computed again in the backward pass gets what the forward pass got, since a chunk's
micro-batches go backward in the order in which they went forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from actors.trainer.training.routes import RouteShape, Routing, choose, recorded

Told = tuple[Tensor, Tensor]
"""Experts of the tokens that a router sees, [T, k], and a tally"""


class RoutingReplay:
    """Of all routers in a rank's chunks. `parts`: tensor-parallel ranks that have a part of each stream's tokens (sequence
    parallel); None: this rank's routers see the whole stream."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], shape: RouteShape, parts: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.shape = shape
        self._parts, self._device = parts, device
        self._mode: Literal["", "play", "record"] = ""
        self._told: Told | None = None
        self._micro: Routing | None = None
        self._made: dict[int, list[tuple[int, int, Tensor]]] = {}  # by id of the micro-batch's routing
        self._routers: list[_Router] = []
        for router in (m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)):
            mine = router.router_replay = _Router(self, int(router.layer_number or 1) - 1)
            self._routers.append(mine)

    @contextmanager
    def passing(self, mode: Literal["play", "record"], micros: Sequence[tuple[Routing | None, int]]) -> Iterator[None]:
        """One pass over micro-batches (and their tokens on this rank), each of which is announced by `enter`. A pass that records
        keeps what routers chose in it."""
        self._mode = mode
        try:
            yield
            for routing, tokens in micros if mode == "record" else ():
                if routing is not None:
                    self._keep(routing, tokens)
        finally:
            self._mode, self._told, self._micro = "", None, None
            self._made.clear()
            for router in self._routers:
                router.again.clear()

    @property
    def plays(self) -> bool:
        """Whether routers are told in the pass under way."""
        return self._mode == "play"

    def enter(self, routing: Routing | None) -> None:
        """The next forward of a chunk is this micro-batch's."""
        self._micro = routing
        self._told = routing.on(self._device) if routing is not None and self.plays else None

    def _keep(self, routing: Routing, tokens: int) -> None:
        made = self._made.pop(id(routing), [])
        seen = max((first + len(experts) for _, first, experts in made), default=0)
        if self._parts is not None:
            seen = seen // (self._parts.rank() + 1) * self._parts.size()
        recorded(routing, made, max(tokens, seen), self.shape, self._parts)
        if routing.table is not None:
            routing.table = routing.table[:tokens]  # pipeline stages stretch streams to one length

    def told(self, layer: int, tokens: int) -> Told | None:
        """A router that sees `tokens` tokens asks."""
        if self._told is None:
            return None
        first = tokens * self._parts.rank() if self._parts is not None else 0
        return self._told[0][first : first + tokens, layer], self._told[1]

    def made(self, layer: int, experts: Tensor) -> None:
        """A router has chosen."""
        if self._mode == "record" and self._micro is not None:
            first = len(experts) * self._parts.rank() if self._parts is not None else 0
            self._made.setdefault(id(self._micro), []).append((layer, first, experts.to(torch.int16)))


class _Router:
    """One router's side; megatron-core calls `get_replay_topk`."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        self._replay, self._layer = replay, layer
        self.again: deque[Told | None] = deque()  # what forward passes were told and backward passes may ask again

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores [T, experts] -> (those of the chosen [T, topk], experts int64 [T, topk])"""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if not self._replay.plays:
            told = None
        elif torch._C._current_graph_task_id() != -1:  # inside a backward pass
            told = self.again.popleft()
        else:
            told = self._replay.told(self._layer, scores.shape[0])
            self.again.append(told)
        if told is not None:
            own = choose(own, told[0], self._replay.shape.experts, told[1])
            values = scores.gather(1, own)
        self._replay.made(self._layer, own)
        return values, own
