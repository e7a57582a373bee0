"""Streamed answers over HTTP/1.1, read where the socket delivers them: an event costs no task switch but the one that hands
it over, and a request has one timer.

aiohttp makes the other calls. Here it costs four times the rest of the client (scripts/bench/worker.py): 200 of 273 us for an
answer of two chunks. Always true: what is held of an answer is bounded, and the work is linear in its bytes, however they are
cut.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from functools import lru_cache
from typing import cast
from urllib.parse import unquote, urlsplit

from actors.generation.engines.sglang.sse import SseOverflow, SseParser

HEAD_BYTES = 16 << 10  # of an answer's head, of the line before a piece of its body, and of its trailers
TEXT_BYTES = 64 << 10  # of an answer that is no stream
AHEAD_BYTES = 1 << 20  # read and not yet taken; then the socket waits
IDLE_S = 3.0  # SGLang closes connections idle for 5 s: a request sent just then would look like the engine's end


class StreamBroken(Exception):
    """The connection ended, or what came over it is no answer."""


class StreamLate(Exception):
    """A deadline passed: `what` is "request" or "token"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Line(asyncio.Protocol):
    """One connection; one request at a time. `send`, then `events` until it is empty; then `status` and `text` tell the rest."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lines: Lines | None = None  # where to go when the answer has ended
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._rest = b""  # an incomplete head, or line of one
        self._in_head = True
        self._in_trailers = False
        self._chunked = False
        self._left = 0  # bytes of the body, or of its present piece and the line end after it; -1 = until the connection ends
        self._keeps = True
        self._ended = False
        self._broken: Exception | None = None
        self._sse = SseParser()
        self._events: list[bytes] = []
        self._text = b""
        self._ahead = 0
        self._paused = False
        self.status = 0
        self._end_s = self._due_s = self._token_s = 0.0

    # -- what the client calls ----------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, *, request_s: float, token_s: float) -> None:
        """A request, under two deadlines from now on: all of it, and the time from one `progress` to the next."""
        self._reset()
        now = self._loop.time()
        self._end_s, self._token_s = now + request_s, token_s
        self._due_s = now + token_s
        if self._transport is None or self._transport.is_closing():
            self._broken = StreamBroken("the connection was closed")
            return
        self._transport.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))

    def progress(self) -> None:
        """The answer went on: the token deadline starts anew."""
        self._due_s = self._loop.time() + self._token_s

    async def events(self) -> list[bytes]:
        """Data of the events that came since the last call, at least one; empty = the answer ended. Raises StreamBroken,
        StreamLate, or what `give_up` was given; what came before that is handed out first."""
        while not self._events:
            if self._broken is not None:
                raise self._broken
            if self._ended:
                return []
            if self._paused:
                self._paused = False
                assert self._transport is not None
                self._transport.resume_reading()
            if self._timer is None:  # one of the request before rings too early, which is as good
                self._timer = self._loop.call_at(min(self._due_s, self._end_s), self._ring)
            self._ahead = 0
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found, self._events, self._ahead = self._events, [], 0
        return found

    @property
    def text(self) -> str:
        """The body of an answer that is no stream."""
        return self._text.decode("utf-8", "replace")

    def give_up(self, error: Exception) -> None:
        """Whoever waits, or will, gets this error; the connection closes."""
        if self._broken is None:
            self._broken = error
        self._wake()
        self.close()

    def release(self, lines: Lines) -> None:
        """Nothing more is wanted of this answer. Once it has ended the connection serves the next request; it has a moment."""
        if self._ended and self._keeps and self._broken is None:
            lines.put(self)
        elif self._ended or self._paused or self._broken is not None:
            self.close()
        else:
            self._lines = lines
            self._stop_timer()
            self._timer = self._loop.call_later(IDLE_S, self.close)

    def close(self) -> None:
        """Hang up; a server ends the request."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    # -- what the loop calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        if self._left < 0 and not self._in_head and error is None:
            self._ended = True
        elif not self._ended and self._broken is None:
            self._broken = StreamBroken(f"{type(error).__name__} {error}".strip() if error else "the connection was closed")
        self._keeps = False
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._ended or self._broken is not None:
            self._keeps = False  # more than was announced
            self.close()
            return
        try:
            self._take(self._rest + data if self._rest else data)
        except (ValueError, SseOverflow) as error:
            self._broken = StreamBroken(f"its answer is not understood ({error})")
            self.close()
        if self._events or self._ended or self._broken is not None:
            self._wake()
        if self._ended:
            if not self._keeps:
                self.close()
            elif self._lines is not None:
                self._stop_timer()
                self._lines.put(self)
        elif self._ahead > AHEAD_BYTES and (self._waiter is None or self._waiter.done()) and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    # -- internals ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring(self) -> None:
        """A deadline may have passed. It counts only while somebody waits: the time of a caller who is busy is not the engine's."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        until = min(self._due_s, self._end_s)
        if until > self._loop.time():
            self._timer = self._loop.call_at(until, self._ring)
            return
        self.give_up(StreamLate("request" if self._end_s <= self._due_s else "token"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, data: bytes) -> None:
        self._rest = b""
        at, n = 0, len(data)
        while self._in_head:
            end = data.find(b"\r\n\r\n", at)
            if end < 0:
                self._keep_rest(data[at:])
                return
            self._read_head(data[at:end])
            at = end + 4
        while at < n and not self._ended:
            if self._chunked and self._left == 0:  # a line: the length of the next piece, or one of the trailers
                end = data.find(b"\r\n", at)
                if end < 0:
                    self._keep_rest(data[at:])
                    return
                line, at = data[at:end], end + 2
                if self._in_trailers:
                    self._ended = not line
                elif (size := int(line.partition(b";")[0], 16)) > 0:
                    self._left = size + 2
                elif size < 0:
                    raise ValueError("a piece of negative length")
                else:
                    self._in_trailers = True
            elif self._chunked:
                if self._left > 2:
                    self._body(data[at : at + self._left - 2])
                at += self._left
                self._left = max(0, at - n)
            else:
                part = data[at:] if self._left < 0 else data[at : at + self._left]
                at += len(part)
                self._body(part)
                if self._left >= 0:
                    self._left -= len(part)
                    self._ended = self._left == 0
        if at < n and self._ended:
            self._keeps = False  # more than was announced

    def _keep_rest(self, data: bytes) -> None:
        if len(data) > HEAD_BYTES:
            raise ValueError(f"a head of more than {HEAD_BYTES} bytes")
        self._rest = data

    def _read_head(self, head: bytes) -> None:
        status, chunked, size, keeps = _head_of(head)
        if 100 <= status < 200:
            return  # the answer proper follows
        self.status, self._in_head = status, False
        self._chunked, self._left, self._keeps = chunked, size, keeps
        self._ended = size == 0 and not chunked

    def _body(self, part: bytes) -> None:
        if self.status == 200:
            self._ahead += len(part)
            self._events += self._sse.feed(part)
        elif len(self._text) < TEXT_BYTES:
            self._text += part


@lru_cache(maxsize=64)  # a server's answers of one second begin alike
def _head_of(head: bytes) -> tuple[int, bool, int, bool]:
    """Status, whether the body comes in pieces, its bytes (-1 = until the connection ends), whether the connection serves on.
    ValueError when it is no head."""
    first, *lines = head.split(b"\r\n")
    protocol, _, rest = first.partition(b" ")
    if not protocol.startswith(b"HTTP/1."):
        raise ValueError(f"it begins with {first[:40]!r}")
    chunked, size, keeps = False, -1, protocol != b"HTTP/1.0"
    for line in lines:
        name, _, value = line.partition(b":")
        name, value = name.strip().lower(), value.strip().lower()
        if name == b"transfer-encoding":
            chunked, size = value.endswith(b"chunked"), 0
        elif name == b"content-length" and not chunked:
            size = int(value)
        elif name == b"connection" and value == b"close":
            keeps = False
    return int(rest[:3]), chunked, size, keeps and size >= 0


class Lines:
    """Connections to one server, as many as there are requests; idle ones are kept for a moment."""

    def __init__(self, base_url: str, path: str, *, connect_s: float, token: str = "") -> None:
        url = urlsplit(base_url)
        self._host, self._ssl = url.hostname or "", url.scheme == "https"
        self._port = url.port or (443 if self._ssl else 80)
        self._connect_s = connect_s
        host = url.netloc.rpartition("@")[2]
        head = [f"POST {url.path}{path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Accept: text/event-stream"]
        if url.username is not None:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
            head.append(f"Authorization: Basic {b64encode(pair.encode()).decode()}")
        elif token:
            head.append(f"Authorization: Bearer {token}")
        self._head = "".join(f"{line}\r\n" for line in head).encode()
        self._idle: list[Line] = []

    def head(self, name: str, value: str) -> bytes:
        """First lines of a request, with this one. A value that cannot stand in a head is left out."""
        if not value or not value.isascii() or not value.isprintable():
            return self._head
        return self._head + f"{name}: {value}\r\n".encode()

    async def take(self) -> Line:
        """A connection that is free. OSError or TimeoutError when there is none to be had."""
        loop = asyncio.get_running_loop()
        while self._idle:
            line = self._idle.pop()
            if not line.closing and loop.time() - line.idle_since < IDLE_S:
                return line
            line.close()
        async with asyncio.timeout(self._connect_s):
            context = ssl.create_default_context() if self._ssl else None
            _, made = await loop.create_connection(lambda: Line(loop), self._host, self._port, ssl=context)
        return made

    def put(self, line: Line) -> None:
        """Free for the next request."""
        line._lines = None
        now = asyncio.get_running_loop().time()
        line.idle_since = now
        while self._idle and now - self._idle[0].idle_since >= IDLE_S:
            self._idle.pop(0).close()
        self._idle.append(line)

    def close(self) -> None:
        """Hang up what is idle."""
        while self._idle:
            self._idle.pop().close()
