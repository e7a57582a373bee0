"""The client against servers that follow a script: every way of chunking that was seen, and every way of breaking off."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from actors.generation.engine import (
    AnswerBroken,
    AnswerRefused,
    Chunk,
    EngineUnavailable,
    Finish,
    GenerateRequest,
    RequestRefused,
)
from actors.generation.engines.sglang.client import SGLangClient

PAIRS = [[-0.5, 11, None], [-1.5, 12, None], [-3.5, 13, None], [-2.5, 14, None]]
REQUEST = GenerateRequest(
    rid="g7/3",
    input_ids=[1, 2],
    max_new_tokens=4,
    stop_token_ids=(9,),
    sampling_seed=6,
    routing_key="g7",
    extra_key="v2",
    vocabulary=64,
)


def event(n: int, pairs: list[Any], version: str = "1", finish: dict[str, Any] | None = None) -> bytes:
    meta = {"id": "x", "completion_tokens": n, "weight_version": version, "finish_reason": finish}
    body = {"output_ids": [t for _, t, _ in pairs], "meta_info": {**meta, "output_token_logprobs": pairs}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


LENGTH = {"type": "length", "length": 4}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[..., Awaitable[SGLangClient]]]:
    """serve(script, status) -> a client of a server that answers /generate with the script, byte string by byte string."""
    runners: list[web.AppRunner] = []
    clients: list[SGLangClient] = []

    async def serve(script: list[bytes], status: int = 200, seen: list[web.Request | bytes] | None = None) -> SGLangClient:
        async def generate(http: web.Request) -> web.StreamResponse:
            if seen is not None:
                seen.extend([http, await http.read()])
            response = web.StreamResponse(status=status)
            await response.prepare(http)
            for part in script:
                await response.write(part)
            return response

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = SGLangClient(f"http://127.0.0.1:{port}/", request_deadline_s=10, token_deadline_s=5, control_deadline_s=5)
        clients.append(client)
        return client

    yield serve
    for client in clients:
        await client.close()
    for runner in runners:
        await runner.cleanup()


@asynccontextmanager
async def served(**handlers: Any) -> AsyncIterator[str]:
    """Address of a server that answers to these names: POST, or GET after "get_"."""
    app = web.Application()
    for name, handler in handlers.items():
        method, path = ("GET", name[4:]) if name.startswith("get_") else ("POST", name)
        app.router.add_route(method, f"/{path}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_an_engine_is_given_up_while_other_requests_run_out_of_time_too() -> None:
    """All requests to a stuck engine reach their token deadline together, and the first of them has it given up."""
    arrived: list[str] = []

    async def generate(http: web.Request) -> web.StreamResponse:
        arrived.append(http.path)
        await asyncio.sleep(60)
        return web.Response()

    async with served(generate=generate) as url:
        client = SGLangClient(url, request_deadline_s=30, token_deadline_s=0.5, control_deadline_s=5)

        async def ask() -> str:
            try:
                await chunks_of(client)
            except EngineUnavailable as error:
                await client.close()
                return str(error)
            return ""

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        while len(arrived) < 4:  # noqa: ASYNC110 - they are on their way
            await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - all deadlines have passed before the loop looks again
        assert all("0 tokens" in text for text in await asyncio.gather(*asking))


async def test_what_is_under_way_ends_when_the_engine_is_given_up() -> None:
    """A chunk is waited for, another request waits for its answer to begin, and so does a pause."""
    here, on = asyncio.Event(), asyncio.Event()
    arrived: list[str] = []

    async def generate(http: web.Request) -> web.StreamResponse:
        arrived.append(http.path)
        response = web.StreamResponse()
        if not here.is_set():
            await response.prepare(http)
            await response.write(event(2, PAIRS[:2]))
        here.set()
        await on.wait()
        return response

    async def pause(http: web.Request) -> web.Response:
        arrived.append(http.path)
        await on.wait()
        return web.json_response({})

    async with served(generate=generate, pause_generation=pause) as url:
        client = SGLangClient(url, request_deadline_s=30, token_deadline_s=30, control_deadline_s=30)
        stream = client.generate(REQUEST)
        assert [*(await anext(stream)).token_ids] == [11, 12]
        waits = [asyncio.create_task(chunks_of(client)), asyncio.ensure_future(anext(stream))]
        pausing = asyncio.create_task(client.pause("retract"))
        while len(arrived) < 3:  # noqa: ASYNC110 - they are on their way
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await client.close()
            for error, seen in zip(await asyncio.gather(*waits, return_exceptions=True), (0, 2), strict=True):
                assert isinstance(error, EngineUnavailable) and f"had {seen} tokens" in str(error)
            with pytest.raises(EngineUnavailable, match="/pause_generation was given up"):
                await pausing
        for call in (chunks_of(client), client.resume()):
            with pytest.raises(EngineUnavailable, match="given up"):
                await call
        on.set()


async def chunks_of(client: SGLangClient) -> list[Chunk]:
    return [chunk async for chunk in client.generate(REQUEST)]


def made(tokens: list[int], logprobs: list[float], version: str, finish: Finish | None = None) -> Chunk:
    return Chunk(array("i", tokens), array("f", logprobs), version, finish)


WHOLE = [made([11], [-0.5], "1"), made([12], [-1.5], "1"), made([13, 14], [-3.5, -2.5], "2", "length")]


async def test_cumulative_chunks_become_new_tokens(scripted: Callable[..., Awaitable[SGLangClient]]) -> None:
    script = [event(1, PAIRS[:1]), event(2, PAIRS[:2]), event(4, PAIRS, "2", LENGTH), DONE]
    assert await chunks_of(await scripted(script)) == WHOLE


async def test_incremental_chunks_become_the_same(scripted: Callable[..., Awaitable[SGLangClient]]) -> None:
    script = [event(1, PAIRS[:1]), event(2, PAIRS[1:2]), event(4, PAIRS[2:], "2", LENGTH), DONE]
    assert await chunks_of(await scripted(script)) == WHOLE


async def test_chunks_that_repeat_or_arrive_in_pieces_change_nothing(
    scripted: Callable[..., Awaitable[SGLangClient]],
) -> None:
    whole = event(1, PAIRS[:1]) * 2 + event(2, PAIRS[:2]) + event(4, PAIRS, "2", LENGTH) + DONE
    assert await chunks_of(await scripted([whole[i : i + 7] for i in range(0, len(whole), 7)])) == WHOLE


async def test_an_abort_in_the_queue_that_repeats_old_tokens_adds_none(
    scripted: Callable[..., Awaitable[SGLangClient]],
) -> None:
    # SGLang answers the abort of a retracted request with its last token again.
    last = event(2, PAIRS[:2], "2", {"type": "abort", "message": "Abort in waiting queue"})
    chunks = await chunks_of(await scripted([event(2, PAIRS[:2]), last, DONE]))
    assert chunks == [made([11, 12], [-0.5, -1.5], "1"), Chunk([], [], "2", "abort")]


async def test_the_request_is_sent_as_sglang_reads_it(scripted: Callable[..., Awaitable[SGLangClient]]) -> None:
    seen: list[Any] = []
    await chunks_of(await scripted([event(4, PAIRS, "2", LENGTH), DONE], seen=seen))
    body = json.loads(seen[1])
    assert body.pop("rid").endswith("-g7/3")
    assert body == {
        "input_ids": [1, 2],
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 4,
            "ignore_eos": False,
            "stop_token_ids": [9],
            "sampling_seed": 6,
        },
        "return_logprob": True,
        "stream": True,
        "extra_key": "v2",
    }
    assert seen[0].headers["X-SMG-Routing-Key"] == "g7"


BROKEN: list[tuple[str, list[bytes], int, type[Exception], str]] = [
    ("ends early", [event(2, PAIRS[:2])], 200, EngineUnavailable, r"after 2 tokens without a finish reason"),
    ("done without finish", [event(2, PAIRS[:2]), DONE], 200, EngineUnavailable, r"without a finish reason"),
    ("tokens missing", [event(3, PAIRS[:1])], 200, AnswerBroken, r"lost 2 tokens"),
    ("not json", [b"data: <html>\n\n"], 200, AnswerBroken, r"not understood"),
    ("no UTF-8", [b'data: {"meta_info": {"weight_version": "\xff"}}\n\n'], 200, AnswerBroken, r"not understood"),
    ("error event", [b'data: {"error": {"message": "too long"}}\n\n', DONE], 200, RequestRefused, r"g7/3: too long"),
    ("refused", [b'{"error": {"message": "too\\nlong"}}'], 400, RequestRefused, r"HTTP 400\): too long"),
    ("server error", [b"oops"], 500, EngineUnavailable, r"HTTP 500\): oops"),
    ("no server behind the router", [b"no workers"], 503, EngineUnavailable, r"HTTP 503\): no workers"),
    (
        "engine failed in mid-request",
        [event(1, PAIRS[:1], finish={"type": "abort", "message": "died", "status_code": 500})],
        200,
        EngineUnavailable,
        r"HTTP 500\): died",
    ),
    (
        "engine refuses late",
        [event(0, [], finish={"type": "abort", "message": "bad", "status_code": 400})],
        200,
        RequestRefused,
        r"HTTP 400\): bad",
    ),
    ("more than asked", [event(5, [*PAIRS, PAIRS[0]])], 200, AnswerRefused, r"5 tokens for request g7/3, which asked for 4"),
    ("log-prob above 0", [event(1, [[7.5, 11, None]])], 200, AnswerRefused, r"log-probability 7\.5"),
    ("log-prob is none", [event(2, [PAIRS[0], [None, 12, None]])], 200, AnswerRefused, r"log-probability None"),
    ("log-prob is no float32", [event(1, [[-1e300, 11, None]])], 200, AnswerRefused, r"log-probability -1e\+300"),
    ("token below 0", [event(1, [[-0.5, -1, None]])], 200, AnswerRefused, r"token id -1 "),
    ("token outside the vocabulary", [event(1, [[-0.5, 99, None]])], 200, AnswerRefused, r"token id 99 .* of 64"),
    ("log-prob is NaN", [event(1, [[float("nan"), 11, None]])], 200, AnswerBroken, r"not understood"),
    ("unknown reason", [event(1, PAIRS[:1], finish={"type": "bored"})], 200, AnswerBroken, r"'bored'"),
]


@pytest.mark.parametrize(("script", "status", "error", "says"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
async def test_a_broken_answer_has_a_class_and_one_line(
    scripted: Callable[..., Awaitable[SGLangClient]],
    script: list[bytes],
    status: int,
    error: type[Exception],
    says: str,
) -> None:
    client = await scripted(script, status)
    with pytest.raises(error, match=says) as caught:
        await chunks_of(client)
    assert client.base_url in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    client = SGLangClient("http://127.0.0.1:9", request_deadline_s=5, token_deadline_s=5, control_deadline_s=5)
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9 broke off request g7/3"):
        await chunks_of(client)
    with pytest.raises(EngineUnavailable, match=r"/model_info cannot be reached"):
        await client.health()
    with pytest.raises(EngineUnavailable, match=r"/pause_generation cannot be reached"):
        await client.pause("retract")
    await client.close()


async def test_an_answer_that_is_no_engine_is_said_so(scripted: Callable[..., Awaitable[SGLangClient]]) -> None:
    client = await scripted([])
    with pytest.raises(RequestRefused, match=r"/pause_generation \(HTTP 404\)"):
        await client.pause("retract")
