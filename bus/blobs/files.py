"""Blobs as files in a directory that all actors see: shared memory on one host, a shared file system across hosts.

    <id>.blob         id and size as 64 characters, then the body (a recycled file may be longer)
    <id>.part         being written
    free/<class>/     files of deleted blobs of up to 2**class bytes, to be written over

Fresh pages are most of what a large body costs: writing over a deleted file's pages is several times cheaper. A reader
that opened a file before it was recycled sees another header before or after its body, and knows that the blob is gone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
import uuid
from pathlib import Path

from bus.blobs.api import parse_ref
from bus.clock import Clock, SystemClock
from bus.errors import BadMessage, BusFull
from bus.messages.waits import Wait
from bus.private import private_directory

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
_INLINE_IO_BYTES = 1 << 20  # below this a thread costs more than the copy into shared memory
_HEAD_BYTES, _ID_CHARACTERS = 64, 32
_SPARE_BYTES, _SPARE_FILES, _SPARE_CLASS = 1 << 25, 32, 26  # kept per class; larger files are not kept
_LOCAL = {"tmpfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs", "f2fs"}


class FileBlobs:
    """Write to a temporary name, rename: a reader sees all of a body or none of it. On a full disk, spares go;
    then it is waited for, `deadline_s` at most, since readers free space all the time."""

    def __init__(self, directory: Path, clock: Clock | None = None, *, deadline_s: float = 0.0) -> None:
        private_directory(directory)
        self.full = ""  # what is waited for now; empty = nothing
        self._clock, self._deadline_s = clock or SystemClock(), deadline_s
        self._directory = str(directory)
        self._recycle = _file_system(directory.resolve()) in _LOCAL  # others' caches may show a file's former body
        self._known: dict[int, list[str]] = {}
        self._room: dict[int, int] = {}

    def _path(self, blob_id: str) -> str:
        return f"{self._directory}/{blob_id}.blob"

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(self, blob_id: str, body: bytes) -> None:
        temporary = f"{self._directory}/{blob_id}.part"
        try:
            self._take_spare(temporary, len(body))
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(fd, bytes(_HEAD_BYTES), 0)
                _write_all(fd, body)
                os.pwrite(fd, _head(blob_id, len(body)), 0)
            finally:
                os.close(fd)
            os.rename(temporary, self._path(blob_id))
        except OSError as error:
            _unlink(temporary)
            raise BusFull(
                f"blob of {len(body)} bytes not written to {self._directory}: {error.strerror}. Free space "
                "there; nothing was lost, the entry stays pending."
            ) from error

    def _take_spare(self, target: str, size: int) -> None:
        """Rename a file of this size's class to `target`, when there is one. Names are listed once and then tried: one
        that another writer took is no longer there."""
        if not self._recycle:
            return
        kind = _class_of(size)
        names = self._known.setdefault(kind, [])
        if not names:
            names += self._list_spares(kind)
        while names:
            try:
                os.rename(f"{self._folder(kind)}/{names.pop()}", target)
                return
            except FileNotFoundError:
                continue

    async def put(self, body: bytes) -> str:
        until, pause_s = self._clock.monotonic() + self._deadline_s, 0.05
        try:
            while True:
                try:
                    return await self._put(body)
                except BusFull as error:
                    full = isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL
                    if full and self._drop_spares():
                        continue
                    if not full or self._clock.monotonic() + pause_s > until:
                        raise
                    if not self.full:
                        log.warning("%s Trying again for %.0f s", error, self._deadline_s)
                self.full = Wait.BLOB_SPACE.text(folder=self._directory)
                await self._clock.sleep(pause_s)
                pause_s = min(1.0, 2 * pause_s)
        finally:
            self.full = ""

    async def _put(self, body: bytes) -> str:
        blob_id = uuid.uuid4().hex
        if len(body) < _INLINE_IO_BYTES:
            self._write(blob_id, body)
        else:
            await asyncio.to_thread(self._write, blob_id, body)
        return f"file:{blob_id}:{len(body)}"

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, blob_id: str, size: int) -> bytes:
        try:
            fd = os.open(self._path(blob_id), os.O_RDONLY)
        except FileNotFoundError:
            raise BadMessage(f"blob {blob_id} is gone from {self._directory}") from None
        try:
            before = os.pread(fd, _HEAD_BYTES, 0)
            body = _read_all(fd, size)
            after = os.pread(fd, _HEAD_BYTES, 0)
        finally:
            os.close(fd)
        if not before == after == _head(blob_id, size) or len(body) != size:
            raise BadMessage(
                f"blob {blob_id} in {self._directory} does not hold the {size} bytes that its entry says: it was cut, or "
                "deleted while it was read"
            )
        return body

    async def get(self, ref: str) -> bytes:
        blob_id, size = parse_ref(ref, "file")
        if size < _INLINE_IO_BYTES:
            return self._read(blob_id, size)
        return await asyncio.to_thread(self._read, blob_id, size)

    # -- deleting -----------------------------------------------------------------------------------------------

    async def delete(self, refs: list[str]) -> None:
        for ref in refs:
            try:
                blob_id, size = parse_ref(ref, "file")
            except BadMessage:  # names nothing of ours
                continue
            try:
                self._give_back(self._path(blob_id), blob_id, _class_of(size))
            except FileNotFoundError:
                _unlink(f"{self._directory}/{blob_id}.part")

    def _give_back(self, path: str, blob_id: str, kind: int) -> None:
        """Into the spares of its class, or away when there are enough."""
        if self._room_for(kind):
            os.rename(path, f"{self._folder(kind)}/{blob_id}")
        else:
            os.unlink(path)

    def _room_for(self, kind: int) -> bool:
        """Whether one more spare is wanted. Counted by listing, then by what this process added since."""
        if not self._recycle or kind > _SPARE_CLASS:
            return False
        room = self._room.get(kind, 0)
        if room <= 0:
            room = min(_SPARE_FILES, max(1, _SPARE_BYTES >> kind)) - len(self._list_spares(kind))
        self._room[kind] = room - 1
        return room > 0

    def _list_spares(self, kind: int) -> list[str]:
        try:
            return os.listdir(self._folder(kind))
        except FileNotFoundError:
            os.makedirs(self._folder(kind), mode=0o700, exist_ok=True)
            return []

    def _drop_spares(self) -> bool:
        """Whether there was one: those of one size take the space of bodies of another."""
        spares = list(Path(self._directory, "free").glob("*/*"))
        for spare in spares:
            _unlink(str(spare))
        self._known.clear()
        return bool(spares)

    def _folder(self, kind: int) -> str:
        return f"{self._directory}/free/{kind}"

    async def list_ids(self) -> list[tuple[str, float]]:
        now = time.time()
        found: list[tuple[str, float]] = []
        for path in Path(self._directory).glob("*.*"):  # also what a killed writer left of a body
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            found.append((f"file:{path.stem}:{max(0, facts.st_size - _HEAD_BYTES)}", now - facts.st_mtime))
        return found


def _head(blob_id: str, size: int) -> bytes:
    return f"{blob_id:<{_ID_CHARACTERS}}{size:0{_HEAD_BYTES - _ID_CHARACTERS}d}".encode()


def _class_of(size: int) -> int:
    return max(14, (size - 1).bit_length())


def _write_all(fd: int, body: bytes) -> None:
    """One call writes at most 2 GiB."""
    done = os.pwrite(fd, body, _HEAD_BYTES)
    while done < len(body):
        done += os.pwrite(fd, memoryview(body)[done:], _HEAD_BYTES + done)


def _read_all(fd: int, size: int) -> bytes:
    body = os.pread(fd, size, _HEAD_BYTES)
    while len(body) < size and (more := os.pread(fd, size - len(body), _HEAD_BYTES + len(body))):
        body += more
    return body


def _file_system(directory: Path) -> str:
    """Type of the file system that holds it, as Linux names it; empty where that is unknown."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    over = [(len(at), kind) for at, kind in mounts if directory.is_relative_to(at.replace("\\040", " "))]
    return max(over, default=(0, ""), key=lambda found: found[0])[1]


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
