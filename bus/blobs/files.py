"""Blobs as files in a directory that all actors see: shared memory on one host, a shared file system across hosts."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from pathlib import Path

from bus.blobs.api import ids_of, parse_ref
from bus.errors import BadMessage, BusFull

_INLINE_IO_BYTES = 1 << 20  # below this a thread costs more than the copy into shared memory


class FileBlobs:
    """Write to a temporary name, rename: a reader sees all of a body or none of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _path(self, blob_id: str) -> Path:
        return self._directory / f"{blob_id}.blob"

    def _write(self, blob_id: str, body: bytes) -> None:
        temporary = self._directory / f"{blob_id}.part"
        try:
            temporary.write_bytes(body)
            os.rename(temporary, self._path(blob_id))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise BusFull(
                f"blob of {len(body)} bytes not written to {self._directory}: {error.strerror}. Free space there or set "
                "--blob-dir; nothing was lost, the entry stays pending."
            ) from error

    async def put(self, body: bytes) -> str:
        blob_id = uuid.uuid4().hex
        if len(body) < _INLINE_IO_BYTES:
            self._write(blob_id, body)
        else:
            await asyncio.to_thread(self._write, blob_id, body)
        return f"file:{blob_id}:{len(body)}"

    def _read(self, blob_id: str, size: int) -> bytes:
        try:
            body = self._path(blob_id).read_bytes()
        except FileNotFoundError:
            raise BadMessage(f"blob {blob_id} is gone from {self._directory}") from None
        if len(body) != size:
            raise BadMessage(f"blob {blob_id} in {self._directory} has {len(body)} bytes, its entry says {size}")
        return body

    async def get(self, ref: str) -> bytes:
        blob_id, size = parse_ref(ref, "file")
        if size < _INLINE_IO_BYTES:
            return self._read(blob_id, size)
        return await asyncio.to_thread(self._read, blob_id, size)

    async def delete(self, refs: list[str]) -> None:
        for blob_id in ids_of(refs, "file"):
            self._path(blob_id).unlink(missing_ok=True)

    async def list_ids(self) -> list[tuple[str, float]]:
        now = time.time()
        found: list[tuple[str, float]] = []
        for path in self._directory.glob("*.blob"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((f"file:{path.stem}:{stat.st_size}", now - stat.st_mtime))
        return found


__all__ = ("FileBlobs",)
