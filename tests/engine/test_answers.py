"""Conformance: what an engine answers to a generation request. Runs against the embedded engine and real SGLang alike."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from actors.generation.engine import GenerateRequest, RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from tests.engine.conftest import Http, Target
from tests.engine.models import CONTEXT, EOS, VOCAB

PROMPT = [5, 9, 33, 2, 17]


async def collect(client: SGLangClient, request: GenerateRequest) -> tuple[list[int], list[float], str | None]:
    tokens: list[int] = []
    logprobs: list[float] = []
    finish = None
    async for chunk in client.generate(request):
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        finish = chunk.finish
    return tokens, logprobs, finish


async def test_a_plain_answer_has_the_shape_of_sglang(http: Http) -> None:
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    body = {
        "rid": "shape",
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    status, answer = await http.post("/generate", body)
    assert status == 200
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert meta["id"] == "shape"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert (meta["cached_tokens"], meta["num_retractions"]) == (0, 0)
    assert meta["weight_version"] == "default"
    assert meta["e2e_latency"] > 0
    pairs = meta["output_token_logprobs"]
    assert [token for _, token, _ in pairs] == answer["output_ids"]
    assert all(logprob <= 0 and text is None for logprob, _, text in pairs)


async def test_without_return_logprob_there_are_none(http: Http) -> None:
    _, answer = await http.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert "output_token_logprobs" not in answer["meta_info"]


async def test_health_and_info_name_the_model_and_the_version(http: Http, client: SGLangClient, target: Target) -> None:
    for path in ("/health", "/health_generate"):
        assert (await http.get(path))[0] == 200
    for path in ("/model_info", "/get_model_info"):
        status, model = await http.get(path)
        assert status == 200
        assert (model["model_path"], model["weight_version"]) == (str(target.model_dir), "default")
    for path in ("/server_info", "/get_server_info"):
        status, info = await http.get(path)
        assert status == 200
        assert info["max_req_input_len"] < info["max_total_num_tokens"] + 1
        assert info["internal_states"]
    health = await client.health()
    assert (health.weight_version, health.model_path) == ("default", str(target.model_dir))
    assert (await client.info())["model_path"] == str(target.model_dir)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.6, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.5},
    ],
    ids=str,
)
async def test_logprobs_are_those_of_transformers_before_any_cut(http: Http, target: Target, sampling: dict[str, Any]) -> None:
    answer = await http.generate(PROMPT, max_new_tokens=60, ignore_eos=True, sampling_seed=4, **sampling)
    expected = target.oracle.logprobs(PROMPT, answer["output_ids"], sampling["temperature"])
    got = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=target.logprob_tolerance)


async def test_temperature_zero_is_greedy_with_untempered_logprobs(http: Http, target: Target) -> None:
    answer = await http.generate(PROMPT, temperature=0, max_new_tokens=24, ignore_eos=True)
    if target.embedded:
        assert answer["output_ids"] == target.oracle.greedy(PROMPT, 24)
    got = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(target.oracle.logprobs(PROMPT, answer["output_ids"]), abs=target.logprob_tolerance)


async def test_a_stop_token_ends_the_answer_and_belongs_to_it(http: Http, target: Target) -> None:
    free = (await http.generate(PROMPT, temperature=0, max_new_tokens=24, ignore_eos=True))["output_ids"]
    stop = free[7 if target.embedded else 0]  # before the end of sequence
    ignored = {"ignore_eos": True} if target.embedded else {}  # SGLang ignores stop tokens with it
    answer = await http.generate(PROMPT, temperature=0, max_new_tokens=24, stop_token_ids=[stop], **ignored)
    assert answer["output_ids"] == free[: free.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_end_of_sequence_stops_unless_ignored(http: Http) -> None:
    # At this temperature every token, the end included, comes up soon.
    hot = {"temperature": 50.0, "max_new_tokens": 1500, "sampling_seed": 11}
    answer = await http.generate(PROMPT, **hot)
    assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    on = await http.generate(PROMPT, ignore_eos=True, **hot)
    assert len(on["output_ids"]) == 1500
    assert EOS in on["output_ids"]


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (-1, 0.3), (4, 0.6)])
async def test_cuts_leave_only_the_most_likely_tokens(http: Http, target: Target, top_k: int, top_p: float) -> None:
    answers = await asyncio.gather(
        *(http.generate(PROMPT, max_new_tokens=1, top_k=top_k, top_p=top_p, sampling_seed=i) for i in range(60))
    )
    seen = {answer["output_ids"][0] for answer in answers}
    every = sorted(((target.oracle.logprobs(PROMPT, [t])[0], t) for t in range(VOCAB)), reverse=True)
    allowed, mass = set(), 0.0
    for rank, (logprob, token) in enumerate(every):
        if mass > top_p or (top_k != -1 and rank >= top_k):
            break
        allowed.add(token)
        mass += 2.718281828459045**logprob
    assert seen <= allowed
    assert (len(seen) > 1) == (len(allowed) > 1)


@pytest.fixture
async def seeded(http: Http, target: Target) -> None:
    if not target.embedded and not (await http.get("/server_info"))[1].get("enable_deterministic_inference"):
        pytest.skip("SGLang needs --enable-deterministic-inference for this")


@pytest.mark.usefixtures("seeded")
async def test_a_seed_decides_the_answer_whatever_else_runs(http: Http) -> None:
    alone = await http.generate(PROMPT, max_new_tokens=40, ignore_eos=True, sampling_seed=77)
    crowd = [http.generate([i + 2] * (i % 9 + 1), max_new_tokens=10 + i, ignore_eos=True) for i in range(40)]
    among, *_ = await asyncio.gather(http.generate(PROMPT, max_new_tokens=40, ignore_eos=True, sampling_seed=77), *crowd)
    assert among["output_ids"] == alone["output_ids"]
    other = await http.generate(PROMPT, max_new_tokens=40, ignore_eos=True, sampling_seed=78)
    assert other["output_ids"] != alone["output_ids"]


@pytest.mark.usefixtures("seeded")
async def test_a_seed_goes_on_where_a_prefix_left_off(http: Http) -> None:
    whole = (await http.generate(PROMPT, max_new_tokens=40, ignore_eos=True, sampling_seed=5))["output_ids"]
    rest = await http.generate(PROMPT + whole[:13], max_new_tokens=27, ignore_eos=True, sampling_seed=5)
    assert rest["output_ids"] == whole[13:]


async def test_a_stream_tells_the_same_as_a_plain_answer(http: Http, client: SGLangClient, target: Target) -> None:
    sampling = {"max_new_tokens": 1200, "temperature": 0, "ignore_eos": True}
    plain = await http.generate(PROMPT, **sampling)
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": True}
    async with http.session.post("/generate", json=body) as response:
        assert response.content_type == "text/event-stream"
        events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len(chunks) > 1
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [len(chunk["output_ids"]) for chunk in chunks] == counts, "chunks repeat all tokens so far"
    assert chunks[-1]["output_ids"] == plain["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]

    request = GenerateRequest(rid="s", input_ids=PROMPT, max_new_tokens=1200, temperature=0, ignore_eos=True)
    tokens, logprobs, finish = await collect(client, request)
    assert (tokens, finish) == (plain["output_ids"], "length")
    expected = [pair[0] for pair in plain["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(expected, abs=target.logprob_tolerance)


async def test_equal_prompts_at_once_answer_like_one_alone(http: Http) -> None:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = (await http.generate(PROMPT, **sampling))["output_ids"]
    together = await asyncio.gather(*(http.generate(PROMPT, **sampling) for _ in range(8)))
    assert [answer["output_ids"] for answer in together] == [alone] * 8


BAD = [
    ({"input_ids": [2] * CONTEXT, "sampling_params": {"max_new_tokens": 8}}, "context length"),
    ({"input_ids": [2] * 100, "sampling_params": {"max_new_tokens": CONTEXT}}, "context length"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [VOCAB]}, "outside 0..63"),
    ({"input_ids": [-1]}, "outside 0..63"),
    ({"input_ids": "text"}, "input_ids"),
    ({}, "input_ids"),
    ({"input_ids": [2], "sampling_params": {"temperature": -1}}, "temperature=-1"),
    ({"input_ids": [2], "sampling_params": {"top_p": 0}}, "top_p=0"),
    ({"input_ids": [2], "sampling_params": {"top_k": 0}}, "top_k=0"),
    ({"input_ids": [2], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0"),
    ({"input_ids": [2], "sampling_params": {"stop": ["x"]}}, "stop strings"),
    ({"input_ids": [2], "sampling_params": {"min_p": 0.1}}, "min_p"),
    ({"input_ids": [2], "sampling_params": {"temprature": 1}}, "temprature"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("body", "says"), BAD, ids=[says for _, says in BAD])
async def test_a_request_that_cannot_be_served_is_refused_by_name(
    http: Http, target: Target, body: dict[str, Any], says: str, stream: bool
) -> None:
    if not target.embedded:
        pytest.skip("SGLang has its own words")
    status, answer = await http.post("/generate", {**body, "stream": stream})
    assert status == 400
    assert says in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


async def test_the_client_calls_a_prompt_over_the_context_refused(client: SGLangClient) -> None:
    request = GenerateRequest(rid="long", input_ids=[2] * CONTEXT, max_new_tokens=8)
    with pytest.raises(RequestRefused, match=r"long.*context length"):
        await collect(client, request)
