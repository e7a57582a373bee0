"""Attention over packed samples where Transformer Engine is not: the local layer spec's one difference from the other.

megatron-core's own DotProductAttention takes no packed samples; here they go through the kernels that the torch backend uses. With
context parallelism every rank gathers all queries, keys and values and keeps its own rows: right, and for a CPU's tests; on GPUs
ring attention is Transformer Engine's.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from actors.trainer.megatron_backend.packing import PackedSamples, zigzag
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
