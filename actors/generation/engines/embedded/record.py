"""What everybody else asks of the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.generation.engines.kind import EngineKind

if TYPE_CHECKING:
    from pathlib import Path

    from actors.generation.engine import Opened
    from actors.generation.spec import GenerationSpec
    from actors.runtime.child import Child
    from actors.runtime.context import Context

FLOAT32 = 1e-4  # |trainer - engine| log-prob: it runs the trainer's model


class Embedded(EngineKind, frozen=True, kw_only=True):
    """A small torch server of ours on the CPU, which speaks SGLang's interface."""

    def open(self, context: Context, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> Opened:
        from actors.generation.engines.embedded.process import open_embedded

        return open_embedded(spec, folder, spare)

    def cpus(self, threads: int) -> float:
        return float(threads)

    def tolerance(self, v: Mapping[str, Any]) -> float:
        return FLOAT32 if v["model_dtype"] == "float32" else super().tolerance(v)


EMBEDDED = Embedded(
    name="embedded",
    told="the small server of this package",
    reads_ids=True,
    exact=True,
    ways=("files", "tensors", "group"),
    takes_adapters=True,
    loads=("actors.generation.engines.embedded.process",),
    spare=("actors.generation.engines.embedded", "--spare"),
)
