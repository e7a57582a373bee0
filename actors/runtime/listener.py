"""Listens for an aiohttp server whose callers show a key: a caller that has shown none costs those that have one nothing.

Owns   the listening socket, and every connection that has not shown a key yet
Always true: a connection stands open without a key for at most `within_s`; where more than `most` do, each new one ends the oldest,
unless that came within GRACE_S: hundreds of callers that have a key connect at once, and show it a moment later. What a connection
has sent is read before it is ended, however long the loop stood. Once one is admitted nothing stands between it and the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

MOST = 32  # callers without a key; a worker of 256 open files has room for them
GRACE_S = 2.0  # in which the headers of a caller that has a key are here
WITHIN_S = 10.0  # from a connection to a key: a request's headers, and their way here
TURNS = 32  # of the loop, before a connection is ended: in them a request that has come is read, and its key looked at
AT_ONCE_BYTES = 2048  # of a caller without a key: 256 kB hold thousands of requests, and the loop while they are read
_Ended = Callable[[], object]


class Listener:
    """Where the server of `runner`, which is set up, listens. `ended`: called for each connection without a key that is ended.

    listener = Listener(runner)
    port = await listener.open("127.0.0.1", 0)
    listener.admit(request)  # by a middleware, once the request has shown a key
    """

    def __init__(
        self, runner: web.AppRunner, *, most: int = MOST, within_s: float = WITHIN_S, grace_s: float = GRACE_S,
        ended: _Ended | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._most, self._within_s, self._ended = runner, most, within_s, ended or (lambda: None)
        self._grace_s = grace_s
        self._strangers: dict[asyncio.BaseTransport, _Stranger] = {}  # the oldest first
        self._server: asyncio.AbstractServer | None = None

    async def open(
        self, host: str | None = None, port: int | None = None, *, sock: socket.socket | None = None, backlog: int = 128
    ) -> int:
        """Listen at an address or on a bound socket; the port. Raises OSError, OverflowError."""
        loop = asyncio.get_running_loop()
        where: dict[str, Any] = {"sock": sock} if sock is not None else {"host": host, "port": port}
        server = await loop.create_server(self._connected, backlog=backlog, **where)
        self._server = server
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Listen no more, and end what has shown no key; then the runner can be cleaned up."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers.values()):
            stranger.end()

    def admit(self, request: web.Request) -> None:
        """The caller of this request has shown a key: its connection is the server's alone from now on."""
        stranger = self._strangers.pop(request.transport, None) if request.transport is not None else None
        if stranger is not None:
            stranger.admitted()

    def _connected(self) -> asyncio.BaseProtocol:
        assert self._runner.server is not None
        return _Stranger(self, self._runner.server())

    def took(self, stranger: _Stranger, transport: asyncio.Transport) -> float:
        """A connection has begun; how long it may go without a key."""
        now = asyncio.get_running_loop().time()
        staying = [other for other in self._strangers.values() if not other.leaving]
        for oldest in staying[: max(0, len(staying) + 1 - self._most)]:
            if now - oldest.since < self._grace_s:
                break
            oldest.leave()
        stranger.since = now
        self._strangers[transport] = stranger
        return self._within_s

    def turn_away(self, stranger: _Stranger) -> None:
        """End a connection that showed no key."""
        self.forget(stranger)
        self._ended()
        stranger.end()

    def knows(self, stranger: _Stranger) -> bool:
        """Whether it stands open without a key."""
        return stranger.transport in self._strangers

    def forget(self, stranger: _Stranger) -> None:
        """It has ended."""
        if stranger.transport is not None:
            self._strangers.pop(stranger.transport, None)


class _Stranger(asyncio.BufferedProtocol):
    """A connection that has shown no key: hands all on to the server's own protocol, a little at a time, until it is admitted or
    late."""

    def __init__(self, listener: Listener, server: asyncio.Protocol) -> None:
        self._listener, self._to = listener, server
        self._late: asyncio.TimerHandle | None = None  # cancelled so that it keeps no connection in memory that is done
        self.transport: asyncio.Transport | None = None
        self.since = 0.0
        self.leaving = False
        self._buffer = bytearray(AT_ONCE_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        within_s = self._listener.took(self, self.transport)
        self._late = asyncio.get_running_loop().call_later(within_s, self.leave)
        self._to.connection_made(transport)

    def admitted(self) -> None:
        assert self.transport is not None and self._late is not None
        self._late.cancel()
        self.transport.set_protocol(self._to)

    def leave(self, turns: int = TURNS) -> None:
        """End it for want of a key, after so many turns of the loop."""
        self.leaving = True
        if not self._listener.knows(self):
            return
        if turns:
            asyncio.get_running_loop().call_soon(self.leave, turns - 1)
        else:
            self._listener.turn_away(self)

    def end(self) -> None:
        assert self.transport is not None
        self.transport.abort()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._to.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._to.eof_received()

    def pause_writing(self) -> None:
        self._to.pause_writing()

    def resume_writing(self) -> None:
        self._to.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        self._listener.forget(self)
        self._to.connection_lost(exc)


class _OneLine(logging.Filter):
    """What a caller did wrong is one line of a log: anybody can send it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | ConnectionError):
            with suppress(Exception):  # a log's own trouble ends nothing
                said = " ".join(str(error).split())[:120]
                record.msg, record.args, record.exc_info = f"{record.getMessage()}: {type(error).__name__}: {said}", (), None
        return True


def http_log() -> logging.Logger:
    """The log of a server, for `web.AppRunner(..., logger=http_log())`."""
    log = logging.getLogger("miles_async.http")
    if not log.filters:
        log.addFilter(_OneLine())
    return log
