"""No engine: responses come from the data."""

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


class NoEngine(EngineKind, frozen=True, kw_only=True):
    """Of a run that generates nothing."""

    def open(self, context: Context, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> Opened:
        from actors.generation.engine import Opened

        return Opened(None)

    def workers(self, v: Mapping[str, Any]) -> int:
        return 1


NONE = NoEngine(name="none", told="supervised training alone, which generates nothing", boots=False, generates=False)
