"""A sglang-router as a worker sees it: who is registered, joining, leaving. Newer routers take POST /workers, older ones
POST /add_worker?url=. The newer ones answer at once and look at the engine later, in a job.

Always true: there is one such job of an engine at a time. A router does ten at once, and each waits minutes for an engine that
does not answer; asked again and again, it would take up no other engine either. Every call has the deadline it was given.
RouterGone: nothing that speaks this interface answers there, or it has not done what it was asked for.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from actors.generation.engines.sglang.calls import bearer
from bus.errors import UNREADABLE, Transient

POLL_S = 0.1


class _Job(msgspec.Struct):
    """What a router does about an engine: `status` is pending, processing or failed, `message` says why it failed."""

    job_type: str = ""
    status: str = ""
    message: str | None = None

    @property
    def under_way(self) -> bool:
        return self.job_type == "AddWorker" and self.status in ("pending", "processing")


class _Registration(msgspec.Struct):
    """What a newer router says of an engine that it was asked to take up, listed or not."""

    worker_id: str = ""
    job_status: _Job | None = None


class RouterGone(Transient):
    """The router does not answer, or not as a router does."""


class RouterClient:
    """The control interface of one router. `token`: what it and its engines ask for. To be created in a running event loop."""

    def __init__(self, url: str, *, deadline_s: float, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._deadline_s = deadline_s
        self._token = token
        self._ids: dict[str, str] = {}  # engine URL -> its id at the router, from when it was asked to take it up
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
        url = engine_url.rstrip("/")
        if url not in await self.workers() and not (await self._job(url)).under_way:
            await self._ask_for(engine_url)
        try:
            async with asyncio.timeout(self._deadline_s):
                while not (await self.workers()).get(url, ("", False))[1]:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            job = await self._job(url)
            why = f": {job.message}" if job.message else ""
            raise RouterGone(f"router {self.url} did not take up {engine_url} within {self._deadline_s:g} s{why}") from None

    async def _ask_for(self, engine_url: str) -> None:
        body = {"url": engine_url, "worker_type": "regular"} | ({"api_key": self._token} if self._token else {})
        status, text = await self._call("POST", "/workers", body)
        self._ids[engine_url.rstrip("/")] = _registration(text).worker_id
        if status in (404, 405):
            status, text = await self._call("POST", f"/add_worker?url={quote(engine_url, safe='')}")
        if status not in (200, 201, 202, 409):
            raise RouterGone(f"router {self.url} refused {engine_url} (HTTP {status}): {text[:200]}")

    async def _job(self, url: str) -> _Job:
        """What became of the last time it was asked to take this engine up. Empty when that is over, or when it does not know, as
        after a restart."""
        if not (known := self._ids.get(url)):
            return _Job()
        return _registration((await self._call("GET", f"/workers/{quote(known, safe='')}"))[1]).job_status or _Job()

    async def deregister(self, engine_url: str) -> None:
        """Take no part any more; an engine that is not registered is not an error. A job that would register it behind our back is
        waited for: a router has no way to call it off."""
        url, known, coming = engine_url.rstrip("/"), None, True
        try:
            async with asyncio.timeout(self._deadline_s):
                while known is None and coming:
                    coming = (await self._job(url)).under_way  # before the list: it may end in between
                    known = (await self.workers()).get(url)
                    await asyncio.sleep(POLL_S if known is None and coming else 0)
        except TimeoutError:
            raise RouterGone(f"router {self.url} is still about to take up {engine_url}") from None
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


def _registration(text: str) -> _Registration:
    try:
        return msgspec.json.decode(text, type=_Registration)
    except UNREADABLE:
        return _Registration()  # an older router, which registers while we wait
