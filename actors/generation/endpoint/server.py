"""The OpenAI interface of a worker, on loopback, for agents that know no other: `/v1/chat/completions` and `/v1/models`.

Owns   a port, and the episodes under way, each behind a token of its own
Always true: every answer is a turn of the session that its token names, is saved before its end is told, and stands in its
trajectories as it was made. When the program of an episode ends, its calls end with it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web

from actors.generation.endpoint import request as wire
from actors.generation.endpoint.calls import OPENINGS, parse
from actors.generation.endpoint.dialogue import BadMessages, CallPlace, Dialogues, Message, plain
from actors.generation.endpoint.request import BadRequest, ChatBody
from actors.generation.endpoint.stream import AnswerStream, head_of
from actors.generation.endpoint.toolloop import within
from actors.generation.rollouts.session import Segment, Session, Task
from actors.generation.rollouts.stops import Growing
from actors.runtime.chat import BadChat, Chat
from actors.runtime.contained import named
from actors.runtime.listener import Listener, http_log
from actors.runtime.whole import off_loop
from bus.errors import Poison
from bus.messages.samples import Sampling

LEAST_BODY_BYTES, MAX_BODY_BYTES = 1 << 20, 16 << 20  # read in one call, lock held: 60 MB took 8 s and more
BYTES_A_TOKEN = 32  # of a body, for each token of the context
INLINE_BYTES = 16_000  # a larger body is read in a thread: 190 kB took 140 ms, 10 MB 30 s, and a worker that stands still ends
INLINE_TOKENS = 1000
END_S = 1.0  # episodes are over by then; a call whose body never comes would be waited for longer than a drain may take
Count = Callable[..., object]


class Episode:
    """One session behind the endpoint. `spent`: it has used up its tokens, or the context, and was told so at its last call.
    `refused`: what its last call was told, when it was refused."""

    def __init__(self, task: Task, session: Session, chat: Chat, kind: str) -> None:
        self.task, self.session, self.kind = task, session, kind
        self.dialogues = Dialogues(chat, task.sampling.stop_token_ids)
        self.spent = False
        self.refused = ""
        self.handlers: set[asyncio.Task[Any]] = set()
        self.answers = 0
        self.heard_at = time.monotonic()


class Endpoint:
    """One worker's. `kind`: the format of tool calls. `count`: called with a name for what an operator should see the number of.
    `context`: most tokens of a sequence, 0 = any. Use as `async with`."""

    def __init__(self, chat: Chat, kind: str, count: Count, *, context: int = 0, model: str = "policy") -> None:
        self._chat, self._kind, self._count, self._context, self._model = chat, kind, count, context, model
        self._episodes: dict[str, Episode] = {}
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self.url = ""

    @property
    def _most_bytes(self) -> int:
        """Of a body: no context has room for a larger one."""
        return max(LEAST_BODY_BYTES, min(MAX_BODY_BYTES, BYTES_A_TOKEN * self._context or MAX_BODY_BYTES))

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=self._most_bytes, middlewares=[self._admit])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=END_S, logger=http_log())
        await self._runner.setup()
        self._listener = Listener(self._runner, ended=lambda: self._count("callers_without_key"))
        self.url = f"http://127.0.0.1:{await self._listener.open('127.0.0.1', 0)}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None and self._listener is not None
        await self._listener.close()
        await self._runner.cleanup()

    @asynccontextmanager
    async def episode(self, task: Task, session: Session) -> AsyncIterator[tuple[Episode, str]]:
        """A session that can be called, and the token that names it."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        episode = self._episodes[key] = Episode(task, session, self._chat, self._kind)
        try:
            yield episode, key
        finally:
            del self._episodes[key]
            for handler in episode.handlers:
                handler.cancel()
            for why, n in episode.dialogues.opened.items():
                if why != "first":
                    self._count(f"trajectories_opened/{why}", n)
            if episode.dialogues.branches:
                self._count("answers_beside_others", episode.dialogues.branches)

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Every failure in the words that clients read."""
        episode = self._called(request)
        if episode is None:
            refused = _error(401, "no episode has this key; it ended, or the key is another's", "invalid_api_key")
            refused.force_close()  # whatever else such a caller has sent
            return refused
        assert self._listener is not None
        self._listener.admit(request)
        try:
            return await handler(request)
        except (BadRequest, BadMessages, BadChat) as error:
            text, code = str(error), "invalid_request"
        except web.HTTPRequestEntityTooLarge:
            self._count("context_used_up")
            return _spent(episode, f"a body of more than {self._most_bytes:,} bytes; no context has room for it")
        except Poison as error:
            text, code = f"the engine can never serve this: {error}", "context_length_exceeded"
        self._count("calls_refused")
        episode.refused = text
        return _error(400, text, code)

    def _called(self, request: web.Request) -> Episode | None:
        return self._episodes.get(request.headers.get("Authorization", "").removeprefix("Bearer ").strip())

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "miles_async"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        raw = await http.read()
        episode = self._called(http)
        if episode is None:  # it ended meanwhile
            raise BadRequest("the episode has ended")
        current = asyncio.current_task()
        assert current is not None
        episode.handlers.add(current)
        try:
            return await self._answered(http, episode, raw)
        finally:
            episode.handlers.discard(current)
            episode.heard_at = time.monotonic()

    async def _answered(self, http: web.Request, episode: Episode, raw: bytes) -> web.StreamResponse:
        task = episode.task
        aside = len(raw) > INLINE_BYTES
        body, place = await off_loop(_placed, episode, raw) if aside else _placed(episode, raw)
        if episode.session.left <= 0:
            return _spent(episode, f"the episode has used up its {task.sampling.max_new_tokens} tokens")
        if 0 < self._context <= len(place.tokens):
            self._count("context_used_up")
            return _spent(episode, f"{len(place.tokens)} tokens leave no space in a context of {self._context}")
        room = within(task.sampling, place.tokens, self._context)
        sampling, overruled = wire.sampling_of(body, room, as_asked=bool(task.eval_name))
        if overruled:
            self._count("sampling_overruled")
        number, episode.answers = episode.answers, episode.answers + 1
        stream = AnswerStream(http, self._model, number, body, sampling.stop or ()) if body.stream else None
        made = await asyncio.gather(
            *(self._answer(episode, body, place, sampling, number, index, stream) for index in range(body.n or 1))
        )
        episode.spent, episode.refused = False, ""
        usage = wire.usage_of(len(place.tokens), [segment for segment, _ in made])
        if stream is not None:
            return await stream.end(usage)
        choices = [
            {
                "index": index,
                "message": message,
                "finish_reason": wire.finish_of(message, segment),
                "logprobs": await self._logprobs(segment) if body.logprobs else None,
            }
            for index, (segment, message) in enumerate(made)
        ]
        return web.json_response(head_of(self._model, number, "chat.completion") | {"choices": choices, "usage": usage})

    async def _answer(
        self,
        episode: Episode,
        body: ChatBody,
        place: CallPlace,
        sampling: Sampling,
        number: int,
        index: int,
        stream: AnswerStream | None,
    ) -> tuple[Segment, Message]:
        """One turn of the model, and the message it is for the client."""
        growing = Growing(self._chat.decode)
        opening = OPENINGS[episode.kind] if body.offered else ""

        def hear(tokens: Sequence[int]) -> bool:
            if stream is not None:
                stream.hear(index, growing.read(tokens[:-1]), opening)  # the last one may be the end
            return False

        async with stream.telling() if stream is not None else _nothing():
            segment = await episode.session.generate(place.tokens, sampling, watch=hear if stream is not None else None)
        ended = bool(segment.tokens) and segment.tokens[-1] in sampling.stop_token_ids
        text = self._chat.decode(segment.tokens[:-1] if ended else segment.tokens)
        text = text[: min((at for stop in sampling.stop or () if (at := text.find(stop)) >= 0), default=len(text))]
        calls = parse(text, episode.kind, body.offered) if body.offered else []
        message = wire.message_of(text, calls, f"{number}_{index}")
        if calls and "tool_calls" not in message:
            self._count("calls_unreadable")
        episode.dialogues.take(place, segment, message)
        self._count("turns_served")
        await episode.session.save()  # what an agent has heard, its tools may act on: it stays said
        if stream is not None:
            logprobs = await self._logprobs(segment) if body.logprobs else None
            await stream.close(index, message, wire.finish_of(message, segment), logprobs)
        return segment, message

    async def _logprobs(self, segment: Segment) -> dict[str, Any]:
        """Each token is decoded by itself: in a thread, for a long answer has tens of thousands."""

        def told() -> dict[str, Any]:
            return wire.logprobs_of(segment, [self._chat.decode([token]) for token in segment.tokens])

        return await off_loop(told) if len(segment.tokens) > INLINE_TOKENS else told()


def _placed(episode: Episode, raw: bytes) -> tuple[ChatBody, CallPlace]:
    """A body, and where its answer goes. Raises BadRequest, BadMessages, BadChat."""
    body = wire.read(raw)
    try:
        return body, episode.dialogues.place(plain(body.messages), body.offered)
    except (BadMessages, BadChat):
        raise
    except Exception as error:  # whatever else JSON can say that encoders, templates or a tokenizer do not take
        raise BadRequest(f"the messages or tools cannot be used: {named(error)}") from error


def _spent(episode: Episode, text: str) -> web.Response:
    episode.spent, episode.refused = True, text
    return _error(400, text, "context_length_exceeded")


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def _error(status: int, text: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": code, "param": None, "code": code}}, status=status)
