"""Attention over packed samples where Transformer Engine is not, or can't compute it: the local layer spec's one difference from
the other, and scores that are capped (Gemma 2).

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
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from actors.trainer.megatron_backend.packing import PackedSamples, zigzag
from actors.trainer.torch_backend.attention import attend, pad, unpad
from actors.trainer.torch_backend.layout import PackedLayout


class Attention(DotProductAttention):
    """`core_attention` of a layer spec: causal. Heads of keys may be wider than those of values (latent attention). `cap`: of
    scores, 0 for none."""

    def __init__(self, config: Any, layer_number: int, *args: Any, cap: float = 0.0, k_channels: int | None = None,
                 v_channels: int | None = None, **kw: Any) -> None:  # fmt: skip
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # more are refused there, and done here
        super().__init__(alone, layer_number, *args, **kw)
        self.cap = cap
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        self.window = config.window_size[0] if windowed else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *args: Any,
                packed_seq_params: PackedSamples | None = None, **kw: Any) -> Tensor:  # fmt: skip
        """Packed: query [T, H, D], key and value [T, Hkv, D] -> [T, H, D]; else as megatron-core has it."""
        if packed_seq_params is None and (self.cap or self.window is not None):
            n, samples, *_ = query.shape
            ends = torch.arange(0, (samples + 1) * n, n, dtype=torch.int32, device=query.device)
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            return self._attend(q, k, v, PackedLayout(ends, samples, n, None)).view(samples, n, -1).transpose(0, 1)
        if packed_seq_params is None:
            out: Tensor = super().forward(query, key, value, attention_mask, *args, **kw)
            return out
        layout = packed_seq_params.layout
        assert layout is not None
        cp = parallel_state.get_context_parallel_group()
        if cp.size() == 1:
            return self._attend(query, key, value, layout)
        order, mine = zigzag(packed_seq_params.cu_seqlens_q, cp.size(), cp.rank())
        q, k, v = (gather_from_sequence_parallel_region(x, group=cp)[order] for x in (query, key, value))
        return self._attend(q, k, v, layout)[mine]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        if not self.cap and (self.window is None or layout.longest <= self.window + 1):
            return attend(q, k, v, layout, self.softmax_scale)
        return bounded(q, k, v, layout, self.softmax_scale, cap=self.cap, window=self.window)


def bounded(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, *, cap: float, window: int | None) -> Tensor:
    """The same by whole matrices of scores, [samples, H, longest, longest]: each score is cap * tanh(score / cap) unless cap is 0,
    and a token sees itself and `window` tokens before it (None: all). q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]."""
    groups, n = k.shape[1], layout.longest
    q, k, v = (pad(x, layout).transpose(1, 2).unflatten(1, (groups, -1)) for x in (q, k, v))  # [samples, Hkv, heads of it, n, D]
    scores = q @ k.transpose(-1, -2) * scale
    if cap:
        scores = (scores / cap).tanh() * cap
    seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    if window is not None:
        seen = seen.triu(-window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(v.dtype)
    return unpad((weights @ v).flatten(1, 2).transpose(1, 2), layout)
