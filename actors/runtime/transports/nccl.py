"""The trainer broadcasts to a group of engines. The trainer's side: actors/trainer/transports/nccl.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from actors.kinds import RuleBroken
from actors.runtime.transports.kind import NotCounted, Takes, TransportKind

if TYPE_CHECKING:
    from bus.messages.weights import WeightPlan


class Broadcast(TransportKind, frozen=True, kw_only=True):
    """See above."""

    def copies_beside(self, lent: bool) -> bool:
        return lent

    def rules(self, settings: Any) -> Iterator[RuleBroken]:
        if settings.colocate:
            why = "NCCL joins no two processes on one GPU (colocate = true)"
            yield RuleBroken("update_weight_transport", self.name, why, "Set --update-weight-transport ipc or disk.")

    async def join(self, engine: Takes, plan: WeightPlan, worker: str, group: str) -> str:
        """The engine waits there for the trainer and the other engines."""
        if group == plan.group:
            return group
        if group:
            await engine.destroy_weights_update_group(group)
        await engine.init_weights_update_group(
            address=plan.address,
            port=plan.port,
            rank_offset=plan.ranks[worker],
            world_size=plan.world_size,
            group=plan.group,
            backend=plan.backend,
        )
        return plan.group

    async def load(self, engine: Takes, plan: WeightPlan, label: str, before: str | None = None) -> None:
        if await engine.receive(plan.buckets, plan.group, label, before):
            return
        if before is not None:
            raise NotCounted
        for i, bucket in enumerate(plan.buckets, 1):
            version = label if i == len(plan.buckets) else None
            await engine.update_weights_from_distributed(bucket.tensors, plan.group, version)


NCCL = Broadcast(
    name="nccl",
    told="nccl by a broadcast (gloo on a host without GPUs)",
    sender="actors.trainer.transports.nccl.open_nccl",
    asks="group",
    broadcasts=True,
    passes=True,
    variables={"NCCL_CUMEM_ENABLE": "0"},  # read when NCCL starts; engines run with it, and both must
)
