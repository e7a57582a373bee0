"""Files with the tensors that changed since the version before; whole files where everything did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.trainer.transports.flat import meta_of, n_bytes_of
from bus.messages.policy import WeightManifest
from bus.messages.weights import Bucket, WeightPlan
from bus.plans import write_plan

if TYPE_CHECKING:
    from actors.trainer.torch_backend.state import WeightFiles


class DeltaWriter:
    """Remembers the last version that was written; holds one copy of the weights in host memory for that."""

    def __init__(self) -> None:
        self._base: WeightFiles | None = None
        self._base_id = 0

    def write(self, copied: WeightFiles, directory: Path, version: int, *, whole: str = "") -> WeightManifest:
        """Write version id `version` into a new directory: `delta` on the one before when less than all of it changed, else
        `disk`. `whole`: see WeightPlan. Raises OSError."""
        changed = self._changed(copied)
        base, self._base, self._base_id = self._base_id, copied, version
        if len(changed) == len(copied.tensors):
            return copied.write(directory)
        part = replace(copied, tensors={name: copied.tensors[name] for name in changed})
        manifest = part.write(directory)
        metas = tuple(meta_of(name, t) for name, t in part.tensors.items())
        bucket = Bucket(tensors=metas, n_bytes=sum(map(n_bytes_of, part.tensors.values())))
        write_plan(directory, WeightPlan(transport="delta", buckets=(bucket,), base=base, whole=whole))
        return WeightManifest(
            transport="delta",
            path=manifest.path,
            checksum=manifest.checksum,
            n_tensors=manifest.n_tensors,
            n_bytes=manifest.n_bytes,
        )

    def _changed(self, copied: WeightFiles) -> list[str]:
        """Names of tensors with other bytes than in the base, at least one: an empty file is no safetensors to engines."""
        import torch

        if self._base is None or self._base.tensors.keys() != copied.tensors.keys():
            return list(copied.tensors)
        before = self._base.tensors
        found = []
        for name, t in copied.tensors.items():
            one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (t, before[name]))
            if not torch.equal(one, other):
                found.append(name)
        return found or [min(copied.tensors, key=lambda name: copied.tensors[name].numel())]


__all__ = ("DeltaWriter",)
