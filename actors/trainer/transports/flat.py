"""Weights in buckets, and each bucket as one flat buffer, kept and filled anew for every version."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from actors.runtime.flat import views
from bus.messages.weights import Bucket, TensorMeta

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NamedTensors = list[tuple[str, "Tensor"]]
"""A bucket: names and tensors of one type, on one device. Good until the next is asked for; perhaps the weights themselves."""
BUCKET_BYTES = 2 << 30
"""Engines handle buckets one after the other, each with a request's overhead: few large ones are fastest while
engines have twice their size to spare."""


def bucketed(tensors: Iterable[tuple[str, Tensor]], limit_bytes: int = BUCKET_BYTES) -> Iterator[NamedTensors]:
    """Buckets of at most `limit_bytes`, but for a tensor that is larger alone. As much, and the tensor that came last, is held."""
    held: dict[torch.dtype, NamedTensors] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in tensors:
        n_bytes = n_bytes_of(tensor)
        while sizes and sum(sizes.values()) + n_bytes > limit_bytes:
            largest = max(sizes, key=lambda dtype: sizes[dtype])
            del sizes[largest]
            yield (full := held.pop(largest))
            full.clear()  # or whoever took it would hold it until the next one is there
        held.setdefault(tensor.dtype, []).append((name, tensor))
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + n_bytes
    while held:
        yield (full := held.pop(next(iter(held))))
        full.clear()


def spoken(buckets: Generator[NamedTensors], say: Callable[[str], None]) -> Generator[NamedTensors]:
    """The same buckets; of each tensor name, type, shape and checksum are said as it passes."""
    from actors.trainer.training.files import hash_tensors

    with closing(buckets):
        for bucket in buckets:
            for name, tensor in bucket:
                say(f"{name} {tensor.dtype} {list(tensor.shape)} {hash_tensors({name: tensor.detach().cpu()})}")
            yield bucket


class FlatBuffers:
    """Buffers for one model, on the device of its tensors: the one copy of a version that engines take while training goes on. The
    layout is that of the first `fill`.

    `shared`: directory for files that hold the buffers, so that other processes of a host without GPUs can map them.
    """

    def __init__(self, *, shared: Path | None = None) -> None:
        self._shared = shared
        self.files: list[Path] = []
        self.buckets: tuple[Bucket, ...] = ()
        self.flat: list[Tensor] = []

    def fill(self, buckets: Iterable[NamedTensors]) -> None:
        """Copy each bucket into its place as it comes (one kernel launch). ValueError, once all are taken, when they are not those
        of the first time: the buffers hold nothing then."""
        import torch

        first, filled = not self.flat, 0
        lost: set[str] = set()
        for bucket in buckets:
            if first:
                self._add(bucket)
            names = [meta.name for meta in self.buckets[filled].tensors] if filled < len(self.buckets) else []
            if [name for name, _ in bucket] == names:
                with torch.no_grad():
                    torch._foreach_copy_(self._cut(filled), [tensor.detach() for _, tensor in bucket])
            else:
                lost |= {name for name, _ in bucket} ^ set(names)
            filled += 1
        lost |= {meta.name for bucket in self.buckets[filled:] for meta in bucket.tensors}
        if lost:
            raise ValueError(f"{len(lost)} tensors came or went since the first version, first {min(lost)}")
        if self.flat and self.flat[0].is_cuda:
            torch.cuda.synchronize(self.flat[0].device)  # others read these bytes next, on streams of their own

    @property
    def device(self) -> torch.device:
        return self.flat[0].device

    def flats(self) -> Iterable[Tensor]:
        """The buffers, in order."""
        return self.flat

    def held(self) -> Iterator[NamedTensors]:
        """What was filled in last, in place."""
        for i, bucket in enumerate(self.buckets):
            yield list(views(self.flat[i], bucket.tensors))

    def _add(self, tensors: NamedTensors) -> None:
        import torch

        device = tensors[0][1].device
        bucket = described(tensors)
        if self._shared is None or device.type != "cpu":
            flat = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=device)
        else:
            flat = self._map(self._shared / f"flat.{len(self.flat)}", bucket.n_bytes)
        self.buckets += (bucket,)
        self.flat.append(flat)

    def _map(self, path: Path, n_bytes: int) -> Tensor:
        import torch

        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an engine may still map the file of a trainer that died
        self.files.append(path)
        return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8)

    def _cut(self, index: int) -> list[Tensor]:
        """The tensors inside a flat buffer, in order."""
        return [tensor for _, tensor in views(self.flat[index], self.buckets[index].tensors)]


class PassingBuckets:
    """Buckets straight from the weights, each flat while it is sent: nothing of a version is kept. `export`: as the
    training's thread calls it."""

    def __init__(self, export: Callable[[], Generator[NamedTensors]]) -> None:
        self._export = export
        self.buckets: tuple[Bucket, ...] = ()
        self.device: torch.device

    def measure(self) -> None:
        """What the buckets hold, the first time; as `flats`, in the training's thread."""
        if not self.buckets:
            found = []
            for bucket in self._export():
                found.append(described(bucket))
                self.device = bucket[0][1].device
            self.buckets = tuple(found)

    def flats(self) -> Iterator[Tensor]:
        """The buckets of the weights as they are now. ValueError when they are not those that were measured."""
        import torch

        with closing(self._export()) as export:
            for bucket, known in zip(export, self.buckets, strict=True):
                if described(bucket) != known:
                    raise ValueError(f"the bucket of {bucket[0][0]} holds other tensors than in the first version")
                yield torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket])


def described(bucket: NamedTensors) -> Bucket:
    """A bucket as plans state it."""
    return Bucket(tensors=tuple(meta_of(*pair) for pair in bucket), n_bytes=sum(n_bytes_of(t) for _, t in bucket))


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """Name, type and shape as plans state them."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def n_bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
