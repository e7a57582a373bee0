"""Attention over packed samples where Transformer Engine is not: the local layer spec's one difference from the other.

megatron-core's own DotProductAttention takes no packed samples; this module stands in its place and calls the kernels that the torch
backend uses. With context parallelism every rank gathers all queries, keys and values and keeps its own rows: right, and for a
CPU's tests; on GPUs ring attention is Transformer Engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from actors.trainer.megatron_backend.packing import PackedSamples
from actors.trainer.torch_backend.attention import packed_kernel


class PackedAttention(MegatronModule):
    """`core_attention` of a layer spec: causal, no dropout (the policy trained must be the policy that sampled)."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSamples,
        **_: Any,
    ) -> Tensor:
        """query [T, H, D], key and value [T, Hkv, D] -> [T, H, D]"""
        layout = packed_seq_params.layout
        assert layout is not None
        scale = self.softmax_scale or float(query.shape[-1] ** -0.5)
        cp = parallel_state.get_context_parallel_group()
        if cp.size() == 1:
            return packed_kernel(query)(query, key, value, layout, scale)
        order, back = zigzag(packed_seq_params.cu_seqlens_q, cp.size(), cp.rank())
        q, k, v = (gather_from_sequence_parallel_region(x, group=cp)[order] for x in (query, key, value))
        return packed_kernel(q)(q, k, v, layout, scale)[back]


def zigzag(cu_seqlens: Tensor, size: int, rank: int) -> tuple[Tensor, Tensor]:
    """(place in the ranks' concatenated streams of each token of the whole stream, int64 [T]; places in the whole stream of `rank`'s
    tokens, int64 [T / size])."""
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
