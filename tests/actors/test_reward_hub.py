"""Rewards that ask others: services in batches and with failover, a judge model, unit tests, reasoning-gym's verifiers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.reward.code import CodeScorer, cases_of, program_of
from actors.reward.judge import JudgeScorer
from actors.reward.remote import RemoteScorer
from actors.reward.sample import BadLabel, Sample, SampleGroup, ScorerFailed, settle
from actors.reward.scorer import Scorers
from actors.runtime.rows import read, sources_of
from actors.runtime.run import Refused
from tests.actors.test_reward_pool import service


def sample(response: str, label: str = "", number: int = 0, **more: Any) -> Sample:
    return Sample(sample_id=f"g1/{number}", prompt="p", response=response, label=label, **more)


async def test_samples_that_come_together_are_one_question() -> None:
    sizes: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        sizes.append(len(body))
        return web.json_response([len(one["response"]) for one in body])

    async with service(handle) as url, RemoteScorer([url], batch=3) as scorer:
        asked = [scorer.score(sample("x" * i, number=i), 20.0) for i in range(7)]
        assert await asyncio.gather(*asked) == list(range(7))
        assert sum(sizes) == 7 and max(sizes) == 3 and len(sizes) <= 4
        assert await scorer.score(SampleGroup((sample("a"), sample("bb"))), 20.0) == [1, 2]


async def test_a_batch_that_fails_fails_for_each_of_its_samples() -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response([1.0])

    async with service(handle) as url, RemoteScorer([url], batch=2) as scorer:
        found = await asyncio.gather(*(scorer.score(sample("x"), 20.0) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in found] == [ScorerFailed, ScorerFailed]
    assert "1 answers to 2 samples" in str(found[0])


async def test_a_service_that_fails_is_passed_by_while_another_answers() -> None:
    asked: list[str] = []

    async def ill(request: web.Request) -> web.Response:
        asked.append("ill")
        return web.Response(status=500)

    async def well(request: web.Request) -> web.Response:
        asked.append("well")
        return web.json_response(1.0)

    async with service(ill) as one, service(well) as other, RemoteScorer([one, other]) as scorer:
        assert [await scorer.score(sample("x"), 20.0) for _ in range(6)] == [1.0] * 6
    assert asked.count("ill") == 1 and asked.count("well") == 6


async def test_the_judge_sees_the_template_filled_in_and_its_last_score_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILES_ASYNC_JUDGE_KEY", "sesame")
    seen: list[Any] = []
    answers = iter(("Score: 2\nbetter said **Score:** 7", "score 3/4", "I cannot say", None))

    async def handle(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": next(answers)}}]})

    template = tmp_path / "judge.txt"
    template.write_text("Q {prompt} A {response} L {label}")
    async with service(handle) as url:
        base = url.removesuffix("/rm")
        judge = JudgeScorer(base, model="m", template_path=str(template))
        judge._url = url  # the service of these tests has one path
        async with judge:
            assert await judge.score(sample("{label} {x}", "7"), 20.0) == 0.7
            assert await judge.score(sample("a"), 20.0) == 0.75
            for _ in range(2):
                with pytest.raises(ScorerFailed, match="named no score for g1/0"):
                    await judge.score(sample("a"), 20.0)
    key, body = seen[0]
    assert key == "Bearer sesame" and body["model"] == "m" and body["temperature"] == 0.0
    assert body["messages"] == [{"role": "user", "content": "Q p A {label} {x} L 7"}]
    template.write_text("nothing")
    with pytest.raises(Refused, match="shows no response"):
        JudgeScorer("http://x", model="m", template_path=str(template))


GOOD = "Here it is.\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
# Ways in which a program of no worth earned the reward when its assertions ran beside it.
REWARDS_ITSELF = [
    "import linecache, os\nprint([v[2] for v in linecache.cache.values()][-1])\nos._exit(0)",
    "import os, sys\nprint(sys._getframe().f_code.co_consts[-1], flush=True)\nos._exit(0)",
    "import sys\nframe = sys._getframe()\nwhile frame:\n    print(frame.f_locals)\n    frame = frame.f_back\nsys.exit(0)",
    "class Equal:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Equal()",
]
ECHO = "```\nprint(int(input()) * 2)\n```"


async def test_programs_are_scored_by_their_tests_in_the_sandbox() -> None:
    pairs = {"inputs": ["1\n", "4"], "outputs": ["2\n", "8"]}
    async with Scorers(rm_type="unit_tests") as scorers:
        scorer = scorers.named("")

        async def score(response: str, label: str, **metadata: Any) -> Any:
            return await scorer.score(sample(response, label, metadata=metadata), 30.0)

        assert await score(GOOD, "assert add(1, 2) == 3") == {"score": 1.0, "passed": 1.0}
        assert await score(GOOD, "", tests=["assert add(1, 2) == 3", "assert add(1, 1) == 3"]) == {"score": 0.0, "passed": 0.5}
        assert await score(ECHO, json.dumps(pairs)) == {"score": 1.0, "passed": 1.0}
        assert await score("```\nimport os\nos._exit(0)\n```", json.dumps(pairs)) == {"score": 0.0, "passed": 0.0}
        for end in ("exit()", "import os; os._exit(0)", "raise SystemExit"):  # before the assertions are reached
            assert await score(f"```\n{end}\n```", "assert False") == {"score": 0.0, "passed": 0.0}
        assert await score("", "assert True") == {"score": 0.0, "passed": 0.0}
        for way in REWARDS_ITSELF:
            assert (await score(f"```\n{way}\n```", "assert add(1, 2) == 3"))["score"] == 0.0, way
        calls = json.dumps({"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]]})
        assert await score(GOOD, calls) == {"score": 1.0, "passed": 1.0}
        method = "```\nclass Solution:\n    def add(self, a, b):\n        return a + b if b == 2 else (a + b,)\n```"
        assert await score(method, calls) == {"score": 1.0, "passed": 1.0}
        assert settle(await score(GOOD, "assert add(2, 2) == 4"), scorer.default_key, "x").scalar == 1.0
        with pytest.raises(BadLabel, match="holds tests"):
            await score(GOOD, "")


async def test_a_program_that_was_not_tested_is_no_failed_one() -> None:
    """Its sandbox was ended from outside, again and again, as when memory is short."""
    async with CodeScorer() as scorer:
        scorer._sandbox._limits["output_bytes"] = "none"  # no server takes such an order
        with pytest.raises(ScorerFailed, match="was not tested: the sandbox died"):
            await scorer.score(sample(GOOD, "assert add(1, 2) == 3"), 30.0)


def test_tests_and_programs_as_data_sets_and_models_write_them() -> None:
    one = [("1\n2", "3")]
    for given in ([{"input": [1, 2], "output": "3"}], {"inputs": [["1", "2"]], "outputs": ["3"]}):
        assert cases_of(sample("", metadata={"tests": given})) == one == cases_of(sample("", json.dumps(given)))
    assert cases_of(sample("", "[1, 2][0] == 1")) == [("[1, 2][0] == 1", None)]
    assert program_of("<think>```py\nno\n```</think> ```py\nyes\n```") == "yes"
    assert program_of("x = 1") == "x = 1"


async def test_reasoning_gym_scores_its_own_problems() -> None:
    async with Scorers(rm_type="") as scorers:
        for text in ("reasoning_gym:leg_counting?size=2&seed=1", "reasoning_gym:basic_arithmetic?size=2&seed=1"):
            [source] = sources_of(text)
            for row in (placed.row for placed in read(source)):
                scorer = scorers.named(row["metadata"]["rm_type"])
                right = f"<think>{row['question']}</think> so <answer> {row['answer']} </answer>"
                assert await scorer.score(sample(right, metadata=row["metadata"]), 60.0) == 1.0
                boxed = rf"It is \boxed{{{row['answer']}}}."
                assert await scorer.score(sample(boxed, metadata=row["metadata"]), 60.0) == 1.0
                assert await scorer.score(sample("<answer>-77</answer>", metadata=row["metadata"]), 60.0) < 0.5
