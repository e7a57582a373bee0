"""Blobs beside the streams, for runs across hosts without a shared directory: pieces of 512 kB, so that one large body
does not hold up the small messages of everyone else."""

from __future__ import annotations

import asyncio
import uuid

from bus.blobs.api import ids_of, parse_ref
from bus.errors import BadMessage
from bus.streams.keys import Keys
from bus.streams.link import Link

PIECE_BYTES = 512 * 1024


class RedisBlobs:
    """One Redis list per blob, one element per piece."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def put(self, body: bytes) -> str:
        return await self._link.retry(lambda: self._put(body))

    async def _put(self, body: bytes) -> str:
        blob_id = uuid.uuid4().hex  # a new one at each attempt: after a lost reply a piece could be there twice
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            await self._link.bulk("RPUSH", self._keys.blob(blob_id), body[start : start + PIECE_BYTES])
        return f"redis:{blob_id}:{len(body)}"

    async def get(self, ref: str) -> bytes:
        blob_id, size = parse_ref(ref, "redis")
        pieces: list[bytes] = []
        n_pieces = max(1, -(-size // PIECE_BYTES))
        for index in range(n_pieces):
            piece = await self._link.run("LINDEX", self._keys.blob(blob_id), index)
            if piece is None:
                raise BadMessage(f"blob {blob_id} is gone or cut: {index} of {n_pieces} pieces found")
            pieces.append(piece)
        body = b"".join(pieces)
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
