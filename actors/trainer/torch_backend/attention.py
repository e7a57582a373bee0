"""Causal attention inside each sample of a packed sequence, without a [T, T] mask.

Registered with transformers as `PACKED`; no mask function is registered under that name, so transformers builds none.
The layout travels as a keyword argument of the model's forward. CPU and float32: tokens go into a padded
[samples, longest] layout and back. CUDA in half precision: variable-length flash attention, one operator that torch.compile
does not look into. Key and value heads are never repeated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from actors.runtime.run import Refused
from actors.trainer.torch_backend.layout import PackedLayout

PACKED = "miles_async_packed"
UNSUPPORTED = ("softcap", "s_aux", "sliding_window")
"""Attention variants some model passes as keyword arguments; computing without them would be silently wrong."""

SDPA, FLASH_2, FLASH_3 = "sdpa", "flash_attention_2", "flash_attention_3"


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


def pad(x: Tensor, layout: PackedLayout) -> Tensor:
    """[T, ...] -> [samples, longest, ...], zeros behind each sample."""
    rows = x if layout.slots is None else _Pad.apply(x, layout.slots, layout.samples * layout.longest)
    return rows.view(layout.samples, layout.longest, *x.shape[1:])


def unpad(x: Tensor, layout: PackedLayout) -> Tensor:
    """[samples, longest, ...] -> [T, ...]"""
    flat = x.reshape(-1, *x.shape[2:])
    return flat if layout.slots is None else _Unpad.apply(flat, layout.slots)


@torch.compiler.disable  # torch 2.11 compiles this to a wrong gradient; nothing is gained by it either
def padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """The same by padding; q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]."""
    q, k, v = (pad(x, layout).transpose(1, 2) for x in (q, k, v))
    # Causality alone keeps padding out: it lies behind the last token of its sample.
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return unpad(out.transpose(1, 2), layout)


@torch.library.custom_op("miles_async::flash_attention", mutates_args=(), device_types="cuda")
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """(attention [T, H, D], log-sum-exp of each row's scores float32 [H, T]); q [T, H, D], k and v [T, Hkv, D] in half precision,
    contiguous; cu_seqlens int32 [S + 1]. Differentiable. `kernel`: torch's FlashAttention 2, or SGLang's FlashAttention 3, which
    has no backward: torch's takes its output and log-sum-exp."""
    if kernel == FLASH_3:
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        found = flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=True, return_softmax_lse=True
        )
        return found[0], found[1]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse


@torch.library.custom_op("miles_async::flash_attention_backward", mutates_args=(), device_types="cuda")
def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, *no_dropout, scale=scale
    )
    return dq, dk, dv


@flash_attention.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, kernel: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@flash_attention_backward.register_fake
def _shapes_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.longest, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*flash_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.longest, ctx.scale), *(None,) * 4)


flash_attention.register_autograd(_differentiate, setup_context=_keep)


_chosen = "auto"
"""What `select` found for this process. A plain global: compiled layers notice when it changes."""


def select(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose the kernel of this process by a value of attn_implementation -> the one that runs. Raises Refused where it cannot."""
    global _chosen
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if name in (FLASH_2, FLASH_3) and not flash:
        raise Refused(
            f"attn_implementation={name} computes in bfloat16 on a GPU; this trainer has {str(dtype).removeprefix('torch.')} on "
            f"{device.type}. Use auto or sdpa."
        )
    lacks = _lacks_flash_3(device) if flash and name in ("auto", FLASH_3) else ""
    if name == FLASH_3 and lacks:
        raise Refused(f"attn_implementation={name} takes SGLang's kernels for Hopper: {lacks}. Install SGLang here, or use auto.")
    _chosen = name if name != "auto" else SDPA if not flash else FLASH_2 if lacks else FLASH_3
    return _chosen


def _lacks_flash_3(device: torch.device) -> str:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"this is {torch.cuda.get_device_name(device)}"
    try:
        import sgl_kernel.flash_attn  # noqa: F401
    except (ImportError, OSError) as error:
        return " ".join(str(error).split())
    return ""


def kernel_of(q: Tensor) -> str:
    """What computes attention of these queries, [T, H, D]."""
    fits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return SDPA if not fits else FLASH_2 if _chosen == "auto" else _chosen


def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> Tensor:
    """Attention by the chosen kernel; q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]; Dv other than D by padding."""
    if q.shape[-1] != v.shape[-1] or (kernel := kernel_of(q)) == SDPA:
        return padded_attention(q, k, v, layout, scale)
    out, _ = flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), layout.cu_seqlens, layout.longest, scale, kernel)
    return out


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: PackedLayout | None = None,
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
    return attend(q, k, v, layout, scale)[None], None


def register() -> None:
    """Make `PACKED` a legal attn_implementation. May be called twice."""
    AttentionInterface.register(PACKED, packed_attention)
