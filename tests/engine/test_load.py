"""Many requests at once, clients that leave, and an engine with too little room."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from actors.generation.engine import GenerateRequest
from actors.generation.engines.sglang.client import SGLangClient
from tests.engine.conftest import CONTROL_DEADLINE_S, Http, Target, engine_process
from tests.engine.models import VOCAB
from tests.engine.processes import until_async


def requests(n: int, seed: int, longest: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    return [
        GenerateRequest(
            rid=f"{seed}/{i}",
            input_ids=[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 24))],
            max_new_tokens=rng.randint(1, longest),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([-1, -1, 8]),
            ignore_eos=True,
            sampling_seed=i,
        )
        for i in range(n)
    ]


async def run(client: SGLangClient, request: GenerateRequest) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async for chunk in client.generate(request):
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        finish = chunk.finish
    assert finish == "length"
    return tokens, logprobs


async def test_256_requests_at_once_each_get_their_own_answer(client: SGLangClient, target: Target) -> None:
    asked = requests(256, seed=1, longest=40)
    answers = await asyncio.gather(*(run(client, request) for request in asked))
    assert [len(tokens) for tokens, _ in answers] == [request.max_new_tokens for request in asked]
    for request, (tokens, logprobs) in list(zip(asked, answers, strict=True))[::8]:
        expected = target.oracle.logprobs(request.input_ids, tokens, request.temperature or 1.0)
        assert logprobs == pytest.approx(expected, abs=target.logprob_tolerance), request.rid


async def test_a_client_that_leaves_ends_its_request(http: Http, client: SGLangClient) -> None:
    body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    plain = asyncio.create_task(http.post("/generate", body))
    stream = client.generate(GenerateRequest(rid="left", input_ids=[2], max_new_tokens=4000, ignore_eos=True))
    await anext(stream)
    await until_async(lambda: _count(http, 2), "both run")
    plain.cancel()
    await stream.aclose()  # type: ignore[attr-defined]
    await until_async(lambda: _count(http, 0), "both are gone")


async def _count(http: Http, n: int) -> bool:
    return await http.running() == n


@pytest.fixture(scope="module")
def cramped(booted: Target) -> Iterator[str]:
    """Six rows, too few tokens for six long ones, a chunk per token, and chunks that hold only what is new."""
    if not booted.embedded:
        pytest.skip("flags of the embedded engine")
    flags = ["--max-running-requests", "6", "--max-total-tokens", "300", "--stream-interval", "1"]
    with engine_process(booted.model_dir, *flags, "--incremental-streaming-output") as (url, _):
        yield url


def client_of(url: str) -> SGLangClient:
    return SGLangClient(url, request_deadline_s=60, token_deadline_s=30, control_deadline_s=CONTROL_DEADLINE_S)


async def test_too_little_room_costs_time_but_no_token(cramped: str, booted: Target) -> None:
    client = client_of(cramped)
    asked = requests(40, seed=2, longest=120)
    answers = await asyncio.gather(*(run(client, request) for request in asked))
    await client.close()
    assert [len(tokens) for tokens, _ in answers] == [request.max_new_tokens for request in asked]
    for request, (tokens, logprobs) in zip(asked, answers, strict=True):
        expected = booted.oracle.logprobs(request.input_ids, tokens, request.temperature or 1.0)
        assert logprobs == pytest.approx(expected, abs=1e-4), request.rid


async def test_chunking_does_not_change_what_the_client_sees(cramped: str, client: SGLangClient) -> None:
    other = client_of(cramped)
    request = GenerateRequest(rid="x", input_ids=[9, 8, 7], max_new_tokens=90, ignore_eos=True, sampling_seed=8)
    ours, theirs = await run(client, request), await run(other, request)
    await other.close()
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], abs=1e-5)
