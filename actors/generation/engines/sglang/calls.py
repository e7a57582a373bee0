"""Control calls to an engine over HTTP: short questions and orders, each with its deadline, ended at once when it is given up.

Every method raises EngineUnavailable (no answer, or the engine's own failure) or RequestRefused (it will never do that).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import aiohttp
import msgspec

from actors.generation.engine import EngineUnavailable, RequestRefused
from actors.generation.engines.sglang.wire import message_in
from bus.errors import UNREADABLE

_ERROR_CHARS = 300


class Calls:
    """One connection pool to `base_url`. `deadline_s`: a whole call. `token`: what the engine asks for; empty = nothing. Must be
    created inside a running event loop."""

    def __init__(self, base_url: str, *, deadline_s: float, token: str = "") -> None:
        self.base_url = base_url
        self._deadline_s = deadline_s
        # Concurrency is the caller's decision: a pool limit would queue requests unseen, outside of every deadline. SGLang
        # closes connections idle for 5 s: a request sent on one just then would look like the engine's end.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=deadline_s),
            headers=bearer(token),
        )
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def close(self) -> None:
        """What is under way ends at once, as EngineUnavailable: aiohttp would leave those that wait for an answer waiting."""
        self._closed = True
        for wait in [w for w in self._waits if not w.expired()]:
            wait.reschedule(asyncio.get_running_loop().time())
        await self._http.close()

    async def post(self, path: str, body: dict[str, Any]) -> None:
        await self.ok("POST", path, body)

    async def ok(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """The text of a good answer."""
        status, text = await self.call(method, path, body)
        if status != 200:
            self.raise_status(status, text, path)
        return text

    async def json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object of a good answer."""
        text = await self.ok(method, path, body)
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except UNREADABLE as error:
            raise EngineUnavailable(f"{self.base_url}{path} did not answer a JSON object ({error}); is this an engine?") from None

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Status and text of any answer."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self._closed:
            raise EngineUnavailable(f"{self.base_url}{path} was not asked: this engine was given up.")
        try:
            async with self._limit(self._deadline_s):
                async with self._http.request(method, self.base_url + path, data=data, headers=headers) as response:
                    return response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            late = f"did not answer within {self._deadline_s:g} s; the engine is stuck or overloaded."
            why = late if _timed_out(error) else f"cannot be reached: {said(error)}."
            raise EngineUnavailable(f"{self.base_url}{path} {'was given up.' if self._closed else why}") from None

    @asynccontextmanager
    async def _limit(self, seconds: float) -> AsyncIterator[None]:
        """TimeoutError after `seconds`, or once the engine is given up."""
        async with asyncio.timeout(seconds) as limit:
            self._waits.add(limit)
            try:
                yield
            finally:
                self._waits.discard(limit)

    def raise_status(self, status: int, text: str, what: str) -> NoReturn:
        """The failure that an answer other than 200 stands for."""
        message = " ".join(message_in(text).split())[:_ERROR_CHARS]
        if status in (400, 404, 413, 422):
            raise RequestRefused(f"{self.base_url} refused {what} (HTTP {status}): {message}")
        raise EngineUnavailable(f"{self.base_url} failed {what} (HTTP {status}): {message}")


def bearer(token: str) -> dict[str, str]:
    """The header that shows an engine its token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _timed_out(error: BaseException) -> bool:
    """By our own limit, not by one of aiohttp's."""
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError)


def said(error: BaseException) -> str:
    """A foreign failure in a few words."""
    return f"{type(error).__name__} {error}".strip()
