"""A worker's engine behind a router: requests go to whichever engine the router picks, control goes to our own.

Always true: the death of the router costs no sample. While it is gone, requests go to our own engine, and a membership
that it forgot is renewed. A failure is blamed on our own engine (EngineUnavailable) only when that does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from actors.generation.engine import Chunk, EngineUnavailable, GenerateRequest, RouteBroken
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.router_client import RouterClient, RouterGone

RENEW_S, SLOWEST_S = 2.0, 30.0  # between two looks at the router; less often while it is gone
ROUTER_S = 5.0
LEAVES_S = 600.0  # a router looks for minutes at an engine that does not answer, and takes it up then, wanted or not


class RoutedEngine(SGLangClient):
    """Our own engine at `base_url`, and a router before all engines. Deadlines and token as SGLangClient's."""

    has_router = True

    def __init__(self, base_url: str, router_url: str, *, inside: Path | None = None, **deadlines: Any) -> None:
        super().__init__(base_url, inside=inside, **deadlines)
        self._front = SGLangClient(router_url, **deadlines)
        self._router = RouterClient(
            router_url, deadline_s=min(ROUTER_S, deadlines["control_deadline_s"]), token=deadlines.get("token", "")
        )
        self._peers: dict[str, SGLangClient] = {}
        self._deadlines = deadlines
        self._joined = False
        self._open = False  # whether requests may go through the router now
        self._renew_at = 0.0
        self._gone = 0  # looks in a row that found no router
        self._leaves_until: float | None = None  # the router has not let us go yet; asked again until then
        self._asking = asyncio.Lock()  # of the router: a departure that is under way ends before the next membership begins

    @property
    def routed(self) -> bool:
        """Whether the router is used now."""
        return self._open

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._through_router(request) if self._open else super().generate(request)

    async def _through_router(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        try:
            async with aclosing(self._front.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineUnavailable as error:
            self._open = False
            await self.health()  # EngineUnavailable here is the fault of our own engine
            raise RouteBroken(str(error)) from error

    async def pause_counted(self, version: str) -> int | None:
        return None  # our engine runs requests of peers, who would have to know its counts before the next chunk

    def count_as_older(self, version: str) -> bool:
        return False  # for the same reason

    async def join(self) -> None:
        """Let the router use our engine from now on. A router that is gone is asked again by `renew`."""
        self._joined = True
        self._renew_at, self._leaves_until = 0.0, None
        await self.renew()

    async def leave(self) -> None:
        """No new requests from the router, nor through it; those that run go on. Again until `join` it does nothing, unless the
        router has not let us go yet. One that cannot do it now is asked again by `renew`."""
        if not (self._joined or self.leaving):
            return
        if self._joined:
            self._leaves_until = asyncio.get_running_loop().time() + LEAVES_S
        self._joined = self._open = False
        await self._go()

    @property
    def leaving(self) -> bool:
        """Whether the router may still use our engine, or take it up, although we left."""
        return self._leaves_until is not None

    async def _go(self, *, last: bool = False) -> str:
        """Ask to be let go; returns what an operator should know when the `last` try failed too."""
        async with self._asking:
            if self._joined or not self.leaving:
                return ""  # it joined again meanwhile
            news = ""
            try:
                await self._router.deregister(self.base_url)
            except RouterGone as error:  # gone with its list, perhaps, or at it still
                self._renew_at = asyncio.get_running_loop().time() + RENEW_S
                if not last:
                    return ""
                news = f"our engine left more than {LEAVES_S:.0f} s ago and may be sent requests: {error}"
            if not self._joined:
                self._leaves_until = None
            return news

    async def renew(self) -> str:
        """Register again where the router forgot us (it was restarted), or leave where it could not let us go. Call it now and
        then; returns what changed."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._renew_at:
            return ""
        if not self._joined:
            return await self._go(last=self._leaves_until is not None and loop.time() >= self._leaves_until)
        before = self._open
        try:
            async with self._asking:
                await self._router.register(self.base_url)
        except RouterGone as error:
            self._open = False
            self._gone += 1
            self._renew_at = loop.time() + min(SLOWEST_S, RENEW_S * 2 ** min(self._gone - 1, 4))
            return str(error) if self._gone == 1 else ""
        self._open, self._gone = True, 0
        self._renew_at = loop.time() + RENEW_S
        return "" if before else f"router {self._router.url} serves our engine"

    async def abort(self, rid: str) -> None:
        await super().abort(rid)
        names = self._front.flying(rid)
        if not names:
            return
        try:
            urls = list(await self._router.workers())
        except RouterGone:
            urls = [self.base_url]
        for url in urls:
            for name in names:
                try:
                    await self._peer(url).abort_name(name)
                except EngineUnavailable:
                    if url == self.base_url:
                        raise
                    break  # a peer that is dead runs nothing

    def _peer(self, url: str) -> SGLangClient:
        if url == self.base_url:
            return self
        if url not in self._peers:
            self._peers[url] = SGLangClient(url, **self._deadlines)
        return self._peers[url]

    async def close(self) -> None:
        await self.leave()
        for client in (self._front, *self._peers.values()):
            await client.close()
        await self._router.close()
        await super().close()
