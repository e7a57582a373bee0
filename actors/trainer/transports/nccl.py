"""NCCL: the trainer broadcasts flat buckets to all engines of a group it leads.

Rank 0 is the trainer, each engine has one rank per GPU. The group is made anew when engines come or go. Always true: a
broadcast that does not end in time breaks the group off (never hangs), and engines discard what they got of that version.
The process needs NCCL_CUMEM_ENABLE=0, as engines run with it: otherwise the first broadcast fails.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.trainer.transports.flat import FlatBuffers
from bus.errors import Transient
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from bus.plans import write_plan

if TYPE_CHECKING:
    from torch import Tensor


class GroupBroken(Transient):
    """The group of trainer and engines cannot be used any more; make another."""


def first_ranks(engines: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """({worker: first rank of its engine}, world size) for worker -> GPUs of its engine; the trainer is rank 0."""
    ranks: dict[str, int] = {}
    following = 1
    for worker in sorted(engines):
        ranks[worker] = following
        following += engines[worker]
    return ranks, following


class NcclSender:
    """One group. `engines`: worker -> GPUs of its engine. backend gloo is for machines without a GPU."""

    def __init__(
        self,
        engines: Mapping[str, int],
        *,
        name: str,
        address: str = "127.0.0.1",
        backend: str = "nccl",
        deadline_s: float = 60.0,
        buffers: FlatBuffers | None = None,
    ) -> None:
        self.ranks, self.world_size = first_ranks(engines)
        self.name = name
        self._address = address
        self._backend = backend
        self._deadline = timedelta(seconds=deadline_s)
        self._buffers = buffers or FlatBuffers()
        self._listener = socket.create_server((address, 0))  # the store takes it over
        self.port = int(self._listener.getsockname()[1])
        self._group: Any = None

    def prepare(self, tensors: Mapping[str, Tensor], directory: Path) -> WeightManifest:
        """Fill the buffers and write the plan: all that can be done before engines pause."""
        self._buffers.fill(tensors)
        buckets = self._buffers.buckets
        plan = WeightPlan(
            transport="nccl",
            buckets=buckets,
            group=self.name,
            address=self._address,
            port=self.port,
            world_size=self.world_size,
            ranks=self.ranks,
            backend=self._backend,
        )
        write_plan(directory, plan)
        return WeightManifest(
            transport="nccl",
            path=str(directory),
            n_tensors=sum(len(bucket.tensors) for bucket in buckets),
            n_bytes=sum(bucket.n_bytes for bucket in buckets),
        )

    def open(self) -> None:
        """Join as rank 0: waits until every engine joined too. Call it from a thread. GroupBroken when they do not come."""
        if self._backend == "nccl" and os.environ.get("NCCL_CUMEM_ENABLE") != "0":
            raise GroupBroken("the trainer runs without NCCL_CUMEM_ENABLE=0; start it with that set, as engines are")
        try:
            self._group = join_group(
                self._address,
                self.port,
                0,
                self.world_size,
                self.name,
                backend=self._backend,
                deadline=self._deadline,
                listener=self._listener,
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise GroupBroken(f"not all of {', '.join(self.ranks)} joined group {self.name}: {error}") from error

    def send(self) -> None:
        """Broadcast what `prepare` filled in, bucket by bucket; waits for the last. GroupBroken when a peer is lost."""
        import torch.distributed as dist

        if self._group is None:
            raise GroupBroken(f"group {self.name} is not open")
        try:
            works = [dist.broadcast(flat, src=0, group=self._group, async_op=True) for flat in self._buffers.flat]
            for work in works:
                work.wait(self._deadline)
            if self._backend == "nccl":
                import torch

                torch.cuda.current_stream().synchronize()
        except (RuntimeError, ValueError) as error:
            self.close()
            raise GroupBroken(f"broadcast in group {self.name} failed: {error}") from error

    def close(self) -> None:
        """Leave the group; harmless twice."""
        import torch.distributed as dist

        self._listener.close()
        group, self._group = self._group, None
        if group is not None:
            try:
                dist.destroy_process_group(group)
            except (RuntimeError, ValueError):
                return  # a broken one cannot be left politely


def join_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    *,
    backend: str,
    deadline: timedelta,
    listener: socket.socket | None = None,
) -> Any:
    """A process group of its own beside the default one. Store, prefix and steps are those of SGLang's engines, or the
    ranks would not find each other. Rank 0 leads and gives its `listener` away, so that nobody can take the port."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed import distributed_c10d as c10d

    extra: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    store = TCPStore(address, port, world_size, rank == 0, timeout=deadline, wait_for_workers=False, **extra)
    make: Any = c10d._new_process_group_helper
    group, _ = make(
        world_size, rank, [], c10d.Backend(backend), PrefixStore(name, store), group_name=name, timeout=deadline
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


__all__ = ("GroupBroken", "NcclSender", "first_ranks", "join_group")
