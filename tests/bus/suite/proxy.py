"""A proxy in front of a real server that loses a chosen reply: the command was done, its sender does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from redis.asyncio.connection import parse_url


class LossyProxy:
    """Listens on a unix socket in `directory`; use as `async with`. Give `url` to the client under test."""

    def __init__(self, server_url: str, directory: Path) -> None:
        self._server: dict[str, Any] = dict(parse_url(server_url))
        self._path = directory / "proxy.sock"
        self._lose: list[bytes] = []
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.lost = 0
        self.before_reply: Callable[[], Awaitable[None]] | None = None  # awaited before each reply is passed on
        self.after_loss: Callable[[], Awaitable[None]] | None = None  # awaited before the connection is closed

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"unix://{self._path}"

    def lose_reply_to(self, *commands: str) -> None:
        """For each word in turn: the next request with it is passed on, its reply is dropped, the connection closed."""
        self._lose += [command.encode() for command in commands]

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._listener is not None:
            self._listener.close()
            for writer in list(self._writers):
                writer.close()
            await self._listener.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "path" in self._server:
            server_reader, server_writer = await asyncio.open_unix_connection(self._server["path"])
        else:
            server_reader, server_writer = await asyncio.open_connection(
                self._server.get("host", "127.0.0.1"), self._server.get("port", 6379)
            )
        doomed = asyncio.Event()
        self._writers |= {writer, server_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._requests(reader, server_writer, doomed))
                tasks.create_task(self._replies(server_reader, writer, doomed))
        finally:
            self._writers -= {writer, server_writer}
            for end in (writer, server_writer):
                end.close()

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        while data := await _read(source):
            if self._lose and self._lose[0] in data:
                self._lose.pop(0)
                doomed.set()
            sink.write(data)
        sink.close()

    async def _replies(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, doomed: asyncio.Event) -> None:
        while data := await _read(source):
            if doomed.is_set():
                self.lost += 1
                if self.after_loss is not None:
                    await self.after_loss()
                break
            if self.before_reply is not None:
                await self.before_reply()
            sink.write(data)
        sink.close()


async def _read(source: asyncio.StreamReader) -> bytes:
    try:
        return await source.read(1 << 16)
    except ConnectionError:
        return b""


__all__ = ("LossyProxy",)
