"""One connection to the server, used by one task at a time, without redis-py's machinery around each command.

redis-py dials it, logs in and speaks TLS; commands are packed and replies read here, many at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError

from bus.client import connect

Command = tuple[Any, ...]


_WORDS: dict[str, bytes] = {}  # packed forms of short words; key and field names come again and again
_WORDS_MAX = 4096


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as the server reads them: an array of byte strings each. Arguments are bytes, or become text."""
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
                parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
            else:
                parts.append(_pack_word(str(argument)))
    return b"".join(parts)


def _pack_word(word: str) -> bytes:
    data = word.encode()
    packed = b"$%d\r\n%b\r\n" % (len(data), data)
    if len(data) < 64:
        if len(_WORDS) >= _WORDS_MAX:
            _WORDS.clear()
        _WORDS[word] = packed
    return packed


class Wire:
    """Writes commands in one piece and reads as many replies. Dials when it must; never repeats anything."""

    def __init__(self, url: str) -> None:
        self._pool: Any = connect(url).connection_pool
        self._connection: Any = None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The reply to each command; a refusal (RedisError) is returned in its place. Raises redis-py's ConnectionError
        or TimeoutError when the connection is lost: then it is unknown how many commands took effect."""
        packed = pack(commands)
        connection = self._connection
        if connection is None:
            connection = self._connection = self._pool.make_connection()
        try:
            await connection.send_packed_command(packed, check_health=False)
            replies: list[Any] = []
            loading: BusyLoadingError | None = None
            for _ in commands:
                try:
                    replies.append(await connection.read_response())
                except BusyLoadingError as error:
                    loading = error
                except (ConnectionError, TimeoutError):
                    raise
                except RedisError as error:
                    replies.append(error)
        except BaseException as error:  # also when cancelled: what comes back later would answer the wrong question
            self._connection = None
            await connection.disconnect(nowait=True)
            if isinstance(error, RuntimeError):  # uvloop's word for a transport that the network closed underneath
                raise ConnectionError(f"the connection was closed ({error})") from error
            raise
        if loading is not None:
            raise loading
        return replies

    async def call(self, *command: Any) -> Any:
        """One command's reply; a refusal is raised."""
        reply = (await self.exchange((command,)))[0]
        if isinstance(reply, RedisError):
            raise reply
        return reply

    @property
    def local_address(self) -> str:
        """This end's address, which hosts of the server's network can reach; empty on a unix socket, or while not connected."""
        return self._address("sockname")

    @property
    def peer_address(self) -> str:
        """The server's address as it is reached from here; empty as above."""
        return self._address("peername")

    def _address(self, end: str) -> str:
        writer = getattr(self._connection, "_writer", None)
        name = writer.get_extra_info(end) if writer is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    async def close(self) -> None:
        """Hang up; the next exchange would dial again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect()
