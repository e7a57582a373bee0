"""The embedded engine behind update sessions, as SGLang has them from 0.5.21 on: a gate before it that passes all else on.

Weights outside of a session, a begin within one and an end without one are answered 400 in SGLang's own form; a session outlives
whoever began it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

PUSHES = ("/update_weights_from_tensor", "/update_weights_from_distributed")
LETTERS = (*PUSHES, "/begin_weight_update", "/end_weight_update", "/update_weights_from_disk", "/update_weight_version")


class Gate:
    """`open`: a session is. `calls`: what was asked that concerns weights, in order, with its status; `labels`: versions that came
    with weights. `answers`: path -> (status, body) in place of its own next answers; `forgets_after`: buckets."""

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self.url = ""
        self.open = False
        self.calls: list[tuple[str, int]] = []
        self.labels: list[str | None] = []
        self.open_at_files: list[bool] = []
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.forgets_after: int | None = None

    def count(self) -> Counter[str]:
        return Counter(path for path, _ in self.calls)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            return await self._stream(request)
        status, body = await self._answer(request)
        if request.path in LETTERS:
            self.calls.append((request.path, status))
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, content_type="application/json")
        return web.json_response(body, status=status)

    async def _answer(self, request: web.Request) -> tuple[int, Any]:
        path = request.path
        if scripted := self.answers.get(path):
            return scripted.pop(0)
        if path == "/begin_weight_update":
            assert (await request.json())["selector"] == "all"
            if self.open:
                return 400, said("a weight-update session is already open; call end_weight_update() first", False)
            self.open = True
            return 200, said("Success")
        if path == "/end_weight_update":
            if not self.open:
                return 400, said("no weight-update session is open; call begin_weight_update() first", False)
            self.open = False
            return 200, said("Success")
        if path in PUSHES:
            if not self.open:
                return 400, said(f"{path[1:]} must run between begin_weight_update() and end_weight_update()", False)
            self.labels.append((await request.json())["weight_version"])
            if self.forgets_after is not None and len(self.labels) >= self.forgets_after:
                self.open, self.forgets_after = False, None
        if path == "/update_weights_from_disk":
            self.open_at_files.append(self.open)
        return await self._pass(request)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """As it comes."""
        raw = await request.read()
        kind = {"Content-Type": request.content_type}
        async with (
            aiohttp.ClientSession(read_bufsize=2**20) as http,
            http.post(f"{self._engine_url}/generate", data=raw, headers=kind) as answer,
        ):
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            with suppress(ConnectionError):  # whoever asked left
                async for part in answer.content.iter_any():
                    await response.write(part)
            return response

    async def _pass(self, request: web.Request) -> tuple[int, bytes]:
        kind = {"Content-Type": request.content_type}
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, self._engine_url + request.path_qs, data=await request.read(), headers=kind) as answer,
        ):
            return answer.status, await answer.read()


def said(message: str, success: bool = True) -> dict[str, Any]:
    return {"success": success, "message": message}


@asynccontextmanager
async def gated(engine_url: str) -> AsyncIterator[Gate]:
    """A gate before the engine there."""
    gate = Gate(engine_url)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", gate.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gate.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gate
    finally:
        await runner.cleanup()


__all__ = ("PUSHES", "Gate", "gated", "said")
