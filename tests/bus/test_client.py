"""How a client reaches a server, where its password comes from, and which servers a run refuses; on real servers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from bus import Bus, BusConfig, Out, Reader, Tail
from bus.client import PASSWORD, PASSWORD_FILE, connect, without_secrets
from bus.errors import BusRefused, BusUnreachable
from bus.server.checks import ServerFacts, check_server, judge
from bus.topology import EVENTS, PROMPTS
from tests.bus.suite.messages import a_task


@pytest.fixture
def short_dir():
    with TemporaryDirectory(prefix="ma-test-") as directory:
        yield Path(directory)


async def refusal_of(url: str, kind: type[Exception] | tuple[type[Exception], ...]) -> str:
    async with connect(url) as client:
        with pytest.raises(kind) as refusal:
            await check_server(client, url=url, deadline_s=5)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


async def test_a_fit_server_passes_and_keeps_no_trace_of_the_check(private_redis):
    async with connect(private_redis.url) as client:
        facts, _ = await check_server(client, url=private_redis.url)
        assert await client.dbsize() == 0
    assert facts.number >= (6, 2, 0) and facts.aof and facts.max_memory == 0


async def test_the_client_repeats_nothing_whatever_the_url_says(redis_url):
    async with connect(redis_url + "?socket_timeout=5&decode_responses=true") as client:
        assert await client.echo("x") == b"x"
        options = client.connection_pool.connection_kwargs
        assert options["socket_timeout"] is None and options["protocol"] == 2
        assert options["retry"].get_retries() == 0


@pytest.mark.parametrize(
    "query", ["decode_responses=True", "socket_timeout=1", "protocol=3", "encoding=ascii&retry_on_timeout=True"]
)
async def test_no_option_of_a_url_undoes_what_actors_rely_on(redis_url, run_name, query):
    async with Bus(BusConfig(url=f"{redis_url}?{query}", run=run_name)) as bus:
        await bus.append([Out(PROMPTS, a_task(0))])
        assert await bus.next_number("n") == 1 and await bus.hash_of(bus.keys.state) == {"n": b"1"}
        reader, tail = Reader(bus, [PROMPTS], "generation", "a"), Tail(bus, [EVENTS])
        await reader.open()
        assert [e.fields["id"] for e in await reader.read(4, 0.1)] == ["g0000001/0"]
        await tail.open()
        assert await tail.read(1.2) == [], "a blocking read comes back when its time is over, not the URL's"
        await tail.close()
        await reader.close()


async def test_the_password_is_found_in_the_environment_or_in_a_private_file(private_redis, monkeypatch, tmp_path):
    async with connect(private_redis.url) as client:
        await client.config_set("requirepass", "open?se/same")
    bare = private_redis.url.replace("unix://", "unix://default@", 1)
    monkeypatch.setenv(PASSWORD, "open?se/same")
    async with connect(bare) as client:
        assert await client.ping()
    monkeypatch.setenv(PASSWORD, "")
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text("open?se/same\n")
    monkeypatch.setenv(PASSWORD_FILE, str(file))
    async with connect(bare) as client:
        assert await client.ping()
        await client.config_set("requirepass", "")
    file.chmod(0o644)
    with pytest.raises(BusRefused, match="chmod 600"):
        connect(bare)
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "none"))
    with pytest.raises(BusRefused, match="cannot be read"):
        connect(bare)
    async with connect(private_redis.url) as client:  # a run's own server has no password, whatever the user exported
        assert await client.ping()


async def test_another_eviction_policy_is_refused_with_the_remedy(private_redis):
    async with connect(private_redis.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
    text = await refusal_of(private_redis.url, BusRefused)
    assert "allkeys-lru" in text and "CONFIG SET maxmemory-policy noeviction" in text


async def test_a_server_without_append_only_file_draws_a_warning(private_redis):
    async with connect(private_redis.url) as client:
        await client.config_set("appendonly", "no")
        facts, warnings = await check_server(client, url=private_redis.url)
    assert not facts.aof and any("appendonly yes" in warning for warning in warnings)


async def test_a_full_server_is_let_through_with_a_warning_because_it_can_drain(private_redis):
    async with connect(private_redis.url) as client:
        await client.set("ma:{a}:fill", b"x" * 1_000_000)
        await client.config_set("maxmemory", "500kb")
        _, warnings = await check_server(client, url=private_redis.url)
    assert any("maxmemory" in warning for warning in warnings)


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
        assert (await check_server(client, url=right))[0].aof
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
    assert without_secrets("redis://:a?b@host/0") == "redis://***@host/0"
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
        list(judge(ServerFacts.of(info), "redis://host/0"))


def test_valkey_is_judged_by_its_own_version():
    facts = ServerFacts.of({"redis_version": "7.2.4", "valkey_version": "9.1.2", "aof_enabled": 1})
    assert (facts.software, facts.number) == ("valkey", (9, 1, 2)) and not list(judge(facts, "redis://host/0"))


async def test_two_tests_on_one_server_have_names_of_their_own(raw_redis: Redis, run_name):
    key = f"ma:{{{run_name}}}:probe-{uuid4().hex}"
    assert await raw_redis.exists(key) == 0
    await raw_redis.set(key, 1)
