"""Tensors of a bucket as one flat buffer, kept and filled anew for every version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bus.messages.weights import Bucket, TensorMeta

if TYPE_CHECKING:
    from torch import Tensor


BUCKET_BYTES = 2 << 30
"""Engines handle buckets one after the other, each with a request's overhead: few large ones are fastest while
engines have twice their size to spare."""


def plan_buckets(tensors: Iterable[tuple[TensorMeta, int]], limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets of (tensor, bytes) pairs. A tensor larger than the limit gets a bucket of its own."""
    buckets: list[Bucket] = []
    held: list[TensorMeta] = []
    size = 0
    for meta, n_bytes in tensors:
        if held and (size + n_bytes > limit_bytes or held[-1].dtype != meta.dtype):
            buckets.append(Bucket(tensors=tuple(held), n_bytes=size))
            held, size = [], 0
        held.append(meta)
        size += n_bytes
    if held:
        buckets.append(Bucket(tensors=tuple(held), n_bytes=size))
    return tuple(buckets)


class FlatBuffers:
    """Buffers for one model, on the device of its tensors. The layout is that of the first `fill`.

    `shared`: directory for files that hold the buffers, so that other processes of a host without GPUs can map them.
    """

    def __init__(self, limit_bytes: int = BUCKET_BYTES, *, shared: Path | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._shared = shared
        self.files: list[Path] = []
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
        if self.flat and self.flat[0].is_cuda:
            torch.cuda.synchronize(self.flat[0].device)  # others read these bytes next, on streams of their own

    def _allocate(self, tensors: Mapping[str, Tensor]) -> None:
        import torch

        pairs = [(meta_of(name, t), n_bytes_of(t)) for name, t in tensors.items()]
        self.buckets = plan_buckets(pairs, self._limit_bytes)
        for bucket in self.buckets:
            first = tensors[bucket.tensors[0].name]
            if self._shared is None or first.device.type != "cpu":
                flat = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=first.device)
            else:
                flat = self._map(self._shared / f"flat.{len(self.flat)}", bucket.n_bytes)
            self.flat.append(flat)
        self._views = self._cut(self.flat)

    def _map(self, path: Path, n_bytes: int) -> Tensor:
        import torch

        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an engine may still map the file of a trainer that died
        self.files.append(path)
        return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8)

    def _cut(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors inside flat buffers, by name."""
        import math

        import torch

        found: dict[str, Tensor] = {}
        for bucket, whole in zip(self.buckets, flat, strict=True):
            start = 0
            for meta in bucket.tensors:
                dtype: torch.dtype = getattr(torch, meta.dtype)
                end = start + math.prod(meta.shape) * dtype.itemsize
                found[meta.name] = whole[start:end].view(dtype).view(meta.shape)
                start = end
        return found

    def on_host(self) -> dict[str, Tensor]:
        """A copy of what was filled in last, in host memory."""
        return self._cut([flat.to("cpu", copy=True) for flat in self.flat])


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """Name, type and shape as plans state them."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def n_bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
