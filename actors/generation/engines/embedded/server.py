"""The HTTP face of the embedded engine, as SGLang 0.5.12 answers (paths, bodies, statuses).

Owns the table of live requests. Every handler waits either for Progress of its request, which ends when the client
leaves, or for the scheduler's thread with a deadline. Streamed answers are cumulative (each chunk repeats all tokens)
unless `incremental`, as with SGLang's `--incremental-streaming-output`; no chunk mixes tokens of two versions.
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from actors.generation.engines.embedded.config import ModelConfig, ModelRefused
from actors.generation.engines.embedded.decoders import Decodes
from actors.generation.engines.embedded.pictures import Eyes
from actors.generation.engines.embedded.receive import Receiver
from actors.generation.engines.embedded.request import Progress, Request
from actors.generation.engines.embedded.scheduler import Load, Posted, Scheduler
from actors.generation.engines.embedded.weights import load_weights
from actors.generation.engines.embedded.wire import (
    AbortBody,
    BadRequest,
    DiskBody,
    GenerateBody,
    MemoryBody,
    PauseBody,
    VersionBody,
    answer,
    decode_body,
    json_answer,
    to_request,
    view_of,
)
from actors.generation.engines.sglang.wire import NEVER_MIXES

CONTROL_DEADLINE_S = 60.0
LOAD_DEADLINE_S = 600.0
MAX_BODY_BYTES = 64 << 20

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Served:
    """What the engine tells about itself."""

    model_path: str
    config: ModelConfig
    max_running: int
    max_total_tokens: int
    stream_interval: int
    incremental: bool
    eyes: Eyes | None = None


class EngineServer:
    """Routes over one scheduler. `scheduler` is set by the caller before the first request. `token`: what every call must show, as
    SGLang's --api-key; empty = none, only for an engine that nobody else can reach. `admitted`: called with each request that has
    shown it."""

    scheduler: Scheduler

    def __init__(self, served: Served, *, token: str = "") -> None:
        self._served = served
        self._bearer = f"Bearer {token}".encode() if token else b""
        self._live: dict[str, Request] = {}
        self._closing = False
        self.admitted: Callable[[web.Request], object] = lambda request: None
        self._receiver = Receiver(self._load_into)

    def deliver(self, posted: Posted) -> None:
        """Runs on the event loop: wakes the handlers of these requests."""
        for request, progress in posted:
            request.inbox.append(progress)
            request.wake.set()

    def stop_accepting(self) -> None:
        self._closing = True

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._strangers, _refusals])
        router = app.router
        for path in ("/health", "/health_generate"):
            router.add_get(path, self._health)
        router.add_get("/v1/loads", self._loads)
        for path in ("/server_info", "/get_server_info"):
            router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            router.add_get(path, self._model_info)
        router.add_route("*", "/flush_cache", self._flush)
        router.add_post("/generate", self._generate)
        router.add_post("/abort_request", self._abort)
        router.add_post("/pause_generation", self._pause)
        router.add_post("/continue_generation", self._continue)
        router.add_post("/update_weight_version", self._update_version)
        router.add_post("/update_weights_from_disk", self._update_from_disk)
        self._receiver.routes(router)
        router.add_post("/release_memory_occupation", self._release_memory)
        router.add_post("/resume_memory_occupation", self._resume_memory)
        return app

    @web.middleware
    async def _strangers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whoever does not show the token learns only that the engine lives."""
        shown = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if self._bearer and request.path != "/health" and not hmac.compare_digest(shown, self._bearer):
            return json_answer({"error": "Unauthorized"}, 401)
        if not self._bearer or hmac.compare_digest(shown, self._bearer):
            self.admitted(request)
        return await handler(request)

    # generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        started = time.monotonic()
        body = decode_body(await http.read(), GenerateBody)
        rid = body.rid or uuid.uuid4().hex
        if self._closing:
            return json_answer({"error": {"message": "the engine is shutting down."}}, 503)
        view = await asyncio.to_thread(view_of, body, self._served.eyes) if body.image_data else None
        request = to_request(body, rid, self._served.config, self._served.max_total_tokens, view)
        if rid in self._live:
            raise BadRequest(f"request id {rid} is already being served; choose another rid.")
        self._live[rid] = request
        self.scheduler.submit(request)
        try:
            if body.stream:
                return await self._stream(http, request, body.return_logprob, started)
            async for progress in _progress(request):
                last = progress
            text = answer(request, last, 0, body.return_logprob, time.monotonic() - started)
            failed = last.finish is not None and last.finish.get("status_code") == 500
            return web.Response(body=text, content_type="application/json", status=500 if failed else 200)
        finally:
            del self._live[rid]
            if request.finish is None:  # the client left
                self.scheduler.abort(rid)

    async def _stream(self, http: web.Request, request: Request, with_logprobs: bool, started: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        start = 0
        async for progress in _progress(request):
            event = b"data: " + answer(request, progress, start, with_logprobs, time.monotonic() - started) + b"\n\n"
            if progress.finish is not None:
                await response.write_eof(event + b"data: [DONE]\n\n")
            else:
                await response.write(event)
            if self._served.incremental:
                start = progress.n_tokens
        return response

    async def _abort(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), AbortBody)
        if body.abort_all:
            self.scheduler.abort(None)
        elif body.rid in self._live:
            self.scheduler.abort(body.rid)
        return web.Response()

    # control

    async def _pause(self, http: web.Request) -> web.Response:
        mode = decode_body(await http.read() or b"{}", PauseBody).mode
        await self._ask(lambda: self.scheduler.pause(mode))
        return json_answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _http: web.Request) -> web.Response:
        await self._ask(self.scheduler.resume)
        return json_answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, _http: web.Request) -> web.Response:
        if await self._ask(self.scheduler.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _update_version(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), VersionBody)
        await self._ask(lambda: self.scheduler.set_version(body.new_version, body.abort_all_requests))
        message = f"Weight version updated to {body.new_version}"
        return json_answer({"success": True, "message": message, "new_version": body.new_version})

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        body = decode_body(await http.read(), DiskBody)
        if body.abort_all_requests:
            self.scheduler.abort(None)
        try:
            path = Path(body.model_path)
            await self._load_into(lambda decoder: load_weights(decoder, path), body.weight_version)
        except ModelRefused as error:
            return json_answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self._served.model_path = body.model_path
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        return json_answer({"success": True, "message": message, "num_paused_requests": 0})

    async def _load_into(self, load: Callable[[Decodes], T], version: str | None, *, changes: bool = True) -> T:
        """Run `load` on the model between two steps. `changes`: it replaces weights, which rows must not outlive."""
        if not changes:
            return await self._ask(lambda: self.scheduler.look(load))
        return await self._ask(lambda: self.scheduler.update_weights(load, version), LOAD_DEADLINE_S)

    async def _release_memory(self, http: web.Request) -> web.Response:
        tags = decode_body(await http.read() or b"{}", MemoryBody).tags or ()
        await self._ask(lambda: self.scheduler.release_memory(tags), LOAD_DEADLINE_S)
        return json_answer(None)

    async def _resume_memory(self, http: web.Request) -> web.Response:
        tags = decode_body(await http.read() or b"{}", MemoryBody).tags or ()
        await self._ask(lambda: self.scheduler.resume_memory(tags), LOAD_DEADLINE_S)
        return json_answer(None)

    # state

    async def _health(self, http: web.Request) -> web.Response:
        """200 when the model's thread answers; `/health_generate` also makes one token if nothing else is being
        made."""
        if self._closing:
            return web.Response(status=503)
        load = await self._load()
        at_work = load.paused or load.released or load.running or load.waiting
        if http.path == "/health_generate" and not at_work:
            probe = Request(rid=f"HEALTH_CHECK_{uuid.uuid4().hex}", prompt=[0], limit=1, temperature=0.0)
            self.scheduler.submit(probe)
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                async for progress in _progress(probe):
                    if progress.finish is not None and progress.finish["type"] == "abort":
                        return web.Response(status=503)
        return web.Response()

    async def _model_info(self, _http: web.Request) -> web.Response:
        load = await self._load()
        served = self._served
        return json_answer(
            {
                "model_path": served.model_path,
                "tokenizer_path": served.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": load.version,
                "has_image_understanding": served.eyes is not None,
                "has_audio_understanding": False,
                "model_type": served.config.family,
                "architectures": served.config.architectures,
            }
        )

    async def _server_info(self, _http: web.Request) -> web.Response:
        load = await self._load()
        served = self._served
        state = {
            "last_gen_throughput": round(load.tokens_per_s, 1),
            "paused": load.paused,
            "released": load.released,
            "effective_max_running_requests_per_dp": served.max_running,
        }
        return json_answer(
            {
                "status": "ready",
                "version": "embedded",
                NEVER_MIXES: True,
                "model_path": served.model_path,
                "served_model_name": served.model_path,
                "tokenizer_path": served.model_path,
                "skip_tokenizer_init": True,
                "device": "cpu",
                "dtype": "float32",
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "disable_radix_cache": True,
                "enable_memory_saver": True,
                "enable_return_routed_experts": bool(served.config.experts),
                "enable_weights_cpu_backup": True,
                "context_length": served.config.context,
                "max_req_input_len": min(served.config.context, served.max_total_tokens) - 1,
                "max_total_num_tokens": served.max_total_tokens,
                "max_running_requests": served.max_running,
                "stream_interval": served.stream_interval,
                "incremental_streaming_output": served.incremental,
                "weight_version": load.version,
                "internal_states": [state],
            }
        )

    async def _loads(self, _http: web.Request) -> web.Response:
        load = await self._load()
        room = self._served.max_total_tokens
        rank = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_total_reqs": load.running + load.waiting,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": room,
            "token_usage": round(load.used_tokens / room, 4),
            "max_running_requests": self._served.max_running,
        }
        return json_answer({"version": "embedded", "dp_rank_count": 1, "loads": [rank]})

    async def _load(self) -> Load:
        return await self._ask(self.scheduler.load)

    async def _ask(self, question: Callable[[], T], deadline_s: float = CONTROL_DEADLINE_S) -> T:
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(self.scheduler.call(question))


async def _progress(request: Request) -> AsyncIterator[Progress]:
    """Progress until the end. What piled up under one version comes as one."""
    inbox = request.inbox
    while True:
        await request.wake.wait()
        request.wake.clear()
        while inbox:
            progress = inbox.popleft()
            while inbox and inbox[0].version == progress.version:
                progress = inbox.popleft()
            yield progress
            if progress.finish is not None:
                return


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return json_answer({"error": {"message": str(error)}}, 400)
    except TimeoutError:
        return json_answer(
            {"error": {"message": f"the engine did not answer {request.path} in time; it is overloaded or stuck."}}, 503
        )
