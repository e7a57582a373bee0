"""A worker's engine that speaks SGLang's interface: one that is started here, or one that runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from actors.generation.engine import Connect, Opened
from actors.generation.engines.sglang.adapters import AdapterClient
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.routed import RoutedEngine
from actors.generation.engines.sglang.server import SGLangServer
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from bus.messages.events import EventKind


def connecting(spec: GenerationSpec, client: Callable[..., SGLangClient] = SGLangClient) -> Connect:
    """What makes the client of an engine that runs, where no router stands before it."""

    def connect(url: str, inside: Path | None) -> SGLangClient:
        told: dict[str, Any] = {
            "request_deadline_s": spec.request_deadline_s,
            "token_deadline_s": spec.token_deadline_s,
            "control_deadline_s": spec.control_deadline_s,
            "token": spec.token,
            "draws": spec.draws,
            "inside": inside,
        }
        return RoutedEngine(url, spec.router_url, **told) if spec.router_url else client(url, **told)

    return connect


def open_started(context: Context, spec: GenerationSpec, folder: Path) -> Opened:
    """A server of this worker's own."""

    async def report(kind: EventKind, text: str, level: Literal["info", "warning"]) -> None:
        compiles = kind is EventKind.ENGINE_COMPILES
        context.note = "SGLang compiles kernels, once on a machine" if compiles else ""  # until it has joined
        await context.event(kind, text, level=level)

    client = partial(AdapterClient, adapters=spec.adapters) if spec.adapters else SGLangClient
    return Opened(connecting(spec, client), SGLangServer(spec, folder, report))
