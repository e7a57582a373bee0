"""Experts on their way from samples to routers: what engines chose for each token (R3), or what our own routers chose before the
step, chosen again while the step computes.

Always true: what is replayed are indices; the weights of the experts are computed anew, with gradient. A token whose experts
are not known, or cannot be, is routed by the model itself and counted: damage never ends a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.backend import BackendConfig, BatchSample

Mode = Literal["", "rollout", "own"]


def mode_of(config: BackendConfig) -> Mode:
    """Whose experts are chosen again: the engine's, or those of our own log-prob pass."""
    return "rollout" if config.use_rollout_routing_replay else "own" if config.use_routing_replay else ""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """`layers`: all of the model's, those without experts too."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """Type of a table; its largest number says that a token's experts are not known."""
        return np.uint8 if self.experts <= 255 else np.int16


@dataclass(slots=True, eq=False)
class Routing:
    """Of the T input tokens of a micro-batch on this rank. The batch's `tally` counts what routers did."""

    experts: int
    table: Tensor | None = None
    """uint8 or int16 [T, layers, top_k] on the host; None: not recorded yet"""
    tally: list[Tensor] = field(default_factory=list)

    def placed(self, at: Tensor, tokens: int) -> Routing:
        """The same in a stream of `tokens` tokens, where the t-th of these is at[t], int64 [T]; of the others nothing is known."""
        if self.table is None:
            return self
        table = self.table.new_full((tokens, *self.table.shape[1:]), torch.iinfo(self.table.dtype).max)
        return Routing(self.experts, table.index_copy_(0, at, self.table), self.tally)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """(table, a new tally) on a device; None: nothing is known."""
        if self.table is None:
            return None
        self.tally.append(torch.zeros(2, dtype=torch.int64, device=device))
        return self.table.to(device, non_blocking=True), self.tally[-1]


class Routes:
    """A rollout batch's. `records`: nothing is known before the log-prob pass of our own."""

    def __init__(self, samples: Sequence[BatchSample], shape: RouteShape, *, records: bool) -> None:
        self.shape, self.records = shape, records
        self.flags: dict[str, list[str]] = {}
        self._tally: list[Tensor] = []
        self._known: list[np.ndarray | None] = []
        self._tokens = self._missing = 0
        for sample in () if records else samples:
            inputs = max(0, len(sample.prompt_tokens) + len(sample.response_tokens) - 1)
            given, fault = self._checked(sample.experts, inputs)
            if fault:
                self.flags.setdefault(fault, []).append(sample.train.sample_id)
            self._known.append(given)
            self._tokens += inputs
            self._missing += inputs - (0 if given is None else len(given))

    def _checked(self, given: np.ndarray | None, inputs: int) -> tuple[np.ndarray | None, str]:
        shape = self.shape
        if given is None:
            return None, "routing_missing"
        if not given.size:
            return None, "routing_lost"
        if given.ndim != 2 or given.shape[1] != shape.layers * shape.top_k or len(given) > inputs:
            return None, "routing_wrong_shape"
        if given.min() < 0 or given.max() >= shape.experts:
            return None, "routing_out_of_range"
        return given, ""

    def micro_batch(self, ids: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> Routing:
        """Of these samples, one after the other, each with `lengths` input tokens."""
        shape = self.shape
        if self.records:
            return Routing(shape.experts, None, self._tally)
        unknown = np.iinfo(shape.dtype).max  # type: ignore[type-var]
        table = np.full((int(sum(lengths)), shape.layers * shape.top_k), unknown, shape.dtype)
        at = 0
        for sample, length in zip(ids, lengths, strict=True):
            if (given := self._known[sample]) is not None:
                table[at : at + len(given)] = given
            at += int(length)
        return Routing(shape.experts, torch.from_numpy(table).view(-1, shape.layers, shape.top_k), self._tally)

    def metrics(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Tokens without experts of the batch, and of the experts that routers were given the share that they would not have
        chosen (of the ranks that `total` sums over; 0 where none were given)."""
        slots, other = total(sum((t.cpu() for t in self._tally), torch.zeros(2, dtype=torch.int64))).tolist()
        found = {"routing_mismatch": other / slots if slots else 0.0}
        if not self.records:
            found |= {"routing_tokens": float(self._tokens), "routing_fallback_tokens": float(self._missing)}
            found |= {name: float(len(ids)) for name, ids in self.flags.items()}
        return found


def choose(own: Tensor, given: Tensor, experts: int, tally: Tensor) -> Tensor:
    """Experts of each token, int64 [T, k]: those given (any integers [T, k]) where they are k different experts of the model, else
    its `own`. Adds to tally, int64 [2]: experts given, and those among them that are not the router's own choice."""
    given = given.long()
    known = (given >= 0).all(-1) & (given < experts).all(-1)
    known &= (given[:, :, None] == given[:, None, :]).sum((1, 2)) == given.shape[1]
    index = torch.where(known[:, None], given, own)
    other = (index[:, :, None] != own[:, None, :]).all(-1)
    tally += torch.stack((known.sum() * given.shape[1], other.sum()))
    return index


def recorded(
    routing: Routing,
    made: Sequence[tuple[int, int, Tensor]],
    tokens: int,
    shape: RouteShape,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Keep what routers chose: (layer, first token, experts [n, k]); what nobody chose stays unknown. `group`: ranks that hold
    parts of the same tokens; each gets all."""
    kind = torch.uint8 if shape.dtype is np.uint8 else torch.int16
    unknown = torch.iinfo(kind).max
    if made:
        table = torch.full((tokens, shape.layers, shape.top_k), unknown, dtype=torch.int32, device=made[0][2].device)
        for layer, first, experts in made:
            table[first : first + len(experts), layer] = experts.to(torch.int32)
        if group is not None:
            dist.all_reduce(table, dist.ReduceOp.MIN, group=group)
        routing.table = table.to(kind).cpu()
