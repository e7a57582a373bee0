"""What is wrong with the Redis behind a run is said first, and `status` says it where heartbeats do not arrive."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from bus import Bus
from bus.client import connect
from bus.server.binary import find_server
from bus.server.checks import ServerFacts
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import read_scene
from tests.miles_async.conftest import Run
from tests.miles_async.console_data import Story, config, vitals
from tests.miles_async.test_doctor_causes import first


@contextmanager
def server_of(folder: Path, *flags: str) -> Iterator[str]:
    """A redis-server of one test's own, by its socket."""
    with tempfile.TemporaryDirectory(prefix="ma-") as near:  # a socket's path must be short
        url = f"unix://{near}/redis.sock"
        words = [str(find_server().path), "--port", "0", "--unixsocket", f"{near}/redis.sock", "--dir", str(folder), *flags]
        process = subprocess.Popen([*words, "--appendonly", "yes", "--maxmemory-policy", "noeviction"], stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 20
            while not Path(near, "redis.sock").exists():
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.01)
            yield url
        finally:
            process.kill()
            process.wait()


async def fill(bus: Bus) -> None:
    """As much memory as is there."""
    used = ServerFacts.of(await bus.server_info()).used_memory
    await bus.link.run("CONFIG", "SET", "maxmemory", used + 400_000)
    somebody = connect(bus.config.url)
    with pytest.raises(ResponseError):
        for n in range(100):
            await somebody.set(f"other:{n}", "x" * 20_000)
    await somebody.aclose()


async def lose_disk(bus: Bus) -> None:
    """Its folder goes away while it writes a snapshot."""
    await bus.link.run("CONFIG", "SET", "appendonly", "no")
    _, folder = await bus.link.run("CONFIG", "GET", "dir")
    await bus.link.run("CONFIG", "SET", "save", "1 1")
    shutil.rmtree(folder)
    await bus.link.run("BGSAVE")
    async with asyncio.timeout(20):
        while ServerFacts.of(await bus.server_info()).snapshot_ok:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def setting(*words: str) -> Callable[[Bus], Awaitable[None]]:
    async def do(bus: Bus) -> None:
        await bus.link.run(*words)

    return do


@pytest.mark.parametrize(
    ("harm", "rule", "said"),
    [
        (fill, "memory", "at the limit writers wait"),
        (setting("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"), "eviction", "allkeys-lru"),
        (setting("CONFIG", "SET", "appendonly", "no"), "persistence", "no append-only file"),
        (setting("REPLICAOF", "127.0.0.1", "1"), "role", "takes no writes"),
        (lose_disk, "snapshot", "cannot write its snapshot and refuses writes"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
async def test_what_is_wrong_with_a_server_is_said_first(tmp_path, run_name, harm, rule, said):
    (tmp_path / "data").mkdir()
    with server_of(tmp_path / "data") as url:
        async with Bus(config(url, run_name)) as bus:
            await Story(bus).whole()
            assert not [f for f in diagnose(await read_scene(bus)) if f.level != "info"]
            await harm(bus)
            found = await first(bus)
    assert (found.rule, said in found.text) == (rule, True), found


def test_status_says_why_heartbeats_do_not_arrive(tmp_path, run_name, capsys):
    (tmp_path / "data").mkdir()
    with server_of(tmp_path / "data") as url:
        run = Run(url, run_name, tmp_path, capsys)
        run.tell(Story.whole)

        async def lost(story: Story) -> None:
            await lose_disk(story.bus)

        async def silent(story: Story) -> None:
            await story.alive(vitals("reward", wall=time.time() - 100))

        run.tell(silent)
        why = "Redis cannot write its snapshot and refuses writes"
        assert why not in run.ask("status")[1]
        run.tell(lost)
        [said] = [line for line in run.ask("status")[1].splitlines() if why in line]
    assert said.endswith("for heartbeats may not arrive")
