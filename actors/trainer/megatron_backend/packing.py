"""Samples packed for megatron-core: one THD stream, its share of each context-parallel rank, and where the response tokens lie.

Always true: with C context-parallel ranks a sample is padded to a multiple of 2 C and rank c holds its pieces c and 2 C - 1 - c
(so that causal attention is even work); the stream is padded to whole blocks by one more sample of zeros; padding lies behind
what is real, so causality keeps it out. Every rank has the same micro-batch and holds the log-probs of its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from actors.trainer.backend import BatchSample
from actors.trainer.torch_backend.layout import PackedBatch, PackedLayout, spread_of, starts_of
from actors.trainer.training.routes import Routes, Routing


@dataclass
class PackedSamples(PackedSeqParams):
    """What attention needs of the whole stream; `layout` is for the kernels of this package."""

    layout: PackedLayout | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedStream:
    """T / C input tokens on this rank, and R response tokens of which it holds some."""

    input_ids: Tensor
    """int64 [1, T / C]"""
    position_ids: Tensor
    """int64 [1, T / C], from 0 in each sample"""
    packed: PackedSamples
    rows: Tensor
    """int64 [K]: places in this rank's stream whose outputs predict response tokens"""
    held: Tensor | None
    """int64 [K]: which of the R response tokens those are; None: all, in order"""
    targets: Tensor
    """int64 [K]"""
    temperature: float | Tensor
    """one value, or float32 [K]"""
    n_rows: int
    """R"""
    response_slots: np.ndarray
    """int64 [R]: place of each response token among all response tokens of the batch, in sample order"""
    lengths: np.ndarray
    """int64: padded tokens of each sample, on all context-parallel ranks together; T is their sum"""
    padding: Tensor
    """bool [1, T / C]"""
    real_tokens: int
    """of all context-parallel ranks, without padding"""
    routing: Routing | None = None
    """experts of this rank's T / C tokens; None: the model chooses"""

    @property
    def tokens(self) -> int:
        """T: of all context-parallel ranks, with padding."""
        return int(self.lengths.sum())

    def stretched(self, tokens: int) -> PackedStream:
        """The same with one more sample of padding, `tokens` long in all: pipeline stages pass on tensors of one shape."""
        if tokens == self.tokens:
            return self
        more, device = tokens - self.tokens, self.input_ids.device
        local = more * self.input_ids.shape[1] // self.tokens
        lengths = np.append(self.lengths, more)
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, local)),
            position_ids=F.pad(self.position_ids, (0, local)),
            padding=F.pad(self.padding, (0, local), value=True),
            packed=_packed(lengths, device),
            lengths=lengths,
            routing=self.routing and self.routing.placed(torch.arange(self.input_ids.shape[1]), self.input_ids.shape[1] + local),
        )


class StreamBatch(PackedBatch):
    """A rollout batch; `block`: the stream's length is a multiple of it (on each context-parallel rank)."""

    def __init__(
        self, samples: Sequence[BatchSample], routes: Routes | None = None, *, cp_size: int = 1, cp_rank: int = 0, block: int = 1
    ) -> None:
        super().__init__(samples, routes)
        self._cp = cp_size, cp_rank
        self._block = block

    def micro_batch(self, positions: Sequence[int], device: torch.device) -> PackedStream:  # type: ignore[override]
        """The given samples, in the given order."""
        plain = super().micro_batch(positions, torch.device("cpu"))
        size, rank = self._cp
        real = np.diff(plain.layout.cu_seqlens.numpy()).astype(np.int64)
        unit = 2 * size if size > 1 else 1
        padded = -(-real // unit) * unit
        whole = math.lcm(self._block * size, unit)
        tail = -int(padded.sum()) % whole
        lengths = np.append(padded, tail) if tail else padded
        total = int(lengths.sum())
        _, position = spread_of(lengths)
        of_real, step = spread_of(real)
        at = starts_of(lengths)[of_real] + step
        tokens, padding = np.zeros(total, np.int64), np.ones(total, bool)
        padding[at] = False
        tokens[at] = plain.input_ids[0].numpy()
        rows = at[plain.rows.numpy()] if of_real.size else plain.rows.numpy()
        targets, warm, held = plain.targets, plain.temperature, None
        routing = plain.routing and plain.routing.placed(torch.from_numpy(at), total)
        if size > 1:
            order, mine = (x.numpy() for x in zigzag(torch.from_numpy(np.append(0, np.cumsum(lengths))), size, rank))
            tokens, position, padding = tokens[mine], position[mine], padding[mine]
            if routing is not None and routing.table is not None:
                routing.table = routing.table[torch.from_numpy(mine)]
            owner, place = np.divmod(order, max(1, total // size))
            keep = np.flatnonzero(owner[rows] == rank)
            rows, held = place[rows[keep]], torch.from_numpy(keep)
            targets = targets[held]
            warm = warm if isinstance(warm, float) else warm[held]
        return PackedStream(
            input_ids=_to(torch.from_numpy(tokens), device)[None],
            position_ids=_to(torch.from_numpy(position), device)[None],
            packed=_packed(lengths, device),
            rows=_to(torch.from_numpy(rows), device),
            held=None if held is None else _to(held, device),
            targets=_to(targets, device),
            temperature=warm if isinstance(warm, float) else _to(warm, device),
            n_rows=plain.targets.numel(),
            response_slots=plain.response_slots,
            lengths=lengths,
            padding=_to(torch.from_numpy(padding), device)[None],
            real_tokens=int(real.sum()),
            routing=routing,
        )


def zigzag(cu_seqlens: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """(place of each token of the whole stream in the ranks' concatenated streams, int64 [T]; those of `rank`'s tokens in the whole
    stream, int64 [T / size])."""
    ends = cu_seqlens.to(torch.int64)
    starts, lengths = ends[:-1], ends.diff()
    of = torch.repeat_interleave(torch.arange(lengths.numel(), device=ends.device), lengths)
    position, piece = torch.arange(of.numel(), device=ends.device) - starts[of], lengths[of] // (2 * size)
    number = position // piece
    owner = torch.minimum(number, 2 * size - 1 - number)
    place = starts[of] // size + position % piece + torch.where(number < size, 0, piece)
    order = owner * (of.numel() // size) + place
    mine = torch.nonzero(owner == rank).squeeze(1)
    return order, mine[place[mine].argsort()]


def _packed(lengths: np.ndarray, device: torch.device) -> PackedSamples:
    longest = int(lengths.max(initial=1))
    ends = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
    slots = None
    if not (lengths == longest).all():
        of, position = spread_of(lengths)
        slots = _to(torch.from_numpy(of * longest + position), device)
    ends = _to(ends, device)
    return PackedSamples(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        layout=PackedLayout(ends, lengths.size, longest, slots),
    )


def _to(x: Tensor, device: torch.device) -> Tensor:
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
