"""Tensors of a bucket as one flat buffer, kept and filled anew for every version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.trainer.transports.buckets import BUCKET_BYTES, plan_buckets
from bus.messages.weights import Bucket, TensorMeta

if TYPE_CHECKING:
    from torch import Tensor


class FlatBuffers:
    """Buffers for one model, on the device of its tensors. The layout is that of the first `fill`."""

    def __init__(self, limit_bytes: int = BUCKET_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.buckets: tuple[Bucket, ...] = ()
        self.flat: list[Tensor] = []
        self._views: dict[str, Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors into place (one kernel launch a bucket). ValueError when they are not those of the first time."""
        import torch

        if not self.flat:
            self._allocate(tensors)
        if tensors.keys() != self._views.keys():
            lost = sorted(self._views.keys() ^ tensors.keys())
            raise ValueError(f"{len(lost)} tensors came or went since the first version, first {lost[0]}")
        with torch.no_grad():
            torch._foreach_copy_(list(self._views.values()), [tensors[name].detach() for name in self._views])

    def _allocate(self, tensors: Mapping[str, Tensor]) -> None:
        import torch

        pairs = [(_meta(name, t), t.numel() * t.element_size()) for name, t in tensors.items()]
        self.buckets = plan_buckets(pairs, self._limit_bytes)
        for bucket in self.buckets:
            first = tensors[bucket.tensors[0].name]
            flat = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=first.device)
            start = 0
            for meta in bucket.tensors:
                t = tensors[meta.name]
                end = start + t.numel() * t.element_size()
                self._views[meta.name] = flat[start:end].view(t.dtype).view(t.shape)
                start = end
            self.flat.append(flat)


def _meta(name: str, tensor: Tensor) -> TensorMeta:
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


__all__ = ("FlatBuffers",)
