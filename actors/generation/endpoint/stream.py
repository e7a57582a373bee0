"""An answer of the endpoint that is sent while it is made."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from actors.generation.endpoint import request as wire
from actors.generation.endpoint.dialogue import Message
from actors.generation.endpoint.request import ChatBody, Json


def head_of(model: str, number: int, kind: str) -> Json:
    """What every answer, or event of one, begins with."""
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


class AnswerStream:
    """An answer sent as it is made, as server-sent events. A client that takes nothing of it for `unread_s` has gone."""

    unread_s = 60.0

    def __init__(self, http: web.Request, model: str, number: int, body: ChatBody, stops: Sequence[str]) -> None:
        self._http, self._body, self._stops = http, body, stops
        self._head = head_of(model, number, "chat.completion.chunk")
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._begun = asyncio.Lock()
        self._sent: dict[int, int] = {}  # characters of each answer
        self._new: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()

    def hear(self, index: int, text: str, opening: str) -> None:
        """What an answer says so far."""
        sent = self._sent.get(index, 0)  # nothing that begins before is looked for again
        end = sent + wire.safe_length(text[sent:], self._stops, opening)
        if end > sent:
            self._sent[index] = end
            self._new.put_nowait((index, text[sent:end]))

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """Sends on what is heard meanwhile."""
        teller = asyncio.create_task(self._tell(), name="stream of an answer")
        try:
            yield
        except BaseException:
            teller.cancel()  # it may wait for a client that does not read
            raise
        self._new.put_nowait(None)
        await teller

    async def _tell(self) -> None:
        while (new := await self._new.get()) is not None:
            await self._send(new[0], {"content": new[1]})

    async def _send(self, index: int, delta: Json, finish: str | None = None, logprobs: Json | None = None) -> None:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        await self._write(self._head | {"choices": [choice]})

    async def _write(self, event: Json | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        try:
            async with self._begun:
                if not self._response.prepared:
                    await self._response.prepare(self._http)
            async with asyncio.timeout(self.unread_s):
                await self._response.write(f"data: {text}\n\n".encode())
        except ConnectionError:
            return  # it has gone, maybe before the first word; the answer is recorded all the same
        except TimeoutError:  # its episode would have no end, for a call that is under way is no idle agent
            if self._http.transport is not None:
                self._http.transport.abort()

    async def close(self, index: int, message: Message, finish: str, logprobs: Json | None) -> None:
        """The rest of an answer."""
        sent, content = self._sent.get(index, 0), message["content"] or ""
        delta: Json = {"role": "assistant", "content": content[sent:]}
        if calls := message.get("tool_calls"):
            delta["content"] = "" if sent else content  # what was sent has its blanks still
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        await self._send(index, delta, None, logprobs)
        await self._send(index, {}, finish)

    async def end(self, usage: Json) -> web.StreamResponse:
        if (self._body.stream_options or {}).get("include_usage"):
            await self._write(self._head | {"choices": [], "usage": usage})
        await self._write("[DONE]")
        return self._response
