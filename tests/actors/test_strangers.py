"""Callers without a key cost those that have one nothing: at the endpoint, the embedded engine, the console and the weights."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest
import uvloop
from aiohttp import ClientSession, web

from actors.generation.endpoint.server import Endpoint
from actors.generation.rollouts import single
from actors.generation.rollouts.function import RolloutFunction
from actors.runtime import depot as depot_module
from actors.runtime.chat import Chat
from actors.runtime.context import Context
from actors.runtime.fetch import pack_parcel
from actors.runtime.listener import AT_ONCE_BYTES, MOST, Listener, http_log
from bus.clock import SystemClock
from scripts.bench.chat_tokenizer import make_chat
from tests.actors.agent_house import ScriptedSession, task
from tests.actors.parcels import Serve, fetching, same

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
ASK = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("chat"))


async def begun(port: int, said: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came until the server ended the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""


async def test_a_crowd_that_shows_no_key_takes_no_call_of_an_agent_away(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """253 of them, half with half a request, took all 256 files that a worker could open."""
    monkeypatch.setattr(Listener.__init__, "__kwdefaults__", {**(Listener.__init__.__kwdefaults__ or {}), "grace_s": 0.0})
    counts: Counter[str] = Counter()
    session = ScriptedSession(chat, task(), lambda _: "ok")
    async with Endpoint(chat, "hermes", lambda name, by=1: counts.update({name: by})) as endpoint:
        port = int(urlsplit(endpoint.url).port or 0)
        async with endpoint.episode(session.task, session) as (_, key), ClientSession() as client:
            crowd = [await begun(port, HALF if number % 2 else b"") for number in range(3 * MOST)]
            own = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{endpoint.url}/chat/completions", json=ASK, headers=own) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == "ok"
            assert [await ended(reader) for reader, _ in crowd[: 2 * MOST]] == [b""] * 2 * MOST
            assert counts["callers_without_key"] >= 2 * MOST
            for _, writer in crowd:
                writer.close()


@asynccontextmanager
async def listening(
    *, most: int = 4, within_s: float = 0.2, grace_s: float = 0.0
) -> AsyncIterator[tuple[int, list[str], asyncio.Event]]:
    """A server that admits who shows `key`, and answers `/slow` once the event is set."""
    said: list[str] = []
    go = asyncio.Event()

    @web.middleware
    async def admit(request: web.Request, handler: object) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer key":
            return web.Response(status=401)
        listener.admit(request)
        return await handler(request)  # type: ignore[operator, no-any-return]

    async def slow(_request: web.Request) -> web.Response:
        said.append("called")
        await go.wait()
        return web.Response(text="done")

    app = web.Application(middlewares=[admit])
    app.router.add_get("/slow", slow)
    runner = web.AppRunner(app, access_log=None, logger=http_log())
    await runner.setup()
    listener = Listener(runner, most=most, within_s=within_s, grace_s=grace_s, ended=lambda: said.append("ended"))
    try:
        yield await listener.open("127.0.0.1", 0), said, go
    finally:
        await listener.close()
        await runner.cleanup()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_what_was_sent_while_the_loop_stood_is_read_before_anybody_is_ended(run: Callable[..., None]) -> None:
    run(_stood())


async def _stood() -> None:
    """One connection may stand without a key, and ten with it have come before the loop looks."""
    async with listening(most=1, within_s=1000.0) as (port, said, go):
        go.set()
        callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]  # nothing of the loop runs meanwhile
        for caller in callers:
            caller.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n")
            caller.setblocking(False)
        for caller in callers:
            assert b"200 OK" in await asyncio.wait_for(asyncio.get_running_loop().sock_recv(caller, 4096), 20)
            caller.close()
        assert said == ["called"] * 10


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_who_has_shown_the_key_stays_however_many_come_and_however_long_it_takes(run: Callable[..., None]) -> None:
    run(_stays())


async def _stays() -> None:
    async with listening() as (port, said, go):
        reader, writer = await begun(port, b"GET /slow HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n")
        crowd = [await begun(port) for _ in range(10)]
        assert [await ended(stranger) for stranger, _ in crowd] == [b""] * 10  # six for the others, four for their time
        assert said == ["called"] + ["ended"] * 10
        go.set()
        assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n")  # on the same connection
        assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        for _, other in [*crowd, (reader, writer)]:
            other.close()


async def test_the_oldest_makes_room_for_the_newest() -> None:
    async with listening(within_s=1000.0) as (port, said, _):
        crowd = [await begun(port) for _ in range(5)]
        assert await ended(crowd[0][0]) == b"" and said == ["ended"]
        crowd[0][1].close()
        for reader, writer in crowd[1:]:
            writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"401" in await reader.readline()
            writer.close()


async def test_hundreds_that_have_the_key_may_come_at_once() -> None:
    """The oldest of a burst were closed before their headers were read."""
    async with listening(within_s=1000.0, grace_s=1000.0) as (port, said, go):
        burst = await asyncio.gather(*(begun(port) for _ in range(200)))
        go.set()
        for _, writer in burst:
            writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n")
        for reader, writer in burst:
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
            writer.close()
        assert said == ["called"] * 200


async def test_headers_that_drip_end_with_their_time_and_a_wrong_key_admits_nobody() -> None:
    async with listening() as (port, said, _):
        reader, writer = await begun(port, b"GET /slow HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n")
        assert b"401" in await reader.readline()
        assert b"401" not in await ended(reader)  # kept alive for nobody
        drip, out = await begun(port, b"GET /sl")
        dripped = 0
        while "ended" not in said[1:] and dripped < 1000:
            out.write(b"o")
            dripped += 1
            await asyncio.sleep(0.02)
        assert await ended(drip) == b"" and said == ["ended", "ended"]
        writer.close()
        out.close()


async def test_what_is_no_http_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (port, _, _):
        with caplog.at_level(logging.INFO):
            for odd in (b"GET / HTTP/1.1\r\nHost x\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA: \xff\0\r\n\r\n"):
                reader, writer = await begun(port, odd)
                assert b"400" in await ended(reader)
                writer.close()
    assert caplog.records and all(record.exc_info is None for record in caplog.records)
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_a_client_that_leaves_before_the_first_word_loses_no_answer(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    """20 of 20 were lost, each with a traceback of forty lines."""
    body = b'{"model": "policy", "stream": true, "messages": [{"role": "user", "content": "1"}]}'
    asked, left = asyncio.Event(), asyncio.Event()

    class Waiting(ScriptedSession):
        async def generate(self, *args: object, **more: object) -> object:  # type: ignore[override]
            asked.set()
            await left.wait()
            await asyncio.sleep(0.05)  # the server hears that the connection is gone
            return await super().generate(*args, **more)  # type: ignore[arg-type]

    session = Waiting(chat, task(), lambda _: "the answer")
    async with Endpoint(chat, "hermes", lambda name, by=1: None) as endpoint:
        async with endpoint.episode(session.task, session) as (episode, key):
            head = f"{HALF.decode()}Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
            _, writer = await begun(int(urlsplit(endpoint.url).port or 0), head.encode() + body)
            await asyncio.wait_for(asked.wait(), 20)
            writer.transport.abort()
            left.set()
            await asyncio.wait(set(episode.handlers), timeout=20)
            [found] = episode.dialogues.trajectories()
    assert found.response == "the answer"
    assert not [record for record in caplog.records if record.exc_info]


def test_a_crowd_without_the_token_takes_no_weights_away(
    version: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of them, each with a byte every few seconds, kept everybody from the weights."""
    monkeypatch.setattr(depot_module, "TOKEN_S", 1000.0)
    monkeypatch.setattr(depot_module, "GRACE_S", 0.0)
    monkeypatch.setattr(depot_module._Handler, "timeout", 1000.0)
    parcel, depot = pack_parcel(version), serve(version)
    port = int(urlsplit(depot.url).port or 0)
    with ExitStack() as crowd:
        for _ in range(depot_module.CONNECTIONS + 8):
            stranger = crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            stranger.sendall(b"GET /x HTTP/1.1\r\nX: ")
        fetch, _ = fetching(parcel, tmp_path / "here", depot.url, deadline_s=20.0)
        fetch.run()
        assert same(version, tmp_path / "here")


