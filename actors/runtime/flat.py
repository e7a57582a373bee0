"""Tensors that lie one after the other in one buffer of bytes, as trainer and engines exchange them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bus.messages.weights import TensorMeta

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def dtype_of(meta: TensorMeta) -> torch.dtype:
    """Its torch type. Raises ValueError for none."""
    import torch

    found = getattr(torch, meta.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"type {meta.dtype!r} of tensor {meta.name} is unknown.")
    return found


def size_of(metas: Iterable[TensorMeta]) -> int:
    """Bytes of them all. Raises ValueError."""
    return sum(math.prod(meta.shape) * dtype_of(meta).itemsize for meta in metas)


def views(flat: Tensor, metas: Iterable[TensorMeta]) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a flat buffer, uint8 [n_bytes], in order. Raises ValueError."""
    start = 0
    for meta in metas:
        end = start + size_of((meta,))
        yield meta.name, flat[start:end].view(dtype_of(meta)).view(meta.shape)
        start = end
