"""Whole tensors and FSDP2 shards of them, over the trainer's processes; with one process both are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.trainer.training.ranks import Ranks


class TorchShards:
    """One dimension, over which everything is sharded; `ranks` must be connected.

    `gathers`, to be set before `shard`: within a pass each rank keeps the weights that it has gathered, and adds up gradients until
    the last micro-batch, so a pass gathers once and a step reduces once. Otherwise every micro-batch gathers and reduces layer by
    layer: less memory, many more collectives. Always true: between passes everything is sharded."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.gathers = False
        self.narrow: torch.dtype | None = None  # what sharded layers compute in, where it is not float32
        self._rank = ranks.rank
        self._mesh: DeviceMesh | None = None if ranks.alone else init_device_mesh(device.type, (ranks.size,))

    def shard(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Shard every decoder layer (`module.blocks`), and the rest as one: float32 shards, computing and gathering in
        `dtype`."""
        narrow = self.narrow = None if dtype == torch.float32 else dtype
        precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None)
        blocks: Any = module.blocks
        for block in blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=precision)
        sharded: Any = fully_shard(module, mesh=self._mesh, mp_policy=precision)
        if self.gathers:
            sharded.set_reshard_after_forward(False)
            sharded.set_reshard_after_backward(False)

    @contextmanager
    def gathered(self, *modules: nn.Module) -> Iterator[None]:
        """A pass of these modules over micro-batches. After it their parameters are the sharded ones again: FSDP itself leaves what
        it gathered last where no backward follows."""
        try:
            yield
        finally:
            for part in (part for module in modules for part in module.modules()):
                if isinstance(part, FSDPModule):
                    part.reshard()

    def whole(self, x: Tensor, dtype: torch.dtype, *, live: bool = False) -> Tensor | None:
        """A copy of `x` on the CPU in `dtype`, whole; None on other ranks than 0. Every rank must call it. `live`: where it
        is, and `x` itself where it is whole and of that type."""
        x = x.detach()
        if isinstance(x, DTensor):
            x = x.full_tensor()
            if self._rank != 0:
                return None
        return x.to(dtype) if live else x.to(device="cpu", dtype=dtype, copy=True)

    def part(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """Inverse of `whole`: rank 0's tensor with device and sharding of `like`. Every rank must call it."""
        if not isinstance(like, DTensor):
            assert whole is not None
            return whole.to(device=like.device, dtype=like.dtype, copy=True)
        device: Any = like.device_mesh.device_type
        full = torch.empty(like.shape, dtype=like.dtype, device=device) if whole is None else whole.to(device, like.dtype)
        return distribute_tensor(full, like.device_mesh, like.placements)
