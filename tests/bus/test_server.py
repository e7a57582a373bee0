"""The embedded server and the start-up checks, on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from bus.client import connect
from bus.errors import BusRefused, BusUnreachable
from bus.server import EmbeddedRedis, find_server
from bus.server.binary import ServerBinary, packaged_binary, parse_version, probe
from bus.server.checks import check_server
from tests.bus.suite.conformance import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def short_dir():
    with TemporaryDirectory(prefix="ma-test-") as directory:
        yield Path(directory)


def binaries() -> list[Path]:
    packaged = packaged_binary()
    return [find_server().path, *([packaged] if packaged else [])]


async def put(url: str, key: str, value: str) -> None:
    async with connect(url) as client:
        await client.set(key, value)


async def get(url: str, key: str) -> bytes | None:
    async with connect(url) as client:
        return await client.get(key)


# -- finding a binary ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=e08d", (7, 0, 15)),
        ("Valkey server v=9.1.2 sha=00000000:1 malloc=libc bits=64 build=1536", (9, 1, 2)),
        ("Redis server v=5.0.14 sha=00000000:0 malloc=libc bits=64", (5, 0, 14)),
        ("bash: redis-server: not a server", None),
        ("", None),
    ],
)
def test_the_version_is_read_from_what_the_binary_says(text, version):
    assert parse_version(text) == version


def fake_server(directory: Path, name: str, says: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_an_old_binary_on_path_is_passed_over(tmp_path):
    old = fake_server(tmp_path, "redis-server", "Redis server v=6.0.16 sha=0")
    new = fake_server(tmp_path, "valkey-server", "Valkey server v=8.1.0 sha=0")
    assert find_server(search_path=str(tmp_path)) == ServerBinary(path=new, version=(8, 1, 0))
    refusal = probe(old)
    assert isinstance(refusal, str) and "6.0.16" in refusal and "older than 6.2" in refusal


def test_without_any_binary_the_packaged_one_is_used_or_one_line_says_what_to_install(tmp_path):
    packaged = packaged_binary()
    if packaged is not None:
        assert find_server(search_path=str(tmp_path)).path == packaged
        return
    with pytest.raises(BusRefused, match="apt install redis-server") as refusal:
        find_server(search_path=str(tmp_path))
    assert "\n" not in str(refusal.value)


# -- the embedded server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", binaries(), ids=lambda path: path.name)
async def test_it_starts_private_answers_and_stops(short_dir, binary):
    found = probe(binary)
    assert isinstance(found, ServerBinary)
    server = EmbeddedRedis(short_dir / "run", binary=found)
    await asyncio.to_thread(server.start)
    try:
        assert server.is_alive() and server.pid is not None
        assert stat.S_IMODE((short_dir / "run").stat().st_mode) == 0o700
        assert stat.S_IMODE((short_dir / "run" / "redis.sock").stat().st_mode) == 0o700
        async with connect(server.url) as client:
            facts, warnings = await check_server(client, url=server.url)
            settings = await client.config_get("port", "maxmemory-policy", "appendfsync", "save")
        assert facts.number == found.version and facts.aof and warnings == ()
        assert settings == {"port": "0", "maxmemory-policy": "noeviction", "appendfsync": "everysec", "save": ""}
        assert os.getsid(server.pid) == server.pid  # a Ctrl-C for the launcher's terminal does not reach it
    finally:
        await asyncio.to_thread(server.stop)
    assert not server.is_alive() and server.pid is None


async def test_data_survive_sigkill_and_restart(private_redis):
    await put(private_redis.url, "ma:{a}:key", "kept")
    # A server's first write: none is being synced, behind which it would be answered before it is written.
    first = private_redis.pid
    private_redis.kill()
    assert not private_redis.is_alive()
    private_redis.start()
    assert private_redis.pid != first
    assert await get(private_redis.url, "ma:{a}:key") == b"kept"


async def test_data_survive_an_ordered_stop(private_redis):
    await put(private_redis.url, "ma:{a}:key", "kept")
    private_redis.stop()
    private_redis.stop()  # a second time is nothing
    private_redis.start()
    assert await get(private_redis.url, "ma:{a}:key") == b"kept"


async def test_a_second_launcher_adopts_the_living_server_and_can_stop_it(private_redis):
    await put(private_redis.url, "ma:{a}:key", "kept")
    second = EmbeddedRedis(private_redis.directory)
    second.start()
    assert second.pid == private_redis.pid and second.is_alive()
    assert await get(second.url, "ma:{a}:key") == b"kept"
    second.stop()
    await eventually(lambda: not private_redis.is_alive(), "the server is gone")
    assert not second.is_alive()


def test_the_server_outlives_a_killed_launcher_and_is_adopted(short_dir):
    code = (
        "import os, signal, sys; from pathlib import Path; from bus.server import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    launcher = subprocess.run(
        [sys.executable, "-c", code, str(short_dir)], cwd=ROOT, capture_output=True, text=True, timeout=15, check=False
    )
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    heir = EmbeddedRedis(short_dir)
    heir.start()
    try:
        assert heir.pid == int(launcher.stdout)
    finally:
        heir.stop()
    assert not heir.is_alive()


def test_two_launchers_at_once_end_up_with_one_server(short_dir):
    code = (
        "import sys; from pathlib import Path; from bus.server import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid)"
    )
    launchers = [
        subprocess.Popen([sys.executable, "-c", code, str(short_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    pids = {launcher.communicate(timeout=15)[0].strip() for launcher in launchers}
    heir = EmbeddedRedis(short_dir)
    heir.start()
    try:
        assert pids == {str(heir.pid)}
    finally:
        heir.stop()


def test_a_stale_socket_and_pid_file_do_not_hinder_a_start(short_dir):
    server = EmbeddedRedis(short_dir)
    server.start()
    server.kill()
    assert (short_dir / "redis.sock").exists() and (short_dir / "redis" / "redis.pid").exists()
    (short_dir / "redis" / "redis.pid").write_text("1\n")  # by now the id of somebody else
    server.start()
    assert server.pid != 1
    server.stop()


async def test_a_directory_too_deep_for_a_socket_gets_a_short_one(short_dir):
    deep = short_dir.joinpath(*["a-rather-long-directory-name"] * 5, 'with "quotes", spaces and ü')
    server = EmbeddedRedis(deep)
    server.start()
    try:
        assert len(os.fsencode(server.socket_path)) <= 107
        assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        await put(server.url, "ma:{a}:key", "kept")
        adopted = EmbeddedRedis(deep)
        adopted.start()
        assert (adopted.pid, adopted.url) == (server.pid, server.url)
        server.kill()
        server.start()
        assert server.url == adopted.url
        assert await get(server.url, "ma:{a}:key") == b"kept"
    finally:
        server.stop()
    assert not (deep / "redis.sock").is_symlink()


async def test_a_path_with_odd_characters_works(short_dir):
    server = EmbeddedRedis(short_dir / 'a "b" %41 c?d#e ü')
    server.start()
    try:
        await put(server.url, "ma:{a}:key", "kept")
        assert await get(server.url, "ma:{a}:key") == b"kept"
    finally:
        server.stop()


async def test_a_server_whose_start_is_interrupted_is_not_left_behind(short_dir):
    opening = asyncio.create_task(EmbeddedRedis(short_dir).open())
    await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not EmbeddedRedis(short_dir).adopt() and not (short_dir / "redis.sock").exists()


def test_a_server_that_exits_is_reported_in_one_line_with_its_last_words(short_dir):
    base = short_dir / "redis" / "appendonlydir"
    base.mkdir(parents=True)
    (base / "appendonly.aof.manifest").write_text("this is no manifest\n")
    server = EmbeddedRedis(short_dir)
    with pytest.raises(BusRefused, match=r"exited with 1.*manifest.*redis\.log") as refusal:
        server.start()
    assert "\n" not in str(refusal.value)
    assert not server.is_alive()


def test_of_a_damaged_append_only_file_it_is_said_how_to_go_on(short_dir):
    """Its own advice is to mend the file; a run has its checkpoints."""
    server = EmbeddedRedis(short_dir)
    server.start()
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        client.set("a", "b" * 1000)
    server.stop()
    [file] = (short_dir / "redis" / "appendonlydir").glob("*.incr.aof")
    file.write_bytes(file.read_bytes().replace(b"\r\n$1000", b"\r\n!1000"))
    with pytest.raises(BusRefused, match=r"Move the folder redis of the run away") as refusal:
        server.start()
    assert "\n" not in str(refusal.value)
    (short_dir / "redis").rename(short_dir / "away")
    server.start()
    server.stop()


def test_a_server_may_read_a_long_file_for_as_long_as_it_gets_on(short_dir):
    """Ten commands a second, three deadlines long; one that does nothing is given up."""
    first = EmbeddedRedis(short_dir)
    first.start()
    with redis.Redis(unix_socket_path=str(first.socket_path)) as client:
        for number in range(40):
            client.set(f"key{number}", "x" * 1000)
    first.stop()
    slow = short_dir / "slow"
    flags = "--key-load-delay 100000 --loading-process-events-interval-bytes 1024"
    slow.write_text(f'#!/bin/sh\nexec {find_server().path} "$1" {flags}\n')
    slow.chmod(0o755)
    second = EmbeddedRedis(short_dir, binary=ServerBinary(slow, find_server().version))
    second.start(deadline_s=1.3)
    with redis.Redis(unix_socket_path=str(second.socket_path)) as client:
        assert client.dbsize() == 40
    second.stop()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(BusUnreachable, match="did not answer in time"):
        second.start(deadline_s=0.5)
    assert not second.is_alive()


def test_a_directory_that_cannot_be_made_is_refused(short_dir):
    (short_dir / "file").write_text("")
    with pytest.raises(BusRefused, match="Choose another folder"):
        EmbeddedRedis(short_dir / "file" / "run").start()
