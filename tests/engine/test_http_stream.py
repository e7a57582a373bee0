"""Streams as servers frame them, cut them, slow them down and break them, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from actors.generation.engine import Chunk, EngineUnavailable, RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from tests.engine.test_client import DONE, LENGTH, PAIRS, REQUEST, WHOLE, event

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
EVENTS = [event(1, PAIRS[:1]), event(2, PAIRS[:2]), event(4, PAIRS, "2", LENGTH), DONE]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def piece(data: bytes) -> bytes:
    return b"%X;name=value\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def answering(
    answer: Answer, *, token_s: float = 10.0, request_s: float = 10.0
) -> AsyncIterator[tuple[SGLangClient, list[str]]]:
    """A client of a server that answers each request so, and what the server saw: "open", "request", "end"."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append("open")
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(size)
                seen.append("request")
                await answer(writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            seen.append("end")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = SGLangClient(url, request_deadline_s=request_s, token_deadline_s=token_s, control_deadline_s=5)
    try:
        yield client, seen
    finally:
        await client.close()
        server.close()


def sends(data: bytes, *, cut: int = 0, hang_up: bool = False) -> Answer:
    """`data`, in parts of `cut` bytes that arrive one by one."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), cut or len(data)):
            writer.write(data[at : at + (cut or len(data))])
            await writer.drain()
            await asyncio.sleep(0)
        if hang_up:
            writer.close()

    return answer


async def chunks_of(client: SGLangClient) -> list[Chunk]:
    return [chunk async for chunk in client.generate(REQUEST)]


STREAM = b"".join(EVENTS)
FRAMED = {
    "a piece per event": (CHUNKED + b"".join(map(piece, EVENTS)) + END, False),
    "pieces across events": (CHUNKED + piece(STREAM[:50]) + piece(STREAM[50:777]) + piece(STREAM[777:]) + END, False),
    "trailers": (CHUNKED + piece(STREAM) + b"0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", False),
    "a known length": (HEAD + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM, False),
    "until the end": (HEAD + b"\r\n" + STREAM, True),
    "an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + piece(STREAM) + END, False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\n" + STREAM, True),
}


@pytest.mark.parametrize("cut", [0, 1, 5, 64])
@pytest.mark.parametrize("framed", FRAMED)
async def test_an_answer_is_whole_however_it_is_framed_and_cut(framed: str, cut: int) -> None:
    data, hang_up = FRAMED[framed]
    async with answering(sends(data, cut=cut, hang_up=hang_up)) as (client, seen):
        for _ in range(2):
            assert await chunks_of(client) == WHOLE
        assert seen.count("request") == 2


async def test_a_connection_serves_one_request_after_another() -> None:
    async with answering(sends(FRAMED["a piece per event"][0])) as (client, seen):
        for _ in range(3):
            assert await chunks_of(client) == WHOLE
        assert seen == ["open", "request", "request", "request"]


async def test_a_connection_that_the_server_will_close_is_not_used_again() -> None:
    closing = FRAMED["a piece per event"][0].replace(b"chunked\r\n", b"chunked\r\nConnection: close\r\n", 1)
    async with answering(sends(closing)) as (client, seen):
        for _ in range(2):
            assert await chunks_of(client) == WHOLE
        assert seen.count("open") == 2


async def test_a_request_that_is_given_up_closes_its_connection() -> None:
    """An engine aborts a request whose connection ends."""
    ended = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + piece(EVENTS[0]))
        while not writer.is_closing():
            writer.write(piece(b":\n\n"))
            await asyncio.sleep(0.02)
        ended.set()

    async with answering(answer) as (client, _):
        stream = client.generate(REQUEST)
        assert [*(await anext(stream)).token_ids] == [11]
        await stream.aclose()
        async with asyncio.timeout(5):
            await ended.wait()


@pytest.mark.parametrize("drop", [b":", b": ping\n\n", event(1, PAIRS[:1])], ids=["bytes", "comments", "old tokens"])
async def test_what_brings_no_token_does_not_move_the_token_deadline(drop: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + piece(EVENTS[0]))
        while not writer.is_closing():
            writer.write(piece(drop))
            await asyncio.sleep(0.05)

    async with answering(answer, token_s=0.4, request_s=15.0) as (client, _):
        with pytest.raises(EngineUnavailable, match=r"1 tokens, then its token deadline of 0\.4 s"):
            await chunks_of(client)


async def test_tokens_move_the_token_deadline_and_not_that_of_the_request() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for n in range(1, 5):
            writer.write(piece(event(n, PAIRS[:n])))
            await asyncio.sleep(0.25)
        await asyncio.sleep(30)

    async with answering(answer, token_s=0.8, request_s=1.4) as (client, _):
        with pytest.raises(EngineUnavailable, match=r"4 tokens, then its request deadline of 1\.4 s"):
            await chunks_of(client)


async def test_the_time_of_a_busy_caller_is_not_the_engines() -> None:
    """A caller that waits for the bus between two chunks finds the rest in place, long after the token deadline."""
    rest = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + piece(EVENTS[0]))
        await rest.wait()
        writer.write(b"".join(map(piece, EVENTS[1:])) + END)

    async with answering(answer, token_s=0.2) as (client, _):
        got: list[Chunk] = []
        async for chunk in client.generate(REQUEST):
            got.append(chunk)
            await asyncio.sleep(0.5)
            rest.set()
        assert got == WHOLE


async def test_a_caller_that_takes_nothing_holds_the_server_back() -> None:
    """64 MB that nobody takes stay with the server."""
    sent = 0
    padding = b": " + b"x" * (1 << 20) + b"\n\n"

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED + piece(EVENTS[0]))
        for _ in range(64):
            writer.write(piece(padding))
            await writer.drain()
            sent += 1
        writer.write(b"".join(map(piece, EVENTS[1:])) + END)

    async with answering(answer) as (client, _):
        stream = client.generate(REQUEST)
        got = [await anext(stream)]
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert sent < 40
        got += [chunk async for chunk in stream]
        assert (sent, got) == (64, WHOLE)


BROKEN = {
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", "not understood"),
    "a status that is none": (b"HTTP/1.1 OK\r\n\r\n", "not understood"),
    "a head without end": (HEAD + b"X-Long: " + b"x" * 20_000, "head of more than 16384 bytes"),
    "a length that is none": (CHUNKED + b"zz\r\n", "not understood"),
    "a negative length": (CHUNKED + b"-5\r\n", "not understood"),
    "it ends in mid-answer": (CHUNKED + piece(EVENTS[0])[:-20], "broke off request g7/3 after 0 tokens"),
}


@pytest.mark.parametrize(("data", "says"), BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_no_answer_is_said_so(data: bytes, says: str) -> None:
    async with answering(sends(data, hang_up=True)) as (client, _):
        with pytest.raises(EngineUnavailable, match=says):
            await chunks_of(client)


async def test_a_refusal_without_length_is_read_to_its_end() -> None:
    data = b"HTTP/1.1 400 Bad Request\r\n\r\n" + b'{"error": {"message": "too long"}}'
    async with answering(sends(data, cut=3, hang_up=True)) as (client, _):
        with pytest.raises(RequestRefused, match=r"HTTP 400\): too long"):
            await chunks_of(client)
