"""Conformance: abort, pause, weight updates, versions and flushing, with requests at work."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.generation.engine import Chunk, EngineUnavailable, GenerateRequest, PauseMode, RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from tests.engine.conftest import CONTROL_DEADLINE_S, SERVED, Http, Target
from tests.engine.processes import until_async

# Of one family: what is done with requests at work is the scheduler's, and knows nothing of the model.
pytestmark = pytest.mark.parametrize("booted", SERVED[:1], indirect=True, scope="session")
PROMPT = [7, 12, 40, 3]
LONG = 1200
"""Tokens of a request that outlives a few control calls by far."""


def long_request(rid: str = "long", n: int = LONG) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=PROMPT, max_new_tokens=n, ignore_eos=True, sampling_seed=3)


async def rest(chunks: AsyncIterator[Chunk], first: Chunk) -> list[Chunk]:
    return [first, *[chunk async for chunk in chunks]]


async def first_chunk(chunks: AsyncIterator[Chunk]) -> Chunk:
    return await anext(chunks)


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_of(chunks: list[Chunk]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]


def by_version(chunks: list[Chunk]) -> list[tuple[str, int]]:
    """[(version, tokens)] in order, neighbours of one version joined."""
    pairs = [(chunk.weight_version, len(chunk.token_ids)) for chunk in chunks if chunk.token_ids]
    return [(version, sum(n for _, n in run)) for version, run in itertools.groupby(pairs, key=lambda pair: pair[0])]


async def test_abort_answers_with_the_partial(client: SGLangClient, target: Target) -> None:
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.abort("long")
    chunks = await rest(stream, first)
    assert chunks[-1].finish == "abort"
    assert 0 < len(tokens_of(chunks)) < LONG
    expected = target.oracle.logprobs(PROMPT, tokens_of(chunks))
    assert logprobs_of(chunks) == pytest.approx(expected, abs=target.logprob_tolerance)
    await client.abort("long")  # by now unknown: not an error
    await client.abort("never sent")


async def test_abort_of_one_leaves_the_others_alone(client: SGLangClient) -> None:
    lengths = {"a/1": 3000, "a/10": 300, "a/2": 300}
    streams = {rid: client.generate(long_request(rid, n)) for rid, n in lengths.items()}
    firsts = {rid: await anext(stream) for rid, stream in streams.items()}
    await client.abort("a/1")
    ends = {rid: (await rest(stream, firsts[rid]))[-1].finish for rid, stream in streams.items()}
    assert ends == {"a/1": "abort", "a/10": "length", "a/2": "length"}


async def test_a_plain_request_is_aborted_with_its_partial(http: Http, client: SGLangClient) -> None:
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"rid": "plain", "input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    stream = client.generate(long_request("beside", 3000))
    asking = asyncio.create_task(http.post("/generate", body))
    for _ in range(3):  # the other one makes progress, so this one does too
        await anext(stream)
    await http.post("/abort_request", {"rid": "plain"})
    status, answer = await asking
    await client.abort("beside")
    assert status == 200
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) < 3000


async def test_abort_all_ends_running_and_waiting_requests(http: Http, client: SGLangClient, target: Target) -> None:
    if not target.embedded:
        pytest.skip("SGLang holds requests back at its front while it is paused")
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.pause("in_place")
    waiting = asyncio.create_task(first_chunk(client.generate(long_request("waiting"))))
    await until_async(lambda: _at_work(http, 2), "the second request waits")
    await http.post("/abort_request", {"abort_all": True})
    ended = await waiting
    assert (ended.token_ids, ended.finish) == ([], "abort")
    assert (await rest(stream, first))[-1].finish == "abort"


async def _at_work(http: Http, n: int) -> bool:
    return await http.running() == n


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_makes_no_tokens_and_loses_none(client: SGLangClient, target: Target, mode: PauseMode) -> None:
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.pause(mode)
    await client.set_version("only while paused")
    if target.embedded:
        await client.health()  # SGLang's asks for a token, and says 503 when none comes
    await client.set_version("after")
    await client.resume()
    chunks = await rest(stream, first)
    versions = [version for version, _ in by_version(chunks)]
    if not target.embedded:  # SGLang's tokens on their way are named by what is served when they leave
        versions = [version for version in versions if version != "only while paused"]
    assert versions == ["default", "after"]
    assert (len(tokens_of(chunks)), chunks[-1].finish) == (LONG, "length")
    expected = target.oracle.logprobs(PROMPT, tokens_of(chunks))
    assert logprobs_of(chunks) == pytest.approx(expected, abs=target.logprob_tolerance)


async def test_a_pause_in_abort_mode_ends_all_with_their_partials(client: SGLangClient) -> None:
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.pause("abort")
    chunks = await rest(stream, first)
    assert chunks[-1].finish == "abort"
    assert 0 < len(tokens_of(chunks)) < LONG
    late = client.generate(long_request("late", 5))
    first_late = asyncio.create_task(first_chunk(late))
    await client.resume()
    assert len(tokens_of(await rest(late, await first_late))) == 5


async def test_running_requests_are_ended_and_waited_for(client: SGLangClient, target: Target) -> None:
    await client.end_running(10.0)  # nothing runs
    streams = {rid: client.generate(long_request(rid)) for rid in ("one", "two")}
    firsts = {rid: await anext(stream) for rid, stream in streams.items()}
    ends = [asyncio.create_task(rest(stream, firsts[rid])) for rid, stream in streams.items()]
    await client.end_running(10.0)
    assert client.flying("one") == client.flying("two") == ()
    for chunks in await asyncio.gather(*ends):
        assert chunks[-1].finish == "abort" and 0 < len(tokens_of(chunks)) < LONG
        expected = target.oracle.logprobs(PROMPT, tokens_of(chunks))
        assert logprobs_of(chunks) == pytest.approx(expected, abs=target.logprob_tolerance)


async def test_retraction_is_counted(http: Http) -> None:
    asking = asyncio.create_task(http.generate(PROMPT, max_new_tokens=LONG, ignore_eos=True))
    await until_async(lambda: _at_work(http, 1), "the request runs")
    await http.post("/pause_generation", {"mode": "retract"})
    await http.post("/continue_generation", {})
    assert (await asking)["meta_info"]["num_retractions"] == 1


async def _update_in_mid_request(client: SGLangClient, target: Target, mode: PauseMode) -> tuple[list[Chunk], int]:
    """Chunks of a request that saw new weights, and how many tokens the old ones made."""
    stream = client.generate(long_request())
    first = await anext(stream)
    if mode == "in_place" and not target.embedded:
        if target.inside is None:
            pytest.skip("without our function inside, SGLang names one token too many by the new version")
        assert await client.pause_counted("default") == 1
    else:
        await client.pause(mode)
    await client.update_weights_from_disk(str(target.other_dir), "2")
    await client.resume()
    chunks = await rest(stream, first)
    assert [version for version, _ in by_version(chunks)] == ["default", "2"]
    assert (len(tokens_of(chunks)), chunks[-1].finish) == (LONG, "length")
    return chunks, by_version(chunks)[0][1]


async def test_the_version_boundary_is_exact_when_rows_are_computed_anew(client: SGLangClient, target: Target) -> None:
    chunks, n_old = await _update_in_mid_request(client, target, "retract")
    tokens = tokens_of(chunks)
    old = target.oracle.logprobs(PROMPT, tokens[:n_old])
    new = target.other.logprobs(PROMPT + tokens[:n_old], tokens[n_old:])
    assert logprobs_of(chunks) == pytest.approx(old + new, abs=target.logprob_tolerance)


async def test_the_version_boundary_is_exact_when_rows_keep_their_keys(client: SGLangClient, target: Target) -> None:
    chunks, n_old = await _update_in_mid_request(client, target, "in_place")
    tokens = tokens_of(chunks)
    old = target.oracle.logprobs(PROMPT, tokens[:n_old])
    new = target.other.logprobs_after(target.oracle, PROMPT, tokens[:n_old], tokens[n_old:])
    assert logprobs_of(chunks) == pytest.approx(old + new, abs=target.logprob_tolerance)


async def test_an_update_without_a_pause_still_mixes_nothing(client: SGLangClient, target: Target) -> None:
    if not target.embedded:
        pytest.skip("SGLang waits for running requests here")
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.update_weights_from_disk(str(target.other_dir), "2")
    chunks = await rest(stream, first)
    (_, n_old), (version, _) = by_version(chunks)
    assert version == "2"
    tokens = tokens_of(chunks)
    new = target.other.logprobs(PROMPT + tokens[:n_old], tokens[n_old:])
    assert logprobs_of(chunks)[n_old:] == pytest.approx(new, abs=target.logprob_tolerance)


async def test_new_weights_answer_as_their_own_model(http: Http, client: SGLangClient, target: Target) -> None:
    await client.update_weights_from_disk(str(target.other_dir), "7")
    answer = await http.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert answer["meta_info"]["weight_version"] == "7"
    got = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(target.other.logprobs(PROMPT, answer["output_ids"]), abs=target.logprob_tolerance)
    health = await client.health()
    assert (health.weight_version, health.model_path) == ("7", str(target.other_dir))


async def test_update_weight_version_aborts_unless_told_not_to(http: Http, client: SGLangClient) -> None:
    stream = client.generate(long_request())
    first = await anext(stream)
    status, answer = await http.post("/update_weight_version", {"new_version": "9"})
    assert (status, answer["success"], answer["new_version"]) == (200, True, "9")
    assert (await rest(stream, first))[-1].finish == "abort"


async def test_flush_succeeds_when_idle_and_not_beside_running_requests(client: SGLangClient) -> None:
    assert await client.flush()
    stream = client.generate(long_request())
    await anext(stream)
    assert not await client.flush()
    await client.pause("in_place")
    assert not await client.flush()
    await client.resume()
    await client.abort("long")
    async for _ in stream:
        pass
    assert await client.flush()


async def test_flush_succeeds_while_paused_with_retracted_requests(client: SGLangClient, target: Target) -> None:
    if not target.embedded:
        pytest.skip("SGLang declines while its queue is not empty")
    stream = client.generate(long_request())
    first = await anext(stream)
    await client.pause("retract")
    assert await client.flush()
    await client.resume()
    assert len(tokens_of(await rest(stream, first))) == LONG


def _drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight"]


def _misshape_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 95)


def _transpose_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t().contiguous()


def _add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 96)


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int64)


DAMAGE = {
    "missing, first model.layers.1.mlp.down_proj.weight": _drop_one,
    "model.layers.1.mlp.down_proj.weight has shape": _misshape_one,
    "model.layers.0.mlp.up_proj.weight has shape": _transpose_one,
    "unknown to this model, first model.layers.2.mlp.down_proj.weight": _add_one,
    "model.norm.weight has type I64": _integers,
}


@pytest.mark.parametrize("says", [*DAMAGE, "no model*.safetensors", "cannot be read as safetensors"])
async def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    http: Http, client: SGLangClient, target: Target, tmp_path: Path, says: str
) -> None:
    if not target.embedded:
        pytest.skip("SGLang loads what it finds")
    sampling: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    before = await http.generate(PROMPT, **sampling)
    bad = tmp_path / "bad"
    shutil.copytree(target.other_dir, bad)
    file = bad / "model.safetensors"
    if says in DAMAGE:
        tensors = load_file(file)
        DAMAGE[says](tensors)
        save_file(tensors, file)
    elif says.startswith("no model"):
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    status, answer = await http.post("/update_weights_from_disk", {"model_path": str(bad), "weight_version": "bad"})
    assert (status, answer["success"]) == (400, False)
    assert says in answer["message"]
    with pytest.raises(RequestRefused, match="weights unchanged"):
        await client.update_weights_from_disk(str(bad), "bad")
    after = await http.generate(PROMPT, **sampling)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    assert after["meta_info"]["weight_version"] == "default"


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weight_version", "/update_weights_from_disk"])
async def test_a_control_call_that_is_not_understood_is_refused(http: Http, target: Target, path: str) -> None:
    if not target.embedded:
        pytest.skip("SGLang has its own words")
    status, answer = await http.post(path, {"mode": "sideways", "new_version": 3, "model_path": None})
    assert status == 400
    assert "body refused" in answer["error"]["message"]


async def test_who_asks_and_leaves_costs_nothing(client: SGLangClient, target: Target) -> None:
    chunks = client.generate(long_request())
    first = await first_chunk(chunks)
    for _ in range(20):  # as a router that is ended between its question and the answer
        _, asking = await asyncio.open_connection(*target.url.removeprefix("http://").split(":"))
        asking.write(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
        await asking.drain()
        asking.close()
    assert len(tokens_of(await rest(chunks, first))) == LONG


async def test_silence_and_length_of_a_request_have_deadlines(client: SGLangClient, target: Target) -> None:
    await client.pause("in_place")
    for deadlines, name in (((30.0, 0.2), "token deadline of 0.2 s"), ((0.2, 30.0), "request deadline of 0.2 s")):
        hasty = SGLangClient(
            target.url,
            request_deadline_s=deadlines[0],
            token_deadline_s=deadlines[1],
            control_deadline_s=CONTROL_DEADLINE_S,
        )
        with pytest.raises(EngineUnavailable, match=name) as caught:
            await anext(hasty.generate(long_request()))
        assert target.url in str(caught.value)
        await hasty.close()
