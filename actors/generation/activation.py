"""Weights into a paused engine, by the transport their manifest names.

Always true: the engine states a version only once it holds all of it (the label travels with the last bucket), and a transport
that fails in between leaves an engine that states the old version, is still paused, and is not to be used.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from actors.generation.engine import Engine
from bus.errors import MilesAsyncError
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from bus.plans import read_plan

TRANSPORTS = ("disk", "ipc", "nccl")


class WeightsUnusable(MilesAsyncError):
    """A published version that must not be loaded; the engine goes on with what it has."""


class Loader:
    """One worker's way of loading. Owns the membership in the trainer's broadcast group."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._group = ""

    def forget(self) -> None:
        """The engine started anew: it is in no group."""
        self._group = ""

    def plan(self, manifest: WeightManifest) -> WeightPlan | None:
        """What to do, read before the pause; None for disk. WeightsUnusable when it cannot be done here."""
        if manifest.transport == "disk":
            return None
        if manifest.transport not in TRANSPORTS:
            raise WeightsUnusable(f"transport {manifest.transport!r} is unknown to this worker; use {TRANSPORTS[0]}")
        try:
            plan = read_plan(Path(manifest.path))
        except (OSError, msgspec.DecodeError) as error:
            raise WeightsUnusable(f"the plan in {manifest.path} cannot be read: {error}") from error
        if plan.transport == "nccl" and self._worker not in plan.ranks:
            raise WeightsUnusable(
                f"this worker is not in group {plan.group} ({', '.join(plan.ranks)}); it waits for the next one, or use disk"
            )
        return plan

    async def load(self, engine: Engine, manifest: WeightManifest, plan: WeightPlan | None, label: str) -> None:
        """All tensors into the engine, which is paused. EngineUnavailable or RequestRefused: discard the engine's weights."""
        if plan is None:
            await engine.update_weights_from_disk(manifest.path, label)
            return
        if plan.transport == "nccl":
            await self._join(engine, plan)
        last = len(plan.buckets) - 1
        for i, bucket in enumerate(plan.buckets):
            version = label if i == last else None
            if plan.transport == "ipc":
                await engine.update_weights_from_tensor(bucket.handles, version)
            else:
                await engine.update_weights_from_distributed(bucket.tensors, plan.group, version)

    async def _join(self, engine: Engine, plan: WeightPlan) -> None:
        """Be in the plan's group; the engine waits there for the trainer and the other engines."""
        if self._group == plan.group:
            return
        if self._group:
            await engine.destroy_weights_update_group(self._group)
            self._group = ""
        await engine.init_weights_update_group(
            address=plan.address,
            port=plan.port,
            rank_offset=plan.ranks[self._worker],
            world_size=plan.world_size,
            group=plan.group,
            backend=plan.backend,
        )
        self._group = plan.group


__all__ = ("TRANSPORTS", "Loader", "WeightsUnusable")
