"""CUDA IPC: the engine maps the trainer's flat buffers. No copy leaves the host; on one GPU the engine reads in place. On a
host without GPUs the buffers are shared files instead, for the embedded engine.

Always true: a buffer whose handle was given out keeps its address and lives until `close`, so a late engine reads a whole
version or a newer whole version only between fills; the caller fills when all engines reported the version before.
"""

from __future__ import annotations

import msgspec

from actors.runtime.flat import dtype_of, size_of
from actors.runtime.transports.kind import SendingTo
from actors.runtime.transports.records import IPC
from actors.trainer.transports.flat import FlatBuffers
from bus.messages.weights import Bucket, FileHandle, WeightPlan


def open_ipc(sending: SendingTo) -> IpcSender:
    """For the engines of these seats, all of one size."""
    workers = tuple(seat.worker for seat in sending.seats)
    gpus = sending.seats[0].gpus
    return IpcSender(tp_size=gpus, buffers=sending.buffers, workers=workers, deadline_s=sending.deadline_s)


class IpcSender:
    """Exports versions of one model to engines on this host. `tp_size`: handles each engine expects, one per rank; `workers`,
    `deadline_s`: see WeightPlan."""

    def __init__(self, *, tp_size: int = 1, buffers: FlatBuffers, workers: tuple[str, ...] = (), deadline_s: float = 60.0) -> None:
        self._workers, self._deadline_s = workers, deadline_s
        self._buffers = buffers
        self._tp_size = tp_size
        self._handles: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    is_open = True

    def open(self) -> None:
        """There is nothing to wait for."""

    def send(self) -> None:
        """Engines read the buffers themselves."""

    def plan(self, *, whole: str = "") -> WeightPlan:
        """What workers must know to load what the buffers hold, once these are filled (`whole`: see WeightPlan). On a GPU raises
        ImportError without SGLang, whose form of handles its engines expect."""
        if not self._handles:
            self._handles = [self._export(i) for i in range(len(self._buffers.flat))]
        pairs = zip(self._buffers.buckets, self._handles, strict=True)
        buckets = tuple(msgspec.structs.replace(b, handles=handles, quick=quick) for b, (handles, quick) in pairs)
        return WeightPlan(transport=IPC.name, buckets=buckets, workers=self._workers, deadline_s=self._deadline_s, whole=whole)

    def _export(self, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Handles of a buffer for SGLang's own loader, and for ours inside SGLang."""
        if not self._buffers.flat[index].is_cuda:
            handle = FileHandle(path=str(self._buffers.files[index]), tensors=self._buffers.buckets[index].tensors)
            return (msgspec.json.encode(handle).decode(),) * self._tp_size, ()
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # handles then name the GPU by its id, not by a position that differs per process
        flat, bucket = self._buffers.flat[index], self._buffers.buckets[index]
        layout = msgspec.json.encode([index, bucket.tensors]).decode()  # quick_load.Layout
        bodies = ({"flattened_tensor": flat, "metadata": _metadata(bucket)}, [(layout, flat)])
        whole, quick = (MultiprocessingSerializer.serialize(body, output_str=True) for body in bodies)
        return (whole,) * self._tp_size, (quick,) * self._tp_size

    def close(self) -> None:
        """Free the buffers; handles given out are dead then."""
        self._buffers = FlatBuffers()
        self._handles = []


def _metadata(bucket: Bucket) -> list[object]:
    """SGLang's description of a flat bucket."""
    import torch
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    found: list[object] = []
    start = 0
    for meta in bucket.tensors:
        dtype, n_bytes = dtype_of(meta), size_of((meta,))
        found.append(
            FlattenedTensorMetadata(
                name=meta.name,
                shape=torch.Size(meta.shape),
                dtype=dtype,
                start_idx=start,
                end_idx=start + n_bytes,
                numel=n_bytes,
            )
        )
        start += n_bytes
    return found
