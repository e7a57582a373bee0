"""A function of this Python as a reward: what other processes load is its source with what it uses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter as Count
from pathlib import Path
from typing import Any

import pytest

from miles_async.api.source import as_file
from miles_async.settings.errors import SettingsError

BONUS = {"a": 0.5}
NUMBER = re.compile(r"\d+")
HANDLE = object()


def digits(text: str) -> int:
    return sum(Count(text)[one] for one in "0123456789")


def reward(sample: dict[str, Any]) -> float:
    return digits(sample["response"]) + max(BONUS[key] for key in ["a"]) + len(json.dumps(sample["label"]))


def with_pattern(sample: dict[str, Any]) -> float:
    return float(bool(NUMBER.search(sample["response"])))


def with_handle(sample: dict[str, Any]) -> float:
    return float(id(HANDLE))


def test_another_process_computes_the_same_with_nothing_of_this_one(tmp_path: Path) -> None:
    file, _, name = as_file(reward, tmp_path / "run").rpartition(":")
    sample = {"response": "a12b", "label": "2"}
    code = f"import runpy, json; print(runpy.run_path({file!r})[{name!r}](json.loads({json.dumps(sample)!r})))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == reward(sample)
    assert as_file(reward, tmp_path / "run") == f"{file}:{name}", "the same source is the same file"


def test_what_cannot_be_written_down_is_refused_by_its_name(tmp_path: Path) -> None:
    outer = 3

    def inner(sample: dict[str, Any]) -> float:
        return float(outer)

    for function, why in (
        (inner, "inner uses outer of the function around it"),
        (lambda sample: 1.0, "it is a lambda"),
        (with_handle, "with_handle uses HANDLE, a object of this Python"),
        (len, "it is builtin_function_or_method"),
    ):
        with pytest.raises(SettingsError) as caught:
            as_file(function, tmp_path / "run")
        assert str(caught.value).startswith("reward: ") and why in str(caught.value)
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_compiled_pattern_is_written_down_too(tmp_path: Path) -> None:
    file = as_file(with_pattern, tmp_path).rpartition(":")[0]
    assert "NUMBER = re.compile(" in Path(file).read_text()