def test_a_request_for_weights_that_drips_ends_with_its_time(version: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depot_module, "TOKEN_S", 0.2)
    monkeypatch.setattr(depot_module._Handler, "timeout", 1000.0)
    depot = serve(version)
    with socket.create_connection(("127.0.0.1", int(urlsplit(depot.url).port or 0)), timeout=20) as stranger:
        stranger.sendall(b"GET /x HTTP/1.1\r\n")
        assert stranger.recv(1) == b""


class Recorder(asyncio.Protocol):
    """A server's own protocol, which only notes what it is handed."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.transport: asyncio.BaseTransport | None = None
        self.more = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(len(data))
        self.more.set()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_what_a_caller_without_a_key_sends_is_read_a_little_at_a_time_and_then_as_it_comes(run: Callable[..., None]) -> None:
    """In 256 kB are thousands of requests: eight callers held the loop for 0.16 s at a time."""
    run(_little())


async def _little() -> None:
    made: list[Recorder] = []
    runner = SimpleNamespace(server=lambda: made.append(Recorder()) or made[-1])  # type: ignore[func-returns-value]
    listener = Listener(cast(web.AppRunner, runner), within_s=1000.0)
    port = await listener.open("127.0.0.1", 0)
    _, writer = await begun(port, b"x" * 100_000)
    async with asyncio.timeout(20):
        while not made or sum(made[0].pieces) < 100_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server = made[0]
        assert max(server.pieces) <= AT_ONCE_BYTES
        listener.admit(cast(web.Request, SimpleNamespace(transport=server.transport)))
        server.more.clear()
        writer.write(b"y" * 60_000)
        await server.more.wait()
        while sum(server.pieces) < 160_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert max(server.pieces) > AT_ONCE_BYTES, "who has shown a key is served as fast as can be"
    writer.close()
    await listener.close()


async def test_of_requests_sent_at_once_without_a_key_at_most_one_is_answered(chat: Chat) -> None:
    async with Endpoint(chat, "hermes", lambda name, by=1: None) as endpoint:
        reader, writer = await begun(int(urlsplit(endpoint.url).port or 0), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        assert (await ended(reader)).count(b"HTTP/1.1 401") <= 1, "none is heard where the rest was still on its way"
        writer.close()
        body = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + b"x" * 60_000
        reader, writer = await begun(int(urlsplit(endpoint.url).port or 0), body)
        assert b"no episode has this key" in await ended(reader), "who has another key is told so"
        writer.close()


async def test_a_key_that_is_no_text_is_another_key() -> None:
    """It was a TypeError, and forty lines of a log, at the door of a rollout function."""
    quiet = SimpleNamespace(clock=SystemClock(), count=lambda *_: None)
    function = RolloutFunction(
        cast(Context, quiet), "x.y", beside=single.rollout, values=dict, decode=lambda ids: str(ids), deadline_s=1.0
    )
    function._key = "key"
    for word in ("Bearer \udcff", "Bearer \u00e9", "", "Bearer"):
        request = cast(web.Request, SimpleNamespace(headers={"Authorization": word}))
        assert (await function.serve(request)).status == 401
