"""Blobs beside the streams, for runs across hosts without a shared directory: pieces of 512 kB, so that one large body
does not hold up the small messages of everyone else."""

from __future__ import annotations

import uuid

from redis.asyncio import Redis

from bus.blobs.api import parse_ref
from bus.errors import BadMessage
from bus.streams.keys import Keys
from bus.streams.link import call

PIECE_BYTES = 512 * 1024


class RedisBlobs:
    """One Redis list per blob, one element per piece."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def put(self, body: bytes) -> str:
        blob_id = uuid.uuid4().hex
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            await call(self._client, "RPUSH", self._keys.blob(blob_id), body[start : start + PIECE_BYTES])
        return f"redis:{blob_id}:{len(body)}"

    async def get(self, ref: str) -> bytes:
        blob_id, size = parse_ref(ref, "redis")
        pieces: list[bytes] = []
        n_pieces = max(1, -(-size // PIECE_BYTES))
        for index in range(n_pieces):
            piece = await call(self._client, "LINDEX", self._keys.blob(blob_id), index)
            if piece is None:
                raise BadMessage(f"blob {blob_id} is gone or cut: {index} of {n_pieces} pieces found")
            pieces.append(piece)
        body = b"".join(pieces)
        if len(body) != size:
            raise BadMessage(f"blob {blob_id} has {len(body)} bytes, its entry says {size}")
        return body

    async def delete(self, refs: list[str]) -> None:
        if refs:
            await call(self._client, "UNLINK", *(self._keys.blob(parse_ref(ref, "redis")[0]) for ref in refs))

    async def list_ids(self) -> list[tuple[str, float]]:
        pattern = self._keys.blob("*").replace("{", "[{]").replace("}", "[}]")
        found: list[tuple[str, float]] = []
        cursor = b"0"
        while True:
            cursor, keys = await call(self._client, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            for key in keys:
                pieces = await call(self._client, "LRANGE", key, 0, -1)
                idle_s = await call(self._client, "OBJECT", "IDLETIME", key)
                ref = f"redis:{key.decode().rpartition(':')[2]}:{sum(len(piece) for piece in pieces)}"
                found.append((ref, float(idle_s or 0)))
            if cursor == b"0":
                return found


__all__ = ("RedisBlobs",)
