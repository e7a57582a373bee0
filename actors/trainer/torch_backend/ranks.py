"""The processes of one trainer: who we are, small sums over all of us, whole tensors from shards, commands from rank 0.

With one process everything here is the identity and no process group exists. With several (WORLD_SIZE > 1, addresses in
the usual variables RANK, MASTER_ADDR, MASTER_PORT, LOCAL_RANK) weights and optimizer state are sharded with FSDP2; tensors of a
step travel over nccl on GPUs and gloo elsewhere, commands and metrics always over gloo. Nothing is pickled.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.runtime.run import Refused

STEP_DEADLINE = timedelta(minutes=10)
"""Longest wait for a peer inside a step; then the process stops and the supervisor restarts all ranks."""
COMMAND_DEADLINE = timedelta(hours=24)
"""Longest wait of a follower for rank 0's next command. A rank 0 that dies closes its socket and ends the wait at once."""


class Ranks:
    """This process among the trainer's processes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.mesh: DeviceMesh | None = None
        self._commands: dist.ProcessGroup | None = None

    @classmethod
    def from_environment(cls) -> Ranks:
        """Not connected yet."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def connected(self) -> bool:
        return self._commands is not None

    def connect(self) -> None:
        """Meet the other ranks. Raises Refused when there are fewer GPUs than ranks, torch's DistNetworkError or
        DistStoreError when a rank does not come."""
        if self.alone:
            return
        cuda = torch.cuda.is_available()
        if cuda:
            device, seen = int(os.environ.get("LOCAL_RANK", str(self.rank))), torch.cuda.device_count()
            if device >= seen:
                raise Refused(
                    f"rank {self.rank} of {self.size} of the trainer wants GPU {device}, {seen} are visible. Lower "
                    "--actor-num-gpus-per-node or widen CUDA_VISIBLE_DEVICES."
                )
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=STEP_DEADLINE)
        self._commands = dist.new_group(backend="gloo", timeout=COMMAND_DEADLINE)

    def make_mesh(self, device: torch.device) -> None:
        """The one dimension over which everything is sharded."""
        if not self.alone:
            self.mesh = init_device_mesh(device.type, (self.size,))

    def close(self) -> None:
        """Part from the other ranks; harmless twice."""
        if self._commands is not None:
            self._commands, self.mesh = None, None
            dist.destroy_process_group()

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""
        if self.alone:
            return data or b""
        length = torch.tensor([len(data or b"")], dtype=torch.int64)
        dist.broadcast(length, 0, group=self._commands)
        body = torch.empty(int(length), dtype=torch.uint8)
        if data:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if body.numel():
            dist.broadcast(body, 0, group=self._commands)
        return body.numpy().tobytes()

    def total(self, x: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks, in place."""
        if not self.alone and x.numel():
            dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Maximum of a CPU tensor over all ranks, in place."""
        if not self.alone and x.numel():
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def shard(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Shard every decoder layer (`module.blocks`), and the rest as one: float32 shards, computing and gathering in
        `dtype`."""
        narrow = None if dtype == torch.float32 else dtype
        precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None)
        blocks: Any = module.blocks
        for block in blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=precision)
        fully_shard(module, mesh=self.mesh, mp_policy=precision)

    def whole(self, x: Tensor, dtype: torch.dtype, *, live: bool = False) -> Tensor | None:
        """A copy of `x` on the CPU in `dtype`, whole; None on other ranks than 0. Every rank must call it. `live`: where it
        is, and `x` itself where it is whole and of that type."""
        x = x.detach()
        if isinstance(x, DTensor):
            x = x.full_tensor()
            if self.rank != 0:
                return None
        return x.to(dtype) if live else x.to(device="cpu", dtype=dtype, copy=True)

    def part(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """Inverse of `whole`: rank 0's tensor with device and sharding of `like`. Every rank must call it."""
        if not isinstance(like, DTensor):
            assert whole is not None
            return whole.to(device=like.device, dtype=like.dtype, copy=True)
        device: Any = like.device_mesh.device_type
        full = (
            torch.empty(like.shape, dtype=like.dtype, device=device) if whole is None else whole.to(device, like.dtype)
        )
        return distribute_tensor(full, like.device_mesh, like.placements)
