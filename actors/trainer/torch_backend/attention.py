"""Causal attention inside each sample of a packed sequence, without a [T, T] mask.

Registered with transformers as `PACKED`; no mask function is registered under that name, so transformers builds none.
The layout travels as a keyword argument of the model's forward. CPU and float32: tokens go into a padded
[samples, longest] layout and back. CUDA in half precision: variable-length flash attention, from torch or flash_attn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from actors.trainer.torch_backend.layout import Layout

PACKED = "miles_async_packed"
UNSUPPORTED = ("softcap", "s_aux", "sliding_window")
"""Attention variants some model passes as keyword arguments; computing without them would be silently wrong."""

Varlen = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
"""(q [T, H, D], k and v [T, Hkv, D], layout, scale) -> [T, H, D]."""


class _Pad(torch.autograd.Function):
    """[T, ...] -> zeros [rows, ...] with token t at slots[t]. Slots are unique, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(slots)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, slots, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """Inverse of `_Pad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, slots, grad), None


def padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """The same by padding; q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]."""
    s, n = layout.samples, layout.longest

    def pad(x: Tensor) -> Tensor:
        rows = x if layout.slots is None else _Pad.apply(x, layout.slots, s * n)
        return rows.view(s, n, *x.shape[1:]).transpose(1, 2)

    # Causality alone keeps padding out: it lies behind the last token of its sample.
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), is_causal=True, scale=scale, enable_gqa=True)
    flat = out.transpose(1, 2).reshape(s * n, *q.shape[1:])
    return flat if layout.slots is None else _Unpad.apply(flat, layout.slots)


def find_varlen() -> Varlen | None:
    """Variable-length flash attention of this installation, None without one."""
    if not torch.cuda.is_available():
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _flash_attn()
    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known:
        return _flash_attn()
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    native_groups = "enable_gqa" in known

    def torch_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        extra: dict[str, Any] = {}
        if k.shape[1] != q.shape[1]:
            if native_groups:
                extra["enable_gqa"] = True
            else:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        at, n = layout.cu_seqlens, layout.longest
        out = varlen_attn(q, k, v, at, at, n, n, scale=scale, **causal, **extra)
        return out if isinstance(out, Tensor) else out[0]

    return torch_varlen


def _flash_attn() -> Varlen | None:
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None

    def dao_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        at, n = layout.cu_seqlens, layout.longest
        out: Tensor = flash_attn_varlen_func(q, k, v, at, at, n, n, softmax_scale=scale, causal=True)
        return out

    return dao_varlen


class _Choice:
    """Which kernel runs; looked up once per process."""

    varlen: Varlen | None = None
    looked = False

    @classmethod
    def of(cls, q: Tensor) -> Varlen:
        if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
            return padded_attention
        if not cls.looked:
            cls.varlen, cls.looked = find_varlen(), True
        return cls.varlen or padded_attention


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

    Dropout is ignored on purpose: the policy trained must be the policy that sampled.
    """
    if layout is None or attention_mask is not None or query.shape[0] != 1:
        raise ValueError("packed attention needs one packed sequence, its layout and no mask.")
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"packed attention does not implement {name}={others[name]!r} of this model.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = float(q.shape[-1] ** -0.5) if scaling is None else scaling
    return _Choice.of(q)(q, k, v, layout, scale)[None], None


def register() -> None:
    """Make `PACKED` a legal attn_implementation. May be called twice."""
    AttentionInterface.register(PACKED, packed_attention)
