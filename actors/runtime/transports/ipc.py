"""The trainer lends its memory: engines of its host map the buffers. The trainer's side: actors/trainer/transports/ipc.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.runtime.transports.kind import NotCounted, Takes, TransportKind

if TYPE_CHECKING:
    from bus.messages.active import Seat
    from bus.messages.weights import WeightPlan


class Mapped(TransportKind, frozen=True, kw_only=True):
    """See above."""

    def seats(self, seats: Mapping[str, Seat], host: str) -> dict[str, Seat]:
        """Of one size, since handles are made for each rank."""
        here = super().seats(seats, host)
        gpus = max((seat.gpus for seat in here.values()), default=0)
        return {name: seat for name, seat in here.items() if seat.gpus == gpus}

    def copies_beside(self, lent: bool) -> bool:
        return True

    async def load(self, engine: Takes, plan: WeightPlan, label: str, before: str | None = None) -> None:
        if before is not None:
            raise NotCounted
        for i, bucket in enumerate(plan.buckets, 1):
            version = label if i == len(plan.buckets) else None
            await engine.update_weights_from_tensor(bucket.handles, version, bucket.quick)


IPC = Mapped(
    name="ipc",
    told="ipc by mapping the trainer's memory on its host",
    sender="actors.trainer.transports.ipc.open_ipc",
    asks="tensors",
    on_host=True,
    shares=True,
    maps_gpu=True,
)
