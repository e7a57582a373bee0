"""Faults of the machine that a run is on: a disk without space, few files that may be open, a clock that is set, processes that
stand still for a minute."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bus.server import EmbeddedRedis
from tests.crash.conftest import Launch
from tests.crash.house import Run, Tables, merged
from tests.crash.judge import judge
from tests.crash.mischief import join
from tests.crash.test_workers import held, until_it_works
from tests.warm.launched import clock_of

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

FOREVER: Tables = {"rollout": {"num_rollout": 100_000}}
TWO: Tables = {"sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8}}
DAY_S = 86400
OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size="$0" none /dev/shm && exec "$@"')
"""Before the size of a /dev/shm of its own, and a command."""


def may_mount() -> bool:
    return sys.platform == "linux" and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not may_mount(), reason="no file systems may be mounted here")


@pytest.fixture
def disk() -> Iterator[Callable[[Run, Path, str], None]]:
    """A file system of its own for a folder of a run, of a size; the run is ended before it is gone."""
    made: list[tuple[Run, Path]] = []

    def mount(run: Run, path: Path, size: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(path)], check=True)
        made.append((run, path))

    try:
        yield mount
    finally:
        for run, path in reversed(made):
            run.clean()
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> Path:
    """The file that takes all that is left."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
    return ballast


@mounts
@pytest.mark.slow
@pytest.mark.takes(120)
@pytest.mark.parametrize("whose", ["run", "redis"])
def test_a_disk_is_full_for_half_a_minute(whose: str, run_of: Launch, disk: Callable[[Run, Path, str], None]) -> None:
    run = run_of(FOREVER)
    disk(run, run.dir, "200m")
    disk(run, run.dir / "redis", "64m")
    run.start()
    run.until_step(3)
    ballast = fill(run.dir if whose == "run" else run.dir / "redis")
    time.sleep(30)  # the one thing that is tried here
    ballast.unlink()
    step = run.step()
    run.until("training to go on", lambda: run.step() >= step + 3)
    run.drain()
    judge(run, steps=run.saved())


@mounts
@pytest.mark.slow
@pytest.mark.parametrize("size", ["64k", "1m"])
def test_shared_memory_that_is_small_or_full(size: str, run_of: Launch) -> None:
    run = run_of(TWO)
    run.start(wrap=(*OWN_SHM, size))
    run.finish()
    judge(run)


@pytest.mark.slow
def test_256_files_may_be_open(run_of: Launch) -> None:
    run = run_of(merged(TWO, {"sglang": {"num_generation_workers": 3}}))
    run.start(wrap=("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh"))
    run.finish()
    judge(run)


@pytest.mark.slow
@pytest.mark.takes(90)
def test_the_clock_is_set_a_day_forth_and_two_days_back(run_of: Launch) -> None:
    """Everybody's, the server's included."""
    run = run_of(FOREVER)
    library = clock_of(run.home)
    if not library.exists():
        pytest.skip("no compiler")
    file = run.home / "skew"
    file.write_bytes(struct.pack("q", 0))
    run.start(wrap=("env", f"LD_PRELOAD={library}", f"MA_SKEW_FILE={file}"))
    run.until_step(2)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as told:
        for skew_s in (DAY_S, -DAY_S, 0):
            told[:] = struct.pack("q", skew_s)
            step = run.step()
            run.until(f"training to go on, the clock {skew_s} s ahead", lambda step=step: run.step() >= step + 3)
        before = {name: run.pids(name) for name in ("trainer", "sampler", "filter", "recorder", "generation-0")}
        told[:] = struct.pack("q", DAY_S)
        step = run.step()
        run.until("training to go on", lambda: run.step() >= step + 3)
    assert {name: run.pids(name) for name in before} == before
    run.drain()
    judge(run, steps=run.saved())


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[int], object]]]:
    """A Redis server, and what sets its clock so many seconds ahead of everybody else's."""
    with TemporaryDirectory(prefix="ma-bus-") as name:
        library, file = clock_of(Path(name)), Path(name) / "skew"
        if not library.exists():
            pytest.skip("no compiler")
        file.write_bytes(struct.pack("q", 0))
        server = EmbeddedRedis(Path(name))
        with monkeypatch.context() as patched:
            patched.setenv("LD_PRELOAD", str(library))
            patched.setenv("MA_SKEW_FILE", str(file))
            server.start()
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as told:

            def ahead(skew_s: int) -> None:
                told[:] = struct.pack("q", skew_s)

            try:
                yield server.url, ahead
            finally:
                server.stop()


@pytest.mark.slow
@pytest.mark.takes(90)
def test_the_clock_of_redis_alone_is_set(run_of: Launch, own_clock: tuple[str, Callable[[int], object]]) -> None:
    """Forth, which makes all work under way look abandoned; and back, when what a dead worker held must not wait for as long."""
    url, set_clock = own_clock
    own: Tables = {"bus": {"bus_url": url}, "rollout": {"num_reward_workers": 2}}
    idle: Tables = {"rollout": {"custom_generate_function_path": "tests.crash.episode.idle"}}
    run = run_of(merged(merged(merged(TWO, FOREVER), own), idle))
    run.start()
    run.until_step(2)
    guest = join(run, "guest", "--custom-generate-function-path", "tests.crash.episode.idle")
    try:
        until_it_works(run, "guest")
        for skew_s in (DAY_S, 3 * DAY_S, 3 * DAY_S + 60):
            set_clock(skew_s)
            step = run.step()
            run.until(f"training to go on, {skew_s} s ahead", lambda step=step: run.step() >= step + 3)
        run.until("samples under way there", lambda: run.ask(held) > 0)
        set_clock(0)
        guest.send_signal(signal.SIGKILL)
        run.until("others to take over what it held", lambda: run.ask(held) == 0, seconds=120.0)
    finally:
        guest.kill()
        guest.wait()
    step = run.step()
    run.until("training to go on", lambda: run.step() >= step + 3)
    run.drain()
    judge(run, steps=run.saved())
    said = "".join(file.read_text() for file in (run.dir / "logs").glob("*.log"))
    assert "clock was set forth by 8.64e+04 s" in said and "clock was set back by" in said


@pytest.mark.slow
@pytest.mark.takes(120)
@pytest.mark.parametrize("actor", ["trainer", "sampler", "filter", "reward-0", "generation-0", "recorder", "launcher"])
def test_one_stands_still_for_a_minute(actor: str, run_of: Launch) -> None:
    run = run_of(merged(TWO, {"rollout": {"num_rollout": 100_000, "num_reward_workers": 2}}))
    run.start()
    run.until_step(2)
    assert run.launcher is not None
    pid = run.launcher.pid if actor == "launcher" else run.pid(actor)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(60)  # the one thing that is tried here
    os.kill(pid, signal.SIGCONT)
    step = run.step()
    run.until("training to go on", lambda: run.step() >= step + 3)
    run.until("one of its name", lambda: actor == "launcher" or len(run.pids(actor)) == 1, seconds=60)
    run.drain()
    judge(run, steps=run.saved())
