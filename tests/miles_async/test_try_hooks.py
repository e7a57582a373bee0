"""Functions of the user's that give data or score whole groups are tried before anything starts, and refused in one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from actors.reward.sample import Sample
from miles_async.launcher.try_hooks import Ask, problem_of
from tests.declared import data_of

SAMPLE = Sample(sample_id="try/0", prompt="1+1=", response="2", label="2")


def rows(path: str) -> list[dict[str, str]]:
    return [{"prompt": f"{path}+1=", "label": "2"}] * 3


def endless(path: str) -> Any:
    while True:
        yield {"prompt": path, "label": "1"}


def other_columns(path: str) -> list[dict[str, str]]:
    return [*rows(path), {"question": "?"}]


class Source:
    """As Miles': groups of copies, from where it stands."""

    def __init__(self, args: Any) -> None:
        self.args, self.at = args, 0

    def get_samples(self, n: int) -> list[list[Any]]:
        self.at += n
        made = [SimpleNamespace(prompt=f"{self.args.prompt_data}+{i}=", label=str(i), metadata={"i": i}) for i in range(self.at)]
        return [[one] * self.args.n_samples_per_prompt for one in made[-n:]]


class NoSamples(Source):
    def get_samples(self, n: int) -> list[list[Any]]:
        return [["1+1="]]


def as_many(samples: list[dict[str, Any]]) -> list[float]:
    return [float(sample["response"] == sample["label"]) for sample in samples]


def one_for_all(samples: Any) -> float:
    return 1.0


async def of_miles(args: Any, sample: Any) -> dict[str, float]:
    return {"score": float(sample.response == sample.label) * args.rollout_batch_size, "n": sample.response_length}


def whole_of_miles(args: Any, samples: list[Any]) -> list[float]:
    return [float(one.index) for one in samples]


def exits(sample: Any) -> float:
    sys.exit(4)


def keeps_of_miles(args: Any, group: list[Any]) -> Any:
    values = [one.get_reward_value(args) for one in group]
    return SimpleNamespace(keep=max(values) > args.rollout_batch_size, reason="easy")


@pytest.mark.parametrize(
    ("field", "hook", "group_rm", "says"),
    [
        ("data_source_path", "rows", False, ""),
        ("data_source_path", "endless", False, ""),
        ("data_source_path", "other_columns", False, "row 4: it has no key 'prompt'"),
        ("data_source_path", "Source", False, ""),
        ("data_source_path", "NoSamples", False, "get_samples gave '1+1=' where a sample with a prompt belongs"),
        ("custom_rm_path", "as_many", True, ""),
        ("custom_rm_path", "one_for_all", True, "not with a list of as many rewards"),
        ("custom_rm_path", "one_for_all", False, ""),
        ("custom_rm_path", "exits", False, "raised SystemExit: 4"),
        ("custom_rm_path", "of_miles", False, ""),
        ("custom_rm_path", "whole_of_miles", True, ""),
        ("dynamic_sampling_filter_path", "keeps_of_miles", False, ""),
    ],
)
def test_it_is_called_as_it_will_be(field: str, hook: str, group_rm: bool, says: str) -> None:
    data = data_of(path="7", metadata_key="", tool_key="")
    path, values = f"{__name__}.{hook}", {"reward_key": None, "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
    ask = Ask(paths={field: path}, sample=SAMPLE, data=data, group_rm=group_rm, reward_key="score", values=values)
    found = problem_of(field, path, ask)
    assert (says in found) if says else found == ""
