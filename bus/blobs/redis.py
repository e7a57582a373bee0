"""Blobs beside the streams, for runs across hosts without a shared directory: pieces of 512 kB, so that one large body
does not hold up the small messages of everyone else."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import uuid
from collections.abc import Sequence
from functools import cache

from bus.blobs.api import ids_of, parse_ref
from bus.errors import BadMessage
from bus.streams.keys import Keys
from bus.streams.link import Link
from bus.streams.wire import Command

PIECE_BYTES = 512 * 1024
MOST_PIECES = 1 << 16
WRITE_BYTES = 4 << 20  # about so much in one write
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@cache
def keep_pages() -> None:
    """Once a process, with glibc: memory of this size, which bodies take and free all the time, is not given back to the system
    after each of them. Fresh pages cost a body of 150 kB a quarter of its way through a process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


class RedisBlobs:
    """One Redis list per blob, one element per piece. Bodies that come while others are being written go together in the next
    write: across hosts a round trip costs more than the bytes."""

    full = ""  # the link waits for a server that takes no writes

    def __init__(self, link: Link, keys: Keys) -> None:
        keep_pages()
        self._link = link
        self._keys = keys
        self._waiting: list[tuple[bytes, asyncio.Future[str]]] = []
        self._turn = asyncio.Lock()

    async def put(self, body: bytes) -> str:
        mine: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((body, mine))
        async with self._turn:
            while not mine.done():
                await self._write_some()
        return mine.result()

    async def _write_some(self) -> None:
        """The oldest bodies that wait, at least one. Their callers get what comes of it, and wait on if this one is cancelled."""
        n, size = 0, 0
        while n < len(self._waiting) and size < WRITE_BYTES:
            size += len(self._waiting[n][0])
            n += 1
        some, self._waiting = self._waiting[:n], self._waiting[n:]
        try:
            refs = await self._link.retry(lambda: self._put([body for body, _ in some]))
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for _, future in some:
                future.set_exception(error)
        except BaseException:
            self._waiting[:0] = some
            raise
        else:
            for (_, future), ref in zip(some, refs, strict=True):
                future.set_result(ref)

    async def _put(self, bodies: Sequence[bytes]) -> list[str]:
        commands: list[Command] = []
        refs: list[str] = []
        for body in bodies:
            blob_id = uuid.uuid4().hex  # a new one at each attempt: after a lost reply a piece could be there twice
            for start in range(0, max(1, len(body)), PIECE_BYTES):
                piece = body if len(body) <= PIECE_BYTES else body[start : start + PIECE_BYTES]
                commands.append(("RPUSH", self._keys.blob(blob_id), piece))
            refs.append(f"redis:{blob_id}:{len(body)}")
        await self._link.bulk(commands)
        return refs

    async def get(self, ref: str) -> bytes:
        blob_id, size = parse_ref(ref, "redis")
        n_pieces = max(1, -(-size // PIECE_BYTES))
        if n_pieces > MOST_PIECES:
            raise BadMessage(f"blob {blob_id} claims {size} bytes, which no body has")
        key = self._keys.blob(blob_id)
        asked = [self._link.run("LINDEX", key, index) for index in range(n_pieces)]
        pieces = [await asked[0]] if n_pieces == 1 else await asyncio.gather(*asked)
        if None in pieces:
            raise BadMessage(f"blob {blob_id} is gone or cut: {pieces.index(None)} of {n_pieces} pieces found")
        body = pieces[0] if n_pieces == 1 else b"".join(pieces)
        if len(body) != size:
            raise BadMessage(f"blob {blob_id} has {len(body)} bytes, its entry says {size}")
        return body

    async def delete(self, refs: list[str]) -> None:
        if ids := ids_of(refs, "redis"):
            await self._link.run("UNLINK", *map(self._keys.blob, ids))

    async def list_ids(self) -> list[tuple[str, float]]:
        pattern = self._keys.blob("*").replace("{", "[{]").replace("}", "[}]")
        found: list[tuple[str, float]] = []
        cursor = b"0"
        while True:
            cursor, keys = await self._link.run("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            asked = [self._link.run("OBJECT", "IDLETIME", key) for key in keys]
            for key, idle_s in zip(keys, await asyncio.gather(*asked), strict=True):
                found.append((f"redis:{key.decode().rpartition(':')[2]}:0", float(idle_s or 0)))
            if cursor == b"0":
                return found
