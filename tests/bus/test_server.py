"""The embedded server and the start-up checks, on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from bus.errors import BusRefused, BusUnreachable
from bus.server import EmbeddedRedis, ServerBinary, check_server, connect, find_server, parse_version, without_secrets
from bus.server.binary import packaged_binary, probe
from bus.server.checks import judge
from bus.testing.conformance import eventually

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
            facts = await check_server(client, url=server.url)
            settings = await client.config_get("port", "maxmemory-policy", "appendfsync", "save")
        assert facts.version == found.version and facts.append_only and facts.warnings == ()
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


def test_a_server_that_exits_is_reported_in_one_line_with_its_last_words(short_dir):
    base = short_dir / "redis" / "appendonlydir"
    base.mkdir(parents=True)
    (base / "appendonly.aof.manifest").write_text("this is no manifest\n")
    server = EmbeddedRedis(short_dir)
    with pytest.raises(BusRefused, match=r"exited with 1.*manifest.*redis\.log") as refusal:
        server.start()
    assert "\n" not in str(refusal.value)
    assert not server.is_alive()


def test_a_directory_that_cannot_be_made_is_refused(short_dir):
    (short_dir / "file").write_text("")
    with pytest.raises(BusRefused, match="Choose another run directory"):
        EmbeddedRedis(short_dir / "file" / "run").start()


# -- connecting and checking -----------------------------------------------------------------------------------------


async def refusal_of(url: str, kind: type[Exception] | tuple[type[Exception], ...]) -> str:
    async with connect(url) as client:
        with pytest.raises(kind) as refusal:
            await check_server(client, url=url, deadline_s=5)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


async def test_a_fit_server_passes_and_keeps_no_trace_of_the_check(private_redis):
    async with connect(private_redis.url) as client:
        facts = await check_server(client, url=private_redis.url)
        assert await client.dbsize() == 0
    assert facts.version >= (6, 2, 0) and facts.append_only and facts.max_memory_bytes == 0


async def test_the_client_repeats_nothing_whatever_the_url_says(redis_url):
    async with connect(redis_url + "?socket_timeout=5&decode_responses=true") as client:
        assert await client.echo("x") == b"x"
        options = client.connection_pool.connection_kwargs
        assert options["socket_timeout"] is None and options["protocol"] == 2
        assert options["retry"].get_retries() == 0


async def test_another_eviction_policy_is_refused_with_the_remedy(private_redis):
    async with connect(private_redis.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
    text = await refusal_of(private_redis.url, BusRefused)
    assert "allkeys-lru" in text and "CONFIG SET maxmemory-policy noeviction" in text


async def test_a_server_without_append_only_file_draws_a_warning(private_redis):
    async with connect(private_redis.url) as client:
        await client.config_set("appendonly", "no")
        facts = await check_server(client, url=private_redis.url)
    assert not facts.append_only and any("appendonly yes" in warning for warning in facts.warnings)


async def test_a_full_server_is_let_through_with_a_warning_because_it_can_drain(private_redis):
    async with connect(private_redis.url) as client:
        await client.set("ma:{a}:fill", b"x" * 1_000_000)
        await client.config_set("maxmemory", "500kb")
        facts = await check_server(client, url=private_redis.url)
    assert any("maxmemory" in warning for warning in facts.warnings)


async def test_a_replica_is_refused(private_redis, short_dir):
    async with connect(private_redis.url) as client:
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert "primary" in await refusal_of(private_redis.url, BusRefused)


async def test_a_password_is_asked_for_and_never_shown(private_redis):
    async with connect(private_redis.url) as client:
        await client.config_set("requirepass", "open-sesame")
    assert "refused the login" in await refusal_of(private_redis.url, BusRefused)
    wrong = private_redis.url.replace("unix://", "unix://user:hush@", 1)
    text = await refusal_of(wrong, BusRefused)
    assert "refused the login" in text and "hush" not in text
    right = private_redis.url.replace("unix://", "unix://:open-sesame@", 1)
    async with connect(right) as client:
        assert (await check_server(client, url=right)).append_only
        await client.config_set("requirepass", "")


async def test_nobody_listening_is_said_in_one_line(short_dir):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        assert "refused" in await refusal_of(url, BusUnreachable)
    text = await refusal_of(f"unix://{short_dir}/none.sock", BusUnreachable)
    assert "No such file" in text and "none.sock" in text


async def test_a_server_that_never_answers_is_given_up_at_the_deadline():
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as silent:
        url = f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with connect(url) as client:
            with pytest.raises(BusUnreachable, match=r"no answer within 0\.2 s"):
                await check_server(client, url=url, deadline_s=0.2)


async def test_something_that_is_no_redis_is_refused():
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        text = await refusal_of(url, (BusRefused, BusUnreachable))
    assert url in text


@pytest.mark.parametrize("url", ["http://host:1", "host:6379", "", "unix://", "redis://host:port/0"])
def test_a_url_that_cannot_be_used_is_refused_before_anything_is_dialled(url):
    with pytest.raises(BusRefused) as refusal:
        connect(url)
    assert "\n" not in str(refusal.value) and refusal.match(r"(Write|Correct) ")


def test_urls_lose_their_secrets_in_messages():
    assert without_secrets("redis://me:secret@host:1/0?password=x") == "redis://***@host:1/0"
    assert without_secrets("redis://:a/b@c@host/0") == "redis://***@host/0"
    assert without_secrets("unix:///run/a@b.sock?password=x") == "unix:///run/a@b.sock"
    assert without_secrets("unix:///run/redis.sock") == "unix:///run/redis.sock"


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"redis_version": "6.0.16"}, "redis 6.0.16: 6.2 or newer"),
        ({"redis_version": "7.0.15", "role": "slave"}, "primary"),
        ({"redis_version": "7.0.15", "role": "master", "maxmemory_policy": "volatile-ttl"}, "volatile-ttl"),
    ],
)
def test_an_unfit_server_is_judged_so(info, says):
    with pytest.raises(BusRefused, match=says):
        judge(info, url="redis://host/0")


def test_valkey_is_judged_by_its_own_version():
    facts = judge({"redis_version": "7.2.4", "valkey_version": "9.1.2", "aof_enabled": 1}, url="redis://host/0")
    assert (facts.software, facts.version) == ("valkey", (9, 1, 2))


async def test_two_tests_on_one_server_have_names_of_their_own(raw_redis: Redis, run_name):
    key = f"ma:{{{run_name}}}:probe-{uuid4().hex}"
    assert await raw_redis.exists(key) == 0
    await raw_redis.set(key, 1)
