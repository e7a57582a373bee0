"""OpenAI's interface in front of an engine: /v1/chat/completions, /v1/completions, /v1/models, /health.

Owns   a port    Always true: a caller without the key, where there is one, is answered 401 and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from actors.generation.endpoint import request as wire
from actors.generation.endpoint.dialogue import BadMessages, plain
from actors.generation.endpoint.request import BadRequest, ChatBody
from actors.generation.endpoint.stream import AnswerStream, head_of
from actors.runtime.chat import BadChat
from actors.runtime.listener import Listener, http_log
from bus.errors import UNREADABLE
from miles_async.serving.answers import EngineFailed, Texts, answer, room
from miles_async.serving.chosen import Chosen

MOST_BYTES = 16 << 20
END_S = 2.0


class TextBody(msgspec.Struct, kw_only=True):
    """What is read of a /v1/completions."""

    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None


class ModelEndpoint:
    """One model behind the interface. `key`: what callers must show; empty = nothing."""

    def __init__(self, chosen: Chosen, texts: Texts, engine: str, session: aiohttp.ClientSession, key: str = "") -> None:
        self._chosen, self._texts, self._engine, self._session, self._key = chosen, texts, engine, session, key
        self._numbers = itertools.count()
        self.listener: Listener | None = None

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._admit])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        return app

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if self._key and request.path != "/health" and not hmac.compare_digest(shown.encode(), self._key.encode()):
            return _error(401, "this server asks for its key", "invalid_api_key")
        if self.listener is not None:
            self.listener.admit(request)
        try:
            return await handler(request)
        except (BadRequest, BadMessages, BadChat) as error:
            return _error(400, str(error), "invalid_request")
        except EngineFailed as error:
            return _error(400, str(error), "engine_refused")

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": self._chosen.name, "object": "model", "created": 0, "owned_by": "miles_async"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = wire.read(await http.read())
        messages = plain(body.messages)
        if not messages:
            raise BadRequest("'messages' is empty")
        if body.logprobs or body.offered:
            raise BadRequest("logprobs and tools are not answered here; serve the directory with SGLang or vLLM for them")
        prompt = self._texts.prompt(messages)
        number, most = next(self._numbers), body.max_completion_tokens or body.max_tokens
        params = self._params(prompt, most, body.temperature, body.top_p)
        stream = AnswerStream(http, self._chosen.name, number, body, body.stops) if body.stream else None
        made = await asyncio.gather(*(self._one(prompt, params, body, index, stream) for index in range(body.n or 1)))
        n_made = sum(n for _, n, _ in made)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n_made, "total_tokens": len(prompt) + n_made}
        if stream is not None:
            return await stream.end(usage)
        choices = [
            {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": finish, "logprobs": None}
            for index, (text, _, finish) in enumerate(made)
        ]
        return web.json_response(head_of(self._chosen.name, number, "chat.completion") | {"choices": choices, "usage": usage})

    async def _one(
        self, prompt: list[int], params: dict[str, Any], body: ChatBody, index: int, stream: AnswerStream | None
    ) -> tuple[str, int, str]:
        ask = (self._session, self._engine, self._texts, prompt, params, body.stops)
        if stream is None:
            return await answer(*ask)
        async with stream.telling():
            made = await answer(*ask, lambda text: stream.hear(index, text, ""))
        await stream.close(index, {"role": "assistant", "content": made[0]}, made[2], None)
        return made

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await http.read(), type=TextBody)
        except UNREADABLE as error:
            raise BadRequest(f"the body cannot be read: {error}") from error
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        prompt = self._texts.ids(body.prompt)
        params = self._params(prompt, body.max_tokens, body.temperature, body.top_p)
        text, n, finish = await answer(self._session, self._engine, self._texts, prompt, params, stops)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": len(prompt) + n}
        head = head_of(self._chosen.name, next(self._numbers), "text_completion") | {"id": f"cmpl-{uuid.uuid4().hex}"}
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
        return web.json_response(head | {"choices": [choice], "usage": usage})

    def _params(self, prompt: list[int], most: int | None, temperature: float | None, top_p: float | None) -> dict[str, Any]:
        """The run's own where the caller says nothing."""
        return {
            "max_new_tokens": room(self._chosen, prompt, most),
            "temperature": self._chosen.temperature if temperature is None else temperature,
            "top_p": 1.0 if top_p is None else top_p,
        }


@asynccontextmanager
async def listening(served: ModelEndpoint, host: str, port: int) -> AsyncIterator[int]:
    """The port at which it answers. OSError where that is taken."""
    runner = web.AppRunner(served.app(), access_log=None, shutdown_timeout=END_S, logger=http_log(), handler_cancellation=True)
    await runner.setup()
    try:
        listener = served.listener = Listener(runner)
        yield await listener.open(host, port)
        await listener.close()
    finally:
        await runner.cleanup()


def _error(status: int, text: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": code, "param": None, "code": code}}, status=status)
