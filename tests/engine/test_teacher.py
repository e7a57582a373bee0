"""A teacher engine: log-probs of given tokens, asked over HTTP. Runs against the embedded engine and real SGLang alike."""

from __future__ import annotations

import msgspec
import pytest

from actors.reward.sample import ScorerFailed
from actors.reward.teacher import Teacher, TeacherRefused
from bus.messages.base import pack_ints, unpack_floats
from bus.messages.samples import Response, RolloutDone, SampleTask
from tests.engine.conftest import Http, Target
from tests.engine.models import VOCAB

PROMPT, RESPONSE = [5, 9, 33, 2, 17], [8, 40, 1, 3]


def rollout(response: list[int], sample_id: str = "g1/0") -> RolloutDone:
    task = SampleTask(sample_id=sample_id, group_id="g1", index=0, n_samples=1, prompt_id="p", prompt_tokens=pack_ints(PROMPT))
    return RolloutDone(task=task, response=Response(tokens=pack_ints(response)), finish="stop")


@pytest.mark.parametrize("start", [0, 4])
async def test_a_prompt_is_scored_in_the_shape_of_sglang(start: int, http: Http, target: Target) -> None:
    body = {
        "input_ids": PROMPT + RESPONSE,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    status, answer = await http.post("/generate", body)
    assert status == 200, answer
    assert answer["output_ids"] == [] and answer["meta_info"]["completion_tokens"] == 0
    pairs = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in pairs] == (PROMPT + RESPONSE)[start:] and pairs[0][0] is None
    whole = target.oracle.logprobs((PROMPT + RESPONSE)[:1], (PROMPT + RESPONSE)[1:])
    assert [p for p, _, _ in pairs[1:]] == pytest.approx(whole[start:], abs=target.logprob_tolerance)


async def test_scoring_goes_on_beside_generation_and_across_chunks(http: Http, target: Target) -> None:
    tokens = [2 + i * 7 % (VOCAB - 2) for i in range(700)]
    body = {
        "input_ids": tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    _, answer = await http.post("/generate", body)
    found = [p for p, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
    assert found == pytest.approx(target.oracle.logprobs(tokens[:1], tokens[1:]), abs=target.logprob_tolerance)
    assert len((await http.generate(PROMPT, max_new_tokens=3, ignore_eos=True))["output_ids"]) == 3


async def test_nothing_to_make_and_nothing_to_score_is_refused(http: Http, target: Target) -> None:
    if not target.embedded:
        pytest.skip("SGLang answers with nothing")
    for more in ({}, {"return_logprob": True}, {"return_logprob": True, "logprob_start_len": len(PROMPT)}):
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, **more}
        status, answer = await http.post("/generate", body)
        assert status == 400 and "max_new_tokens=0" in str(answer)


async def test_the_teacher_gives_one_number_for_each_token_of_the_response(target: Target) -> None:
    async with Teacher([f"{target.url}/"]) as teacher:
        found = unpack_floats(await teacher.logprobs(rollout(RESPONSE), 30.0))
        assert found == pytest.approx(target.oracle.logprobs(PROMPT, RESPONSE), abs=target.logprob_tolerance)
        assert len(await teacher.logprobs(rollout([]), 30.0)) == 0
        if target.embedded:  # SGLang's scheduler ends over a token that its model does not know
            with pytest.raises(TeacherRefused, match="answered 400"):
                await teacher.logprobs(rollout([*RESPONSE, 1 << 24]), 30.0)
        bare = rollout(RESPONSE)
        bare = msgspec.structs.replace(bare, task=msgspec.structs.replace(bare.task, prompt_tokens=pack_ints([])))
        found = unpack_floats(await teacher.logprobs(bare, 30.0))
        assert found[0] == 0.0
        assert found[1:] == pytest.approx(target.oracle.logprobs(RESPONSE[:1], RESPONSE[1:]), abs=target.logprob_tolerance)


async def test_a_teacher_that_is_away_may_be_asked_again() -> None:
    async with Teacher(["http://me:secret@127.0.0.1:1"]) as teacher:
        with pytest.raises(ScorerFailed, match=r"127\.0\.0\.1:1.*not reached") as failed:
            await teacher.logprobs(rollout(RESPONSE), 10.0)
    assert "secret" not in str(failed.value)
