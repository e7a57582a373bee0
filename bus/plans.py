"""Where versions lie. Files: a directory each on the trainer's host. Plans: a blob that a manifest names, so that workers read
them on whatever host."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bus.errors import UNREADABLE, BadMessage
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from bus.streams.redis import Bus


async def put_plan(bus: Bus, plan: WeightPlan) -> WeightManifest:
    """The manifest of a version that travels so. Whoever put a plan deletes its blob (`manifest.plan`)."""
    return WeightManifest(
        transport=plan.transport,
        n_tensors=sum(len(bucket.tensors) for bucket in plan.buckets),
        n_bytes=sum(bucket.n_bytes for bucket in plan.buckets),
        plan=await bus.blobs.put(msgspec.json.encode(plan)),
    )


async def get_plan(bus: Bus, manifest: WeightManifest) -> WeightPlan:
    """BadMessage when it is gone, or none."""
    try:
        return msgspec.json.decode(await bus.blobs.get(manifest.plan), type=WeightPlan)
    except (OSError, *UNREADABLE) as error:
        raise BadMessage(f"plan {manifest.plan} cannot be read: {error}") from error


def version_dir(weights_dir: Path, version: int) -> Path:
    """Everything in files that belongs to one version id."""
    return weights_dir / f"v{version:08d}"
