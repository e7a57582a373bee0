"""NCCL: the trainer broadcasts flat buckets to all engines of a group it leads.

Rank 0 is the trainer, each engine has one rank per GPU. The group is made anew when engines come or go. Always true: a
broadcast that does not end in time breaks the group off (never hangs), and engines discard what they got of that version.
The process needs NCCL_CUMEM_ENABLE=0, as engines run with it: otherwise the first broadcast fails.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from actors.runtime.broadcast import join_group, leave_group, open_store
from actors.runtime.transports.kind import SendingTo
from actors.runtime.transports.records import NCCL
from actors.runtime.whole import called
from actors.trainer.transports.flat import FlatBuffers, PassingBuckets
from bus.errors import Transient
from bus.messages.weights import WeightPlan


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


def open_nccl(sending: SendingTo) -> NcclSender:
    """For the engines of these seats. Raises GroupBroken where they could not reach us."""
    return NcclSender(
        {seat.worker: seat.gpus for seat in sending.seats},
        name=sending.name,
        address=sending.address(),
        backend="nccl" if sending.buffers.device.type == "cuda" else "gloo",
        deadline_s=sending.deadline_s,
        buffers=sending.buffers,
    )


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
        buffers: FlatBuffers | PassingBuckets,
    ) -> None:
        self.ranks, self.world_size = first_ranks(engines)
        self.name = name
        self._address = address
        self._backend = backend
        self._deadline = timedelta(seconds=deadline_s)
        self._buffers = buffers
        self._store: Any = open_store(address, self._deadline)
        self.port = int(self._store.port)
        self._group: Any = None
        self._closed = False

    def plan(self, *, whole: str = "") -> WeightPlan:
        """What workers must know to receive what the buffers hold, once these are filled. `whole`: see WeightPlan."""
        return WeightPlan(
            transport=NCCL.name,
            buckets=self._buffers.buckets,
            group=self.name,
            address=self._address,
            port=self.port,
            world_size=self.world_size,
            ranks=self.ranks,
            backend=self._backend,
            workers=tuple(self.ranks),
            deadline_s=self._deadline.total_seconds(),
            whole=whole,
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
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise GroupBroken(f"not all of {', '.join(self.ranks)} joined group {self.name}: {error}") from error
        if self._closed:  # meanwhile
            self.close()
            raise GroupBroken(f"group {self.name} was given up")

    @property
    def is_open(self) -> bool:
        """Whether `open` succeeded and nothing broke the group since."""
        return self._group is not None

    def send(self) -> None:
        """Broadcast what the buffers hold, bucket by bucket, to the last; in the training's thread, if they are PassingBuckets.
        GroupBroken when a peer is lost."""
        if self._group is None:
            raise GroupBroken(f"group {self.name} is not open")
        failed = self._try_to_send()
        if failed:
            self.close()
            raise GroupBroken(f"broadcast in group {self.name} failed: {failed}")

    def _try_to_send(self) -> str:
        """Why it failed. No error leaves here: its frames would hold the group, and with it the connections at which the other
        engines wait for the rest."""
        try:
            if self._backend == "nccl":
                self._send_beside_the_training()
            else:
                self._send()
        except (RuntimeError, ValueError) as error:
            return str(error) or type(error).__name__
        return ""

    def _send(self) -> None:
        import torch.distributed as dist

        before: Any = None
        for flat in self._buffers.flats():  # two are under way at a time: not all, which may not fit
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
            if before is not None:
                before.wait(self._deadline)
            before = work
        if before is not None:
            before.wait(self._deadline)

    def _send_beside_the_training(self) -> None:
        """On a stream of its own: on the usual one the broadcast would wait for all training that is queued there."""
        import torch

        with torch.cuda.device(self._buffers.device):
            stream = torch.cuda.Stream()
            if isinstance(self._buffers, PassingBuckets):
                stream.wait_stream(torch.cuda.current_stream())  # the weights are made there
            with torch.cuda.stream(stream):
                self._send()
            stream.synchronize()

    def close(self) -> None:
        """Leave the group; waits for its members end. Harmless twice."""
        self._closed = True
        self._store = None
        group, self._group = self._group, None
        if group is not None:
            leave_group(group)


def in_daemon(call: Callable[[], None]) -> asyncio.Future[None]:
    """A blocking call in a thread of its own that does not keep the process alive: one that hangs in a group whose peers
    are gone ends by its deadline, and nobody should wait for that at the end of a run."""
    future = called(call, ())
    future.add_done_callback(lambda f: f.cancelled() or f.exception())  # heard, also when nobody awaits it any more
    return future
