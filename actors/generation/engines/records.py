"""The engines that ship, by name, and how any is found by what `--engine` says."""

from __future__ import annotations

from actors.generation.engines.embedded.record import EMBEDDED
from actors.generation.engines.kind import EngineKind
from actors.generation.engines.none import NONE
from actors.generation.engines.sglang.record import EXTERNAL, SGLANG
from actors.kinds import own_kind

ENGINES: dict[str, EngineKind] = {kind.name: kind for kind in (EMBEDDED, SGLANG, EXTERNAL, NONE)}
__all__ = ("ATTACHED", "DEFAULT", "ENGINES", "NONE", "OF_MILES", "engine_kind")
DEFAULT = EMBEDDED
"""Of a run that says nothing."""
OF_MILES = SGLANG
"""The one that Miles has."""
ATTACHED = EXTERNAL
"""What reaches a running engine where nothing is said but its address."""


def engine_kind(name: str) -> EngineKind:
    """The record of an engine: by its name, or of the user's own at a dotted path. Raises UnknownKind."""
    return ENGINES.get(name) or own_kind(name, EngineKind)
