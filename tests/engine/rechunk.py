"""An embedded engine that streams as SGLang does: several tokens a chunk, one step kept back, and only the version that is
served when a chunk leaves. It counts tokens as our function inside SGLang would."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from actors.generation.engines.sglang.args import INSIDE
from actors.generation.engines.sglang.inside import TESTED, Answer, Order
from actors.generation.engines.sglang.wire import NEVER_MIXES

QUIET_S = 0.1


@dataclass
class Stream:
    """What came of one request: [logprob, token, None] each; `sent`: how many left."""

    pairs: list[list[Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    sent: int = 0


class Rechunked:
    """A server before the engine at `engine_url`, and the process of it that a worker believes to own. `counts` False: it does
    not understand its scheduler. `version`: SGLang's."""

    note = ""
    alive = True

    def __init__(self, engine_url: str, folder: Path, *, per_chunk: int = 8, counts: bool = True, version: str = TESTED[0]) -> None:
        self._engine_url = engine_url
        self._per_chunk = per_chunk
        self._counts = counts
        self._version = "default"
        self._sglang = version
        self._streams: dict[str, Stream] = {}
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None
        self.inside = folder
        self.calls: list[str] = []

    async def start(self) -> str:
        self._http = aiohttp.ClientSession()
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/update_weights_from_tensor", self._take)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None and self._http is not None:
            await self._http.close()
            await self._runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        assert self._http is not None
        async with self._http.get(f"{self._engine_url}/server_info") as answer:
            info = await answer.json()
        return web.json_response(
            info
            | {NEVER_MIXES: False, "version": self._sglang, "stream_interval": self._per_chunk, "custom_weight_loader": [INSIDE]}
        )

    async def _pass(self, request: web.Request) -> web.Response:
        assert self._http is not None
        body = await request.read()
        self.calls.append(request.path)
        url = f"{self._engine_url}{request.path_qs}"
        async with self._http.request(request.method, url, data=body, headers=_kind(request)) as answer:
            if answer.status == 200 and request.path == "/update_weights_from_disk":
                self._version = json.loads(body)["weight_version"]
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    async def _take(self, request: web.Request) -> web.Response:
        assert (await request.json())["load_format"] == INSIDE
        order = msgspec.json.decode((self.inside / "order.json").read_bytes(), type=Order)
        self.calls.append(order.what)
        before, now = -1, 0
        while before != now:  # what the engine made is still on its way here
            await asyncio.sleep(QUIET_S)
            before, now = now, sum(len(stream.pairs) for stream in self._streams.values())
        counts = {rid: len(stream.pairs) for rid, stream in self._streams.items() if stream.finish is None}
        unknown = "" if self._counts else "no attribute 'running_batch'"
        answer = Answer(number=order.number, counts=counts, unknown=unknown)
        (self.inside / "answer.json").write_bytes(msgspec.json.encode(answer))
        return web.json_response({"success": True, "message": "Success"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        assert self._http is not None
        body = await request.json()
        stream = self._streams[body["rid"]] = Stream()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            async with self._http.post(f"{self._engine_url}/generate", json=body) as events:
                async for line in events.content:
                    if line.startswith(b"data: {"):
                        meta = json.loads(line[6:])["meta_info"]
                        if fresh := meta["completion_tokens"] - len(stream.pairs):
                            stream.pairs += meta["output_token_logprobs"][-fresh:]
                        stream.finish = meta["finish_reason"]
                        await self._send(answer, body["rid"], stream)
            await answer.write(b"data: [DONE]\n\n")
        finally:
            del self._streams[body["rid"]]
        return answer

    async def _send(self, answer: web.StreamResponse, rid: str, stream: Stream) -> None:
        """Whole chunks, without the newest token, whose step is kept back; at the end all."""
        known = len(stream.pairs) if stream.finish else len(stream.pairs) - 1
        while known - stream.sent >= self._per_chunk or (stream.finish and stream.sent < known):
            end = min(stream.sent + self._per_chunk, known)
            pairs = stream.pairs[stream.sent : end]
            meta = {
                "id": rid, "weight_version": self._version, "completion_tokens": end, "output_token_logprobs": pairs,
                "finish_reason": stream.finish if end == len(stream.pairs) else None,
            }  # fmt: skip
            await answer.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
            stream.sent = end


def _kind(request: web.Request) -> dict[str, str]:
    return {"Content-Type": request.content_type}


__all__ = ("Rechunked",)
