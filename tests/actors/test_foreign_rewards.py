"""Reward functions written for TRL and verl, called as those call them."""

from __future__ import annotations

import asyncio
from math import isnan
from typing import Any

import pytest

from actors.runtime.miles import reward_of

ROW: dict[str, Any] = {
    "sample_id": "g/0", "prompt": "1+1=", "response": "2", "label": "2", "metadata": {"level": 3}, "n_tokens": 1, "finish": "stop",
}  # fmt: skip
VALUES = {"label_key": "reward_model.ground_truth", "prompt_data": "openai/gsm8k"}


def test_a_function_of_trl_gets_lists_and_the_columns_that_it_names() -> None:
    def right(completions: list[str], ground_truth: list[str], **columns: Any) -> list[float]:
        assert columns["prompts"] == ["1+1="] * len(completions) and columns["level"] == [3] * len(completions)
        return [float(a == b) for a, b in zip(completions, ground_truth, strict=True)]

    hook = reward_of(right, VALUES)
    assert hook(ROW) == 1.0
    assert hook([ROW, ROW | {"response": "3"}]) == [1.0, 0.0], "with --group-rm"


def test_with_a_chat_template_completions_are_messages_as_there() -> None:
    def length(completions: list[list[dict[str, str]]]) -> list[float]:
        return [float(len(one[0]["content"])) for one in completions]

    assert reward_of(length, VALUES | {"apply_chat_template": True})(ROW | {"response": "four"}) == 4.0


def test_an_async_function_of_trl_is_waited_for_and_none_is_no_reward() -> None:
    async def nothing(completions: list[str]) -> list[float | None]:
        return [None for _ in completions]

    assert isnan(asyncio.run(reward_of(nothing, VALUES)(ROW)))


def test_a_function_of_verl_gets_one_answer_and_its_score_counts() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        assert (data_source, extra_info) == ("openai/gsm8k", {"level": 3})
        return {"score": float(solution_str == ground_truth), "acc": 1}

    assert reward_of(compute_score, VALUES)(ROW) == 1.0
    assert reward_of(compute_score, VALUES)([ROW, ROW | {"response": "x"}]) == [1.0, 0.0]
    assert reward_of(compute_score, VALUES | {"reward_key": "acc"})(ROW) == {"score": 1.0, "acc": 1}
    assert reward_of(lambda solution_str, ground_truth: 0.5, VALUES)(ROW) == 0.5, "the shorter form of its own rules"


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (lambda completions, solution: [1.0], "asks for solution, and is given completions, ground_truth, level, prompts"),
        (lambda completions: 1.0, "gave float, where a list of numbers is expected"),
        (lambda completions: [1.0, 2.0], "gave 2 rewards for 1 completions"),
    ],
)
def test_what_such_a_function_lacks_or_gives_is_said_in_words(hook: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        reward_of(hook, VALUES | {"label_key": "ground_truth"})(ROW)


def test_ours_and_miles_stay_what_they_are() -> None:
    assert reward_of(lambda sample: sample["label"], VALUES)(ROW) == "2"
    assert reward_of(lambda args, sample: args.prompt_data + sample.response, VALUES)(ROW) == "openai/gsm8k2"
