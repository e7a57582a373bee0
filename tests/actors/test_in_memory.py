"""What killed runs left in shared memory goes at the next start of any run; what somebody uses, or has just begun to, stays."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.generation.supply import Supply
from actors.runtime import in_memory
from actors.runtime.context import Context
from bus.knobs.live import LiveKnobs
from tests.actors.house import open_bus
from tests.declared import actor_of
from tests.floors.tree import ROOT

HOLDS = """
import sys
from pathlib import Path
from actors.runtime.in_memory import use
use(Path(sys.argv[1]))
print("held", flush=True)
input()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(in_memory, "SHARED", tmp_path)
    return tmp_path


def long_ago(folder: Path) -> Path:
    os.utime(folder, (0, 0))
    return folder


def left(memory: Path) -> set[str]:
    return {path.name.removeprefix(f"miles_async-{os.getuid()}-") for path in memory.iterdir()}


def test_what_killed_runs_left_goes_and_what_lives_or_begins_stays(memory: Path) -> None:
    for name in ("empty", "full", "used", "named", "unknown", "fetched"):
        folder = in_memory.named(name)
        if name in ("full", "used", "unknown"):
            (folder / "weights").mkdir()
        if name in ("full", "used", "unknown", "fetched"):
            (folder / "weights" / "v1" if name != "fetched" else folder / ("0" * 32)).mkdir()
        if name in ("full", "fetched"):
            os.close(in_memory.use(folder))
        long_ago(folder)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(memory / f"miles_async-{os.getuid()}-used")],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None and holder.stdout.readline()
        long_ago(memory / f"miles_async-{os.getuid()}-used")
        (memory / "of somebody" / "weights").mkdir(parents=True)
        (memory / f"miles_async-{os.getuid()}-link").symlink_to(long_ago(memory / "of somebody"))
        in_memory.named("named")  # a start of that run, which has not come to take the lock
        with in_memory.in_use(in_memory.named("ours")):
            assert left(memory) == {"used", "named", "unknown", "ours", "link", "of somebody"}, "unknown: no lock, not empty"
        assert "ours" not in left(memory), "its last user takes it away"
        holder.kill()
        holder.wait(20)
        in_memory.sweep_left([])
        assert (memory / "of somebody" / "weights").exists()
        assert left(memory) == {"named", "unknown", "link", "of somebody"}, "the kernel took the lock of what was killed"


def test_who_comes_while_a_folder_is_taken_away_uses_a_new_one(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_memory.named("r")
    os.close(in_memory.use(folder))
    lock, calls = fcntl.flock, []

    def flock(handle: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:  # the other was quicker, between our look for the file and our lock
            shutil.rmtree(folder)
        lock(handle, how)

    monkeypatch.setattr(in_memory.fcntl, "flock", flock)
    came = in_memory.use(folder)
    assert calls == [fcntl.LOCK_SH] * 2 and (folder / in_memory.USERS).exists()
    in_memory.delete_unused(folder)
    assert folder.exists(), "it is in use"
    os.close(came)
    in_memory.let_go(folder)
    assert not folder.exists()


async def test_a_worker_elsewhere_frees_what_killed_ones_left_there(memory: Path, redis_url: str, run_name: str) -> None:
    os.close(in_memory.use(folder := in_memory.named("x-fetched")))
    (folder / ("0" * 32)).mkdir()
    long_ago(folder)
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        Supply(context, token="t", serves=False, address="", deadline_s=5.0).open()
    assert not folder.exists()
