"""What a data set must hold: refused at the start, naming row and remedy, where it would be trained as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.prompts import load_prompts
from actors.runtime.run import Refused
from tests.declared import data_of

CHAT = [{"role": "user", "content": "1+1="}]


def load(folder: str, *rows: Any, **spec: Any) -> list[Any]:
    file = Path(folder) / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(data_of(path=str(file), tokenizer_dir=folder, **spec))[0]


@pytest.mark.parametrize(
    ("row", "spec", "says"),
    [
        ({"prompt": CHAT}, {}, "row 2: the prompt is a list .* set --apply-chat-template"),
        ({"prompt": 7}, {}, "row 2: the prompt is a int"),
        ({"prompt": None}, {}, "row 2: the prompt is a NoneType"),
        ({"prompt": "1", "label": ["2"]}, {}, "row 2: the label under 'label' is a list .* reward_model.ground_truth"),
        ({"prompt": "1", "label": {"a": 1}}, {}, "row 2: the label under 'label' is a dict"),
        ({"prompt": "1", "metadata": "text"}, {}, "row 2: the metadata under 'metadata' is a str"),
        ({"prompt": "1", "metadata": {"n": 1 << 70}}, {}, "row 2: the metadata under 'metadata' cannot be sent"),
        ({"question": "1"}, {}, r"row 2: it has no key 'prompt' \(it has question\). Set --input-key"),
        ({"prompt": "1", "rm": {}}, {"label_key": "rm.truth"}, "row 2: it has no key 'rm.truth'.*--label-key"),
        ([1, 2], {}, "row 2: it is a list"),
    ],
)
def test_a_row_that_would_be_read_as_something_else_is_refused(
    tokenizer_dir: str, row: Any, spec: dict[str, Any], says: str
) -> None:
    first = {"prompt": "1", "rm": {"truth": "2"}}
    with pytest.raises(Refused, match=says) as caught:
        load(tokenizer_dir, first, row, **spec)
    assert "\n" not in str(caught.value) and "rows.jsonl" in str(caught.value)


def test_keys_with_dots_lead_into_a_row(tokenizer_dir: str) -> None:
    row = {"in": {"text": "1+1="}, "reward_model": {"ground_truth": 2}, "a.b": "whole", "more": {"m": {"x": 1}}}
    spec = {"input_key": "in.text", "label_key": "reward_model.ground_truth", "metadata_key": "more.m"}
    [prompt] = load(tokenizer_dir, row, **spec)
    assert (prompt.text, prompt.label, prompt.metadata) == ("1+1=", "2", {"x": 1})
    [prompt] = load(tokenizer_dir, row, input_key="a.b")
    assert prompt.text == "whole" and prompt.label == ""
