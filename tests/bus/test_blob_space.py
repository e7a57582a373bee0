"""Bodies on a disk that runs full: waited for, and told, until there is space or the deadline is over."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bus.blobs import files
from bus.blobs.files import FileBlobs
from bus.clock import SystemClock
from bus.errors import BusFull


class Steps(SystemClock):
    """Time passes by sleeping; the disk has space again when `frees_at` is reached."""

    def __init__(self, frees_at: float) -> None:
        self.now, self.frees_at, self.seen = 0.0, frees_at, list[str]()
        self.blobs: Any = None

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.seen.append(self.blobs.full)
        self.now += seconds
        await asyncio.sleep(0)

    def write(self, fd: int, body: bytes, at: int) -> int:
        if self.now < self.frees_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(fd, body, at)


PWRITE = os.pwrite


@pytest.mark.parametrize("frees_at", [0.0, 5.0, 60.0])
async def test_a_body_waits_for_space_and_says_so_until_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frees_at: float
) -> None:
    clock = Steps(frees_at)
    clock.blobs = blobs = FileBlobs(tmp_path / "blobs", clock, deadline_s=10.0)
    monkeypatch.setattr(files.os, "pwrite", clock.write)
    if frees_at > 10.0:
        with pytest.raises(BusFull, match=r"not written to .*/blobs: No space left on device\. Free space there"):
            await blobs.put(b"body")
        assert 9.0 <= clock.now <= 10.0
    else:
        assert await blobs.get(await blobs.put(b"body")) == b"body"
        assert frees_at <= clock.now <= frees_at + 1.0
    assert {*clock.seen} <= {f"space in {tmp_path}/blobs"} and not blobs.full
    assert not list((tmp_path / "blobs").glob("*.part"))


async def test_spares_of_one_size_do_not_keep_the_space_of_bodies_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of deleted groups held the space that rollouts waited for, and nobody would ever have written over them."""
    blobs = FileBlobs(tmp_path / "blobs", deadline_s=0.0)
    await blobs.delete([await blobs.put(b"x" * (1 << 20))])
    spares = (tmp_path / "blobs" / "free").glob("*/*")
    if not list(spares):
        pytest.skip("this file system keeps none")

    def write(fd: int, body: bytes, at: int) -> int:
        if list((tmp_path / "blobs" / "free").glob("*/*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(fd, body, at)

    monkeypatch.setattr(files.os, "pwrite", write)
    assert await blobs.get(await blobs.put(b"body")) == b"body"
