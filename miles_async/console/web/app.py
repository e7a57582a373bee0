"""The server of the web console: one page, its files, a stream of its state, and the commands behind it. On loopback only.

Always true: a page that reads slowly delays nobody else; it gets the newest state when it is ready for one.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from actors.recorder.feed import Feed
from actors.runtime.listener import Listener, http_log
from bus import Bus
from miles_async.console.verbs import Verbs
from miles_async.console.web.guard import WebGuard, add_headers, refusal, token_of
from miles_async.console.web.hub import Hub
from miles_async.console.web.verbs import routes
from miles_async.settings.errors import SettingsError

HOST, PORT = "127.0.0.1", 8420
MOST_PAGES = 64
STATIC = Path(__file__).parent / "static"
ALIVE_S = 15.0  # between two words on a stream on which nothing changes
DEAF_S = 30.0  # a page that takes nothing for so long is gone: a lid was closed
MOST_BODY_BYTES = 1 << 20


class Pages:
    """Handlers of the page and its stream."""

    def __init__(self, hub: Hub, read_only: str) -> None:
        self._hub, self._read_only, self._open = hub, read_only, 0

    def routes(self) -> list[web.RouteDef | web.StaticDef]:
        return [web.get("/", self._page), web.get("/events", self._events), web.static("/static", STATIC)]

    async def _page(self, _request: web.Request) -> web.FileResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: `state`, an object of the sections that changed; `curves`, points from an index on."""
        if self._open >= MOST_PAGES:
            return refusal(503, f"{MOST_PAGES} pages are open already: close one")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await answer.prepare(request)
        self._open += 1
        self._hub.enter()
        try:
            await answer.write(_event("hello", msgspec.json.encode({"read_only": self._read_only})))
            seen, edition, at = 0, -1, 0
            while True:
                seen, news = await self._hub.news(seen, ALIVE_S)
                body = b"".join(b',"%s":%s' % (name.encode(), value) for name, value in news.items())
                said = [_event("state", b'{"wall":%.3f%s}' % (self._hub.wall, body))]
                curves = self._hub.curves
                if edition != curves.edition:
                    edition, at = curves.edition, 0
                if curves.length > at or "run" in news:
                    at = max(0, at - 1)  # the last point may have taken in more steps
                    said.append(_event("curves", msgspec.json.encode(curves.since(at))))
                    at = curves.length
                async with asyncio.timeout(DEAF_S):
                    await answer.write(b"".join(said))
        except (ConnectionError, TimeoutError):
            pass  # the page was closed
        finally:
            self._open -= 1
            self._hub.leave()
        return answer


def _event(name: str, body: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), body)


async def serve(
    bus: Bus,
    feed: Feed,
    run_dir: Path | None,
    *,
    total_steps: int,
    port: int,
    read_only: str = "",
    kept: bool = False,
    stop: asyncio.Event,
    say: Callable[[str], None],
) -> None:
    """Until `stop`. `feed` is read by somebody else. `port` 0: PORT, or any where that is taken. `read_only`: why nothing may be
    changed, empty = it may. `kept`: the bus is a copy of an ended run's. SettingsError when the port is taken."""
    token, hub = token_of(run_dir), Hub(bus, feed, run_dir, total_steps=total_steps, kept=kept)
    read_only = "this run has ended" if kept else read_only
    guard = WebGuard(token, read_only)
    app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[guard.admit])
    app.on_response_prepare.append(add_headers)
    app.add_routes([*Pages(hub, read_only).routes(), *routes(Verbs(bus, run_dir))])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=http_log())
    await runner.setup()
    listener = Listener(runner)
    guard.admitted = listener.admit
    try:
        here = await _listen(listener, port)
        say(f"console of run {bus.config.run}: http://{HOST}:{here}/?token={token}")
        await hub.run(stop)
    finally:
        await listener.close()
        await runner.cleanup()


async def _listen(listener: Listener, port: int) -> int:
    why = ""
    for wanted in [port] if port else [PORT, 0]:
        try:
            return await listener.open(HOST, wanted)
        except OverflowError:
            why = "ports end at 65535"
            continue
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another program listens there" if taken else os.strerror(error.errno or errno.EINVAL).lower()
            continue
    remedy = "Choose another, or leave it out for any that is free."
    raise SettingsError(f"cannot listen on {HOST}:{port}: {why}", field="--port", value=port, remedy=remedy)
