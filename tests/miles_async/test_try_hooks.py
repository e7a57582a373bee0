"""Functions of the user's that give data or score whole groups are tried before anything starts, and refused in one line."""

from __future__ import annotations

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


def as_many(samples: list[dict[str, Any]]) -> list[float]:
    return [float(sample["response"] == sample["label"]) for sample in samples]


def one_for_all(samples: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("field", "hook", "group_rm", "says"),
    [
        ("data_source_path", "rows", False, ""),
        ("data_source_path", "endless", False, ""),
        ("data_source_path", "other_columns", False, "row 4: it has no key 'prompt'"),
        ("custom_rm_path", "as_many", True, ""),
        ("custom_rm_path", "one_for_all", True, "not with a list of as many rewards"),
        ("custom_rm_path", "one_for_all", False, ""),
    ],
)
def test_it_is_called_as_it_will_be(field: str, hook: str, group_rm: bool, says: str) -> None:
    data = data_of(path="7", metadata_key="", tool_key="")
    found = problem_of(field, f"{__name__}.{hook}", Ask(paths={}, sample=SAMPLE, data=data, group_rm=group_rm))
    assert (says in found) if says else found == ""
