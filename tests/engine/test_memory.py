"""Conformance: memory given back between two phases of work, and taken again.

A real server takes part when it runs with --enable-memory-saver (and --enable-weights-cpu-backup for its weights).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.generation.engine import GenerateRequest, RequestRefused
from actors.generation.engines.embedded.batch import Batch
from actors.generation.engines.embedded.config import read_config
from actors.generation.engines.embedded.memory import KV_CACHE, WEIGHTS, Occupation
from actors.generation.engines.embedded.model import Decoder
from actors.generation.engines.embedded.weights import load_weights
from actors.generation.engines.sglang.client import SGLangClient
from tests.engine.conftest import Http, Target
from tests.engine.models import make_model
from tests.engine.processes import until_async
from tests.engine.test_control import LONG, PROMPT, first_chunk, logprobs_of, long_request, rest, tokens_of

SAMPLING: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def saver(http: Http) -> None:
    _, info = await http.get("/server_info")
    if not info.get("enable_memory_saver") or not info.get("enable_weights_cpu_backup"):
        pytest.skip("the server runs without --enable-memory-saver --enable-weights-cpu-backup")


@pytest.mark.usefixtures("saver")
@pytest.mark.parametrize("tags", [[KV_CACHE], [WEIGHTS], [KV_CACHE, WEIGHTS], []], ids=lambda t: "+".join(t) or "all")
async def test_an_engine_answers_the_same_after_it_gave_memory_back(
    http: Http, client: SGLangClient, target: Target, tags: list[str]
) -> None:
    before = await http.generate(PROMPT, **SAMPLING)
    sums = await client.weights_checksum()
    await client.pause("abort")
    await client.release_memory(tags)
    waiting = asyncio.create_task(http.generate(PROMPT, **SAMPLING))
    if target.embedded:  # SGLang's asks for a token, and says 503 when none comes
        assert (await client.health()).weight_version == "default"
    assert not waiting.done()
    await client.resume_memory(tags)
    await client.resume()
    for answer in (await waiting, await http.generate(PROMPT, **SAMPLING)):
        assert answer["output_ids"] == before["output_ids"]
        assert answer["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    assert await client.weights_checksum() == sums


@pytest.mark.usefixtures("saver")
async def test_memory_is_kept_while_requests_are_at_work(client: SGLangClient, target: Target) -> None:
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.pause("in_place")  # SGLang waits some seconds for idleness, in which a GPU would end the request
    with pytest.raises(RequestRefused, match="requests at work and keeps its memory; pause it in abort mode"):
        await client.release_memory()
    await client.resume()
    chunks = await rest(stream, first)
    expected = target.oracle.logprobs(PROMPT, tokens_of(chunks))
    assert logprobs_of(chunks) == pytest.approx(expected, abs=target.logprob_tolerance) and len(expected) == LONG


@pytest.mark.usefixtures("saver")
async def test_a_request_that_was_cut_off_goes_on_after_the_memory_is_back(client: SGLangClient, target: Target) -> None:
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.pause("abort")
    begun = await rest(stream, first)
    assert begun[-1].finish == "abort" and 0 < len(tokens_of(begun)) < LONG
    await client.release_memory()
    again = GenerateRequest(rid="again", input_ids=PROMPT + tokens_of(begun), max_new_tokens=20, ignore_eos=True)
    late = client.generate(again)
    waiting = asyncio.create_task(first_chunk(late))
    await client.resume_memory()
    await client.resume()
    tokens = tokens_of(begun) + tokens_of(await rest(late, await waiting))
    got = target.oracle.logprobs(PROMPT, tokens)
    assert len(tokens) == len(tokens_of(begun)) + 20
    assert logprobs_of(begun) == pytest.approx(got[: len(tokens_of(begun))], abs=target.logprob_tolerance)


@pytest.mark.usefixtures("saver")
async def test_new_weights_come_between_the_return_of_weights_and_of_keys(http: Http, client: SGLangClient, target: Target) -> None:
    await client.pause("abort")
    await client.release_memory()
    if target.embedded:  # SGLang would write into memory that is not there
        with pytest.raises(RequestRefused, match="weights are released"):
            await client.update_weights_from_disk(str(target.other_dir), "2")
        with pytest.raises(RequestRefused, match="weights are released"):
            await client.weights_checksum()
        assert (await client.health()).weight_version == "default"
    await client.resume_memory([WEIGHTS])
    await client.update_weights_from_disk(str(target.other_dir), "2")
    await client.resume_memory(["cuda_graph", KV_CACHE])
    await client.resume()
    answer = await http.generate(PROMPT, **SAMPLING)
    got = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(target.other.logprobs(PROMPT, answer["output_ids"]), abs=target.logprob_tolerance)
    assert answer["meta_info"]["weight_version"] == "2"


async def test_what_is_not_understood_changes_nothing(http: Http, client: SGLangClient, target: Target) -> None:
    if not target.embedded:
        pytest.skip("SGLang's scheduler ends")
    await client.pause("in_place")
    cases = (
        ("/release_memory_occupation", {"tags": ["kv_cash"]}, "tag 'kv_cash' is unknown; use kv_cache, weights, cuda_graph"),
        ("/resume_memory_occupation", {"tags": ["weights"]}, "weights is not released"),
        ("/release_memory_occupation", {"tags": "weights"}, "body refused"),
    )
    for path, body, says in cases:
        status, answer = await http.post(path, body)
        assert status == 400 and says in answer["error"]["message"]
    asking = asyncio.create_task(http.generate(PROMPT, **SAMPLING))
    await until_async(lambda: _at_work(http), "the request waits")
    status, answer = await http.post("/release_memory_occupation", {})  # paused, but a request waits
    assert status == 400 and "(0 run, 1 wait)" in answer["error"]["message"]
    await client.resume()
    assert len((await asking)["output_ids"]) == 24
    await client.pause("abort")
    await client.release_memory([WEIGHTS])
    with pytest.raises(RequestRefused, match="weights is released already"):
        await client.release_memory([WEIGHTS])
    await client.resume_memory([WEIGHTS])
    await client.resume()


async def _at_work(http: Http) -> bool:
    return await http.running() == 1


def test_memory_is_really_given_back_and_every_bit_returns(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path, seed=1)
    decoder = Decoder(read_config(tmp_path))
    load_weights(decoder, tmp_path)
    batch = Batch(decoder, 8, 4096)
    batch.cache.reserve(8, 500, live=0)
    before = {name: slot.view.clone() for name, slot in decoder.slots.items()}
    occupation = Occupation(decoder, batch)
    occupation.release([])
    assert sum(slot.view.untyped_storage().nbytes() for slot in decoder.slots.values()) == 0
    assert batch.cache.data.nbytes <= 2 * 2 * 2 * 16 * 16 * 4
    occupation.resume([])
    assert all(torch.equal(before[name], slot.view) for name, slot in decoder.slots.items())
