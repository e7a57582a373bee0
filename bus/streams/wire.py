"""One connection to the server, used by one task at a time, without redis-py's machinery around each command.

redis-py dials it, logs in and speaks TLS; then its transport is ours: commands are packed here, and replies parsed where the socket
delivers them, many at once and without the copies that a stream makes of a large body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, RedisError

from bus.client import connect

Command = tuple[Any, ...]


_WORDS: dict[str, bytes] = {}  # packed forms of short words; key and field names come again and again
_WORDS_MAX = 512  # most of what comes is ids, which do not come again: a larger one only takes longer to fill
LARGE = 32 * 1024
READ_BYTES = 128 * 1024
OVERDUE_S = 10.0  # of the answer to a blocking read, behind the time that it blocks
_MORE = object()  # what a parser says that has no whole reply


def pack(commands: Sequence[Command]) -> list[bytes]:
    """Commands as the server reads them: an array of byte strings each. Arguments are bytes, or become text. Large ones stand
    apart, so that they are not copied."""
    whole: list[bytes] = []
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for argument in command:
            if type(argument) is str:
                parts.append(_WORDS.get(argument) or _pack_word(argument))
            elif type(argument) is int:
                digits = b"%d" % argument
                parts.append(b"$%d\r\n%b\r\n" % (len(digits), digits))
            elif isinstance(argument, bytes):
                parts.append(b"$%d\r\n" % len(argument))
                if len(argument) < LARGE:
                    parts += (argument, b"\r\n")
                else:
                    whole += (b"".join(parts), argument)
                    parts = [b"\r\n"]
            else:
                parts.append(_pack_word(str(argument)))
    whole.append(b"".join(parts))
    return whole


def _pack_word(word: str) -> bytes:
    data = word.encode()
    packed = b"$%d\r\n%b\r\n" % (len(data), data)
    if len(data) < 64:
        if len(_WORDS) >= _WORDS_MAX:
            _WORDS.clear()
        _WORDS[word] = packed
    return packed


class _Line(asyncio.BufferedProtocol):
    """A connection from its login on. `before` had it until then, and closes it. Read into one place, over and over: memory that is
    taken anew for each large body costs more than the body's copies."""

    def __init__(self, transport: Any, parse_error: Callable[[str], Exception]) -> None:
        self.transport, self._before = transport, transport.get_protocol()
        self._parser = hiredis.Reader(protocolError=ConnectionError, replyError=parse_error, notEnoughData=_MORE)
        self._parser.setmaxbuf(READ_BYTES * 8)
        self._place = bytearray(READ_BYTES)
        self._view = memoryview(self._place)
        self._found: list[Any] = []
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        transport.pause_reading()
        transport.set_protocol(self)
        transport.resume_reading()

    async def replies(self, n: int) -> list[Any]:
        """So many, refusals among them."""
        while len(self._found) < n:
            if self._lost:
                raise ConnectionError("the server closed the connection")
            self._wanted, self._waiter = n, asyncio.get_running_loop().create_future()
            await self._waiter
        found, self._found = self._found, []
        return found

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view  # of a bytearray itself asyncio's TLS would fill copies, of which nothing comes back

    def buffer_updated(self, nbytes: int) -> None:
        self._parser.feed(self._place, 0, nbytes)  # type: ignore[arg-type] # it takes any buffer
        try:
            while (reply := self._parser.gets()) is not _MORE:
                self._found.append(reply)
        except ConnectionError:  # it does not speak Redis
            self._lost = True
        if self._lost or len(self._found) >= self._wanted:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._wake()
        self._before.connection_lost(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Wire:
    """Writes commands in one piece and reads as many replies. Dials when it must; never repeats anything."""

    def __init__(self, url: str) -> None:
        self._pool: Any = connect(url).connection_pool
        self._connection: Any = None
        self._line: _Line | None = None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The reply to each command; a refusal (RedisError) is returned in its place. Raises redis-py's ConnectionError
        or TimeoutError when the connection is lost: then it is unknown how many commands took effect."""
        packed = pack(commands)
        connection = self._connection
        if connection is None:
            connection = self._connection = self._pool.make_connection()
        try:
            if self._line is None:
                await connection.connect()
                self._line = _Line(connection._writer.transport, connection._parser.parse_error)
            if self._line.transport.is_closing():
                raise ConnectionError("the connection was closed")  # asyncio of Python 3.12 fails otherwise: no ConnectionError
            self._line.transport.writelines(packed)
            replies = await self._line.replies(len(commands))
            if lost := next((reply for reply in replies if isinstance(reply, ConnectionError)), None):
                raise lost  # it is loading, or the login does not hold any more
        except BaseException as error:  # also when cancelled: what comes back later would answer the wrong question
            self._connection = self._line = None
            await connection.disconnect(nowait=True)
            if isinstance(error, RuntimeError):  # uvloop's word for a transport that the network closed underneath
                raise ConnectionError(f"the connection was closed ({error})") from error
            raise
        return replies

    async def call(self, *command: Any, block_s: float = 0.0) -> Any:
        """One command's reply; a refusal is raised. `block_s`: that the command itself waits at most. TimeoutError where the reply
        is long overdue: a server whose clock was set back waits as much longer, and goes on when it is asked anew."""
        return (await self.calls(command, block_s=block_s))[0]

    async def calls(self, *commands: Command, block_s: float = 0.0) -> list[Any]:
        """The same of several in one round trip."""
        async with asyncio.timeout(block_s + OVERDUE_S if block_s > 0 else None):
            replies = await self.exchange(commands)
        if refused := next((reply for reply in replies if isinstance(reply, RedisError)), None):
            raise refused
        return replies

    @property
    def local_address(self) -> str:
        """This end's address, which hosts of the server's network can reach; empty on a unix socket, or while not connected."""
        return self._address("sockname")

    @property
    def peer_address(self) -> str:
        """The server's address as it is reached from here; empty as above."""
        return self._address("peername")

    def _address(self, end: str) -> str:
        name = self._line.transport.get_extra_info(end) if self._line is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    async def close(self) -> None:
        """Hang up; the next exchange would dial again."""
        connection, self._connection, self._line = self._connection, None, None
        if connection is not None:
            await connection.disconnect()
