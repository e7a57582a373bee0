"""How the tensors of one policy version travel when they are not one whole file: the plan that trainer, publisher and
workers share.

It lies in the blob that a manifest names (bus.plans). Handles are opaque to us: they are passed on to the
engine they were made for and never opened here.
"""

from __future__ import annotations

import msgspec


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: Hugging Face name, torch type without `torch.`, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class FileHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Handle of a flat bucket on a host without GPUs, as JSON: the tensors lie one after the other in a shared file."""

    path: str
    tensors: tuple[TensorMeta, ...]


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that travel as one. `handles`: one exported flat tensor per tensor-parallel rank (ipc). `quick`: the same for
    engines that run our loader (actors/generation/engines/sglang/quick_load.py)."""

    tensors: tuple[TensorMeta, ...]
    n_bytes: int
    handles: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True):
    """transport ipc: buckets with handles. nccl: buckets in the order of their broadcasts, and the group to be in:
    rank 0 is the trainer, `ranks` is worker -> first rank of its engine."""

    transport: str
    buckets: tuple[Bucket, ...]
    group: str = ""
    address: str = ""
    port: int = 0
    world_size: int = 0
    ranks: dict[str, int] = {}
    backend: str = "nccl"
    workers: tuple[str, ...] = ()  # who may load it this way; empty = everyone
    deadline_s: float = 60.0  # longest wait of a worker for the broadcast, and of the trainer for all workers
    whole: str = ""  # directory with the same version in files, to compare with (check_weight_update_equal)


class ParcelFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a version: its name, its bytes, and XXH3-128 of each piece, 16 bytes a piece."""

    name: str
    n_bytes: int
    pieces: bytes


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """A version in files, for who cannot read them where they lie. `id`: 32 hexadecimal digits over all that follows."""

    id: str
    piece_bytes: int
    files: tuple[ParcelFile, ...]

    @property
    def n_bytes(self) -> int:
        """Of all files."""
        return sum(file.n_bytes for file in self.files)
