"""A reward service over HTTP: POST {"prompt", "response", "label"} as JSON, the JSON answer is the reward.

Owns one connection pool. Always true: every call ends within its deadline, and its failure says whether another attempt may
do (no answer, overloaded, 5xx) or never will (refused, 4xx).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from actors.reward.sample import Sample, ScorerFailed, Value
from actors.runtime.deadline import deadline
from bus.errors import Poison

MAX_ANSWER_BYTES = 1 << 20
_TRY_AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class RemoteRefused(Poison):
    """The service understood and will not score this sample."""


class RemoteScorer:
    """The service at `url`. Use as `async with`."""

    name = "remote_rm"
    default_key = ""

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = str(URL(url).with_user(None).with_query(None))  # credentials stay out of errors and dead letters
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

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """The service's answer. Raises DeadlineExceeded, ScorerFailed (may work later) or RemoteRefused."""
        async with deadline(deadline_s, f"reward of {sample.sample_id} from {self._shown}"):
            status, body = await self._post(sample)
        text = body[:200].decode("utf-8", "replace")
        if status in _TRY_AGAIN or status >= 500:
            raise ScorerFailed(f"{self._shown} answered {status} for {sample.sample_id}: {text!r}")
        if status != HTTPStatus.OK:
            raise RemoteRefused(f"{self._shown} answered {status} for {sample.sample_id}: {text!r}")
        if len(body) > MAX_ANSWER_BYTES:
            raise ScorerFailed(f"{self._shown} answered more than {MAX_ANSWER_BYTES} bytes for {sample.sample_id}")
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise ScorerFailed(f"{self._shown} answered no JSON for {sample.sample_id} ({error}): {text!r}") from error

    async def _post(self, sample: Sample) -> tuple[int, bytes]:
        assert self._http is not None
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.post(
                self._url, data=msgspec.json.encode(body), headers=headers, allow_redirects=False
            ) as reply:
                found = bytearray()
                async for piece in reply.content.iter_chunked(1 << 16):
                    found += piece
                    if len(found) > MAX_ANSWER_BYTES:
                        break
                return reply.status, bytes(found)
        except (aiohttp.ClientError, OSError) as error:
            raise ScorerFailed(
                f"{self._shown} not reached for {sample.sample_id}: {type(error).__name__}: {error}"
            ) from error


__all__ = ("RemoteRefused", "RemoteScorer")
