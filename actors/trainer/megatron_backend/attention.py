"""Attention over packed samples where Transformer Engine is not: the local layer spec's one difference from the other.

megatron-core's own DotProductAttention takes no packed samples; here they go through the kernels that the torch backend uses. With
context parallelism every rank gathers all queries, keys and values and keeps its own rows: right, and for a CPU's tests; on GPUs
ring attention is Transformer Engine's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from actors.trainer.megatron_backend.packing import PackedSamples
from actors.trainer.torch_backend.attention import attend


class Attention(DotProductAttention):
    """`core_attention` of a layer spec: causal. Heads of keys may be wider than those of values (latent attention)."""

    def __init__(self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kw: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # more are refused there, and done here
        super().__init__(alone, *args, **kw)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *args: Any,
                packed_seq_params: PackedSamples | None = None, **kw: Any) -> Tensor:  # fmt: skip
        """Packed: query [T, H, D], key and value [T, Hkv, D] -> [T, H, D]; else as megatron-core has it."""
        if packed_seq_params is None:
            out: Tensor = super().forward(query, key, value, attention_mask, *args, **kw)
            return out
        layout = packed_seq_params.layout
        assert layout is not None
        cp = parallel_state.get_context_parallel_group()
        if cp.size() == 1:
            return attend(query, key, value, layout, self.softmax_scale)
        order, mine = zigzag(packed_seq_params.cu_seqlens_q, cp.size(), cp.rank())
        q, k, v = (gather_from_sequence_parallel_region(x, group=cp)[order] for x in (query, key, value))
        return attend(q, k, v, layout, self.softmax_scale)[mine]


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
