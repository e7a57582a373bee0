"""How the tensors of one policy version travel when they are not files: the plan that trainer and workers share.

It lies as `plan.json` in the directory a manifest names (bus.plans). Handles are opaque to us: they are passed on to the
engine they were made for and never opened here.
"""

from __future__ import annotations

import msgspec


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: Hugging Face name, torch type without `torch.`, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that travel as one. `handles`: one exported flat tensor per tensor-parallel rank (ipc)."""

    tensors: tuple[TensorMeta, ...]
    n_bytes: int
    handles: tuple[str, ...] = ()


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


__all__ = ("Bucket", "TensorMeta", "WeightPlan")
