"""A sglang-router as a worker sees it: who is registered, joining, leaving. Newer routers take POST /workers, older ones
POST /add_worker?url=.

Every call has the deadline it was given. RouterGone: nothing that speaks this interface answers there.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from actors.generation.sglang_calls import bearer
from bus.errors import UNREADABLE, Transient

POLL_S = 0.1


class RouterGone(Transient):
    """The router does not answer, or not as a router does."""


class RouterClient:
    """The control interface of one router. `token`: what it and its engines ask for. To be created in a running event loop."""

    def __init__(self, url: str, *, deadline_s: float, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._deadline_s = deadline_s
        self._token = token
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=deadline_s), headers=bearer(token))

    async def workers(self) -> dict[str, tuple[str, bool]]:
        """Engine URL -> (its id at the router, whether the router uses it)."""
        status, text = await self._call("GET", "/workers")
        if status == 404:
            status, text = await self._call("GET", "/list_workers")
        if status != 200:
            raise RouterGone(f"router {self.url} does not list its workers (HTTP {status}): {text[:200]}")
        try:
            listed = msgspec.json.decode(text, type=dict[str, Any])
            found: dict[str, tuple[str, bool]] = {}
            for item in listed.get("workers") or listed.get("urls") or []:
                if isinstance(item, str):
                    found[item.rstrip("/")] = (item, True)
                else:
                    found[str(item["url"]).rstrip("/")] = (str(item.get("id", "")), bool(item.get("is_healthy", True)))
        except (*UNREADABLE, KeyError, TypeError) as error:
            raise RouterGone(f"router {self.url} lists its workers in an unknown form: {error}") from None
        return found

    async def register(self, engine_url: str) -> None:
        """Take part, and wait until the router uses this engine. Idempotent."""
        known = (await self.workers()).get(engine_url.rstrip("/"))
        if known is None:
            body = {"url": engine_url, "worker_type": "regular"} | ({"api_key": self._token} if self._token else {})
            status, text = await self._call("POST", "/workers", body)
            if status in (404, 405):
                status, text = await self._call("POST", f"/add_worker?url={quote(engine_url, safe='')}")
            if status not in (200, 201, 202, 409):
                raise RouterGone(f"router {self.url} refused {engine_url} (HTTP {status}): {text[:200]}")
        try:
            async with asyncio.timeout(self._deadline_s):
                while not (await self.workers()).get(engine_url.rstrip("/"), ("", False))[1]:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RouterGone(f"router {self.url} did not take up {engine_url} within {self._deadline_s:g} s") from None

    async def deregister(self, engine_url: str) -> None:
        """Take no part any more; an engine that is not registered is not an error."""
        known = (await self.workers()).get(engine_url.rstrip("/"))
        if known is None:
            return
        status, text = await self._call("DELETE", f"/workers/{quote(known[0], safe='')}")
        if status in (404, 405):
            status, text = await self._call("POST", f"/remove_worker?url={quote(engine_url, safe='')}")
        if status not in (200, 202, 204, 404):
            raise RouterGone(f"router {self.url} kept {engine_url} (HTTP {status}): {text[:200]}")

    async def close(self) -> None:
        await self._http.close()

    async def _call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        try:
            async with self._http.request(method, self.url + path, json=body) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RouterGone(f"router {self.url} cannot be reached: {type(error).__name__} {error}".strip()) from None
