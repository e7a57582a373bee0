"""A full disk under the run's folder: the record waits for space, and lines are written once and whole."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.recorder import file as files
from actors.recorder.actor import Recorder
from actors.recorder.file import append_lines, read_records
from actors.reward.pool import VerifierPool
from actors.reward.sample import Sample
from bus import Bus
from tests.actors.house import until
from tests.miles_async.console_data import Story, config


class Disk:
    """Takes `room` bytes, then is full until it is `freed`, as a file system that runs full in the middle of a write."""

    def __init__(self, room: int) -> None:
        self.room, self.refused = room, 0
        self._write = os.write

    def write(self, file: int, body: bytes) -> int:
        if not self.room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        n = self._write(file, bytes(body[: self.room]))
        self.room -= n
        return n

    def free(self) -> None:
        self.room = 1 << 30


async def test_the_record_waits_for_space_and_every_line_is_there_once(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.recorder.actor.FULL_S", 0.01)
    disk, told = Disk(1500), list[str]()
    monkeypatch.setattr(files.os, "write", disk.write)

    async def tell(text: str) -> None:
        told.append(text)

    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Recorder(bus, tmp_path, tell=tell).follow(stop))
            await until(lambda: _true(disk.refused > 2))
            assert (tmp_path / files.FILE).read_bytes()[-1:] in (b"", b"\n")
            disk.free()
            await until(lambda: _true("eval" in [r["kind"] for r in read_records(tmp_path)]))
            stop.set()
        lines = (tmp_path / files.FILE).read_bytes().splitlines()
        entries = [r["entry"] for r in read_records(tmp_path) if "entry" in r]
    assert len(read_records(tmp_path)) == len(lines) and len(entries) == len({*entries})
    assert told and f"{tmp_path} has " in told[0] and "The run goes on, its record waits" in told[0]


async def test_a_run_that_ends_does_not_wait_for_space(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(0)
    monkeypatch.setattr(files.os, "write", disk.write)
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        stop = asyncio.Event()
        following = asyncio.create_task(Recorder(bus, tmp_path).follow(stop))
        await until(lambda: _true(disk.refused > 0))
        stop.set()
        with pytest.raises(OSError, match="No space left"):
            await following


def test_lines_that_do_not_fit_leave_no_half_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place: dict[str, Any] = {"older": tmp_path / "older", "most_bytes": 1 << 20}
    append_lines(tmp_path / "lines", [{"n": 1}], **place)
    monkeypatch.setattr(files.os, "write", Disk(10).write)
    with pytest.raises(OSError, match="No space left"):
        append_lines(tmp_path / "lines", [{"n": 2}, {"n": 3}], **place)
    assert (tmp_path / "lines").read_bytes() == b'{"n":1}\n'


def test_prints_of_actors_and_of_functions_fail_by_no_full_disk() -> None:
    code = "from actors.runtime.contained import lose_prints\nimport sys\nlose_prints()\n"
    code += "for out in (sys.stdout, sys.stderr):\n    print('x' * 100_000, file=out, flush=True)\n    print('y', file=out)"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, timeout=60, check=False)
    assert ended.returncode == 0


async def test_a_reward_that_prints_to_a_log_on_a_full_disk_is_a_reward() -> None:
    own, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    os.close(full)
    try:
        async with VerifierPool(f"{__name__}.prints", n_workers=1, boot_deadline_s=60.0) as pool:
            sample = Sample(sample_id="g1/0", prompt="", response="", label="")
            assert await pool.score(sample, 20.0) == 1.0
    finally:
        os.dup2(own, 2)
        os.close(own)


def prints(sample: Any) -> float:
    print("x" * 100_000, flush=True)
    print("y" * 100_000, file=sys.stderr, flush=True)
    return 1.0


async def _true(value: bool) -> bool:
    return value
