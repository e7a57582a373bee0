"""The link of a worker to its engine, as its spec says. Nothing is started yet."""

from __future__ import annotations

from pathlib import Path

from actors.generation.engines.records import engine_kind
from actors.generation.link import EngineLink
from actors.generation.spec import GenerationSpec
from actors.generation.supply import Supply
from actors.kinds import UnknownKind
from actors.runtime.child import Child
from actors.runtime.context import Context
from actors.runtime.run import Refused


def open_link(context: Context, spec: GenerationSpec, spare: Child | None = None) -> EngineLink:
    """`spare`: a process that already loads what the engine's kind says. Refused: there is no such engine."""
    folder = Path(context.spec.run_dir or ".") / "engines" / context.name
    try:
        connect, server = engine_kind(spec.engine).open(context, spec, folder, spare)
    except UnknownKind as error:
        raise Refused(f"engine {spec.engine} cannot be loaded: {error}") from error
    supply = Supply(
        context,
        token=spec.weights_token,
        serves=spec.serves,
        address=spec.serve_at,
        deadline_s=spec.control_deadline_s,
    )
    supply.open()
    return EngineLink(context, spec, connect, process=server, supply=supply)
