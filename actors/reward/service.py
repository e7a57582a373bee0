"""A service that is asked about samples over HTTP, JSON both ways: what reward services and teachers share.

Owns one connection pool. Always true: every call ends within its deadline, an answer is bounded, and a failure says whether
another attempt may do (no answer, overloaded, 5xx) or never will (refused, 4xx).
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from actors.reward.sample import ScorerFailed
from actors.runtime.deadline import deadline
from bus.errors import UNREADABLE, Poison

_TRY_AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


def shown(url: str) -> str:
    """An address for errors and dead letters: without credentials."""
    found = URL(url).with_query(None)
    return str(found.with_user(None) if found.absolute else found)


class Service:
    """Base of those that ask one; use as `async with`. `refused`: what is raised when no attempt will do; `limit_bytes`: of the
    longest answer; `headers`: sent with each question."""

    def __init__(
        self, refused: type[Poison], *, limit_bytes: int, role: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._refused = refused
        self._limit_bytes = limit_bytes
        self._role = f"{role} " if role else ""
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Concurrency and deadline are the caller's: a limit here would queue unseen, outside of every deadline.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(
        self, url: str, body: object, sample_id: str, deadline_s: float, *, what: str, kind: Any = Any, gives: str = "JSON"
    ) -> Any:
        """The answer, decoded as `kind`. Raises DeadlineExceeded naming `what`, ScorerFailed (may work later; also where it is no
        `kind`, and so has no `gives`) or `refused`."""
        who = self._role + shown(url)
        async with deadline(deadline_s, f"{what} of {sample_id} from {shown(url)}"):
            status, answer = await self._post(url, body, who, sample_id)
        text = answer[:200].decode("utf-8", "replace")
        if status in _TRY_AGAIN or status >= 500:
            raise ScorerFailed(f"{who} answered {status} for {sample_id}: {text!r}")
        if status != HTTPStatus.OK:
            raise self._refused(f"{who} answered {status} for {sample_id}: {text!r}")
        if len(answer) > self._limit_bytes:
            raise ScorerFailed(f"{who} answered more than {self._limit_bytes} bytes for {sample_id}")
        try:
            return msgspec.json.decode(answer, type=kind)
        except UNREADABLE as error:
            raise ScorerFailed(f"{who} answered no {gives} for {sample_id} ({error}): {text!r}") from error

    async def _post(self, url: str, body: object, who: str, sample_id: str) -> tuple[int, bytes]:
        assert self._http is not None
        try:
            async with self._http.post(url, data=msgspec.json.encode(body), headers=self._headers, allow_redirects=False) as reply:
                if target := reply.headers.get("Location"):
                    return reply.status, f"it sends us to {shown(target)}, which is not followed".encode()
                found = bytearray()
                async for piece in reply.content.iter_chunked(1 << 16):
                    found += piece
                    if len(found) > self._limit_bytes:
                        break
                return reply.status, bytes(found)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a name or port that cannot be
            raise ScorerFailed(f"{who} not reached for {sample_id}: {type(error).__name__}: {error}") from error
