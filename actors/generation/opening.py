"""The link of a worker to its engine, as its spec says. Nothing is started yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from actors.generation.link import EngineLink
from actors.generation.process import EngineProcess
from actors.generation.routed import RoutedEngine
from actors.generation.sglang_client import SGLangClient
from actors.generation.sglang_server import SGLangServer
from actors.generation.spec import GenerationSpec
from actors.generation.supply import Supply
from actors.runtime.child import Child
from actors.runtime.context import Context
from bus.messages.events import EventKind


def open_link(context: Context, spec: GenerationSpec, spare: Child | None = None) -> EngineLink:
    """`spare`: see EngineProcess."""

    def connect(url: str, inside: Path | None) -> SGLangClient:
        """The client of an engine that runs."""
        told: dict[str, Any] = {
            "request_deadline_s": spec.request_deadline_s,
            "token_deadline_s": spec.token_deadline_s,
            "control_deadline_s": spec.control_deadline_s,
            "token": spec.token,
            "draws": spec.draws,
            "inside": inside,
        }
        return RoutedEngine(url, spec.router_url, **told) if spec.router_url else SGLangClient(url, **told)

    supply = Supply(
        context,
        token=spec.weights_token,
        serves=spec.serves,
        address=spec.serve_at,
        deadline_s=spec.control_deadline_s,
    )
    supply.open()
    return EngineLink(context, spec, connect, process=_server(context, spec, spare), supply=supply)


def _server(context: Context, spec: GenerationSpec, spare: Child | None) -> EngineProcess | SGLangServer | None:
    folder = Path(context.spec.run_dir or ".") / "engines" / context.name
    if spec.engine == "embedded":
        return EngineProcess(spec, folder, spare)
    if spec.engine != "sglang":
        return None

    async def report(kind: EventKind, text: str, level: Literal["info", "warning"]) -> None:
        compiles = kind is EventKind.ENGINE_COMPILES
        context.note = "SGLang compiles kernels, once on a machine" if compiles else ""  # until it has joined
        await context.event(kind, text, level=level)

    return SGLangServer(spec, folder, report)
