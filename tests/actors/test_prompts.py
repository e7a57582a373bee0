"""What a data set must hold: refused at the start, naming row and remedy, where it would be trained as something else."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.runtime.prompts import load_prompts
from actors.runtime.rows import count, read, sources_of
from actors.runtime.run import Refused
from actors.sampler.order import Cursor, RowOrder, quotas
from tests.declared import data_of

CHAT = [{"role": "user", "content": "1+1="}]


def load(folder: str, *rows: Any, **spec: Any) -> list[Any]:
    file = Path(folder) / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(data_of(path=str(file), tokenizer_dir=folder, **spec)).prompts


@pytest.mark.parametrize(
    ("row", "spec", "says"),
    [
        ({"prompt": CHAT}, {}, "row 2: the prompt is a list .* set --apply-chat-template"),
        ({"prompt": 7}, {}, "row 2: the prompt is a int"),
        ({"prompt": None}, {}, "row 2: the prompt is null"),
        ({"prompt": "1", "label": ["2", "3"]}, {}, "row 2: the label under 'label' is a list .* reward_model.ground_truth"),
        ({"prompt": "1", "label": {"a": 1}}, {}, "row 2: the label under 'label' is a dict"),
        ({"prompt": "1", "metadata": "text"}, {}, "row 2: the metadata under 'metadata' is a str"),
        ({"prompt": "1", "metadata": {"n": 1 << 70}}, {}, "row 2: the metadata under 'metadata' cannot be sent"),
        ({"prompt": "1\ud800"}, {}, "row 2: the prompt under 'prompt' cannot be sent.* surrogates not allowed. Mend the row"),
        ({"prompt": "1", "label": "\ud800"}, {}, "row 2: the label under 'label' cannot be sent"),
        ({"question": "1"}, {}, r"row 2: it has no key 'prompt' \(it has question\). Set --input-key"),
        ({"prompt": "1", "rm": {}}, {"label_key": "rm.truth"}, "row 2: it has no key 'rm.truth'.*--label-key"),
        ([1, 2], {}, "line 2, is not a JSON object"),
    ],
)
def test_a_row_that_would_be_read_as_something_else_is_refused(
    tokenizer_dir: str, row: Any, spec: dict[str, Any], says: str
) -> None:
    first = {"prompt": "1", "rm": {"truth": "2"}}
    with pytest.raises(Refused, match=says) as caught:
        load(tokenizer_dir, first, row, **spec)
    assert "\n" not in str(caught.value) and "rows.jsonl" in str(caught.value)


@pytest.mark.parametrize("path", ["gone.jsonl", "gone.jsonl@[-2:]"])
def test_a_file_that_has_gone_is_named(path: str, tokenizer_dir: str) -> None:
    with pytest.raises(Refused, match=r"gone.jsonl: no such file"):
        load_prompts(data_of(path=path, tokenizer_dir=tokenizer_dir))


def test_a_line_that_is_nested_too_deeply_is_refused_by_its_number(tmp_path: Path, tokenizer_dir: str) -> None:
    file = tmp_path / "rows.jsonl"
    deep = "[" * 100_000 + "]" * 100_000
    file.write_text('{"prompt": "1"}\n{"prompt": "1", "metadata": {"x": ' + deep + "}}\n")
    with pytest.raises(Refused, match="line 2, is nested too deeply"):
        load_prompts(data_of(path=str(file), tokenizer_dir=tokenizer_dir))


def test_keys_with_dots_lead_into_a_row(tokenizer_dir: str) -> None:
    row = {"in": {"text": "1+1="}, "reward_model": {"ground_truth": 2}, "a.b": "whole", "more": {"m": {"x": 1}}}
    spec = {"input_key": "in.text", "label_key": "reward_model.ground_truth", "metadata_key": "more.m"}
    [prompt] = load(tokenizer_dir, row, **spec)
    assert (prompt.text, prompt.label, prompt.metadata) == ("1+1=", "2", {"x": 1})
    [prompt] = load(tokenizer_dir, row, input_key="a.b")
    assert prompt.text == "whole" and prompt.label == ""


def test_what_cannot_be_right_with_the_template_is_refused(tokenizer_dir: str) -> None:
    with pytest.raises(Refused, match=r"has no chat template.*--chat-template-path"):
        load(tokenizer_dir, {"prompt": CHAT}, apply_chat_template=True)
    words = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    words.add_special_tokens(["<s>"])
    words.save(f"{tokenizer_dir}/tokenizer.json")
    template = Path(tokenizer_dir) / "own.jinja"
    tools = "{% for t in tools or [] %}{{ t.name }}{% endfor %}"
    template.write_text(tools + "{% for m in messages %}{{ m.content }}{% endfor %}{{ tail }}")
    spec = {"apply_chat_template": True, "chat_template_path": str(template), "apply_chat_template_kwargs": '{"tail": "+9="}'}
    [prompt] = load(tokenizer_dir, {"prompt": CHAT, "tools": '[{"name": "8"}]'}, tool_key="tools", **spec)
    assert prompt.text == "81+1=+9=" and prompt.metadata == {"tools": [{"name": "8"}]}
    for row, says in (
        ({"prompt": [*CHAT, {"role": "assistant", "content": "2"}]}, "nothing to answer"),
        ({"prompt": "<s>1"}, "begins with '<s>' already.*Leave out --apply-chat-template"),
        ({"prompt": CHAT, "tools": "8"}, "the tools under 'tools' are"),
    ):
        with pytest.raises(Refused, match=says):
            load(tokenizer_dir, row, tool_key="tools", **spec)
    with pytest.raises(Refused, match=r"tools are shown by a chat template"):
        load(tokenizer_dir, {"prompt": "1", "tools": [{}]}, tool_key="tools")


def write_saved(folder: Path, rows: list[dict[str, Any]], **state: Any) -> None:
    """As `datasets` saves: record batches in shards, in the order that state.json names."""
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:2], rows[2:]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]} | state))


def test_rows_come_from_whatever_holds_them(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(5)]
    write_saved(tmp_path / "saved", rows)
    shards = tmp_path / "shards"
    shards.mkdir()
    for i, part in enumerate((rows[:3], rows[3:])):
        pq.write_table(pa.Table.from_pylist(part), shards / f"{i}.parquet")
    for place in ("saved", "shards"):
        [source] = sources_of(f"{tmp_path / place}@[1:-1]")
        assert [placed.row for placed in read(source)] == rows[1:4] and count(source) == (3, 5)
    write_saved(tmp_path / "ordered", rows, _indices_data_files=["x"])
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "bad.arrow").write_bytes(b"x")
    for path, says in (
        ("ordered", "flatten_indices"),
        ("both", "the splits train, test.*both/train"),
        ("bad.arrow", "not an Arrow"),
        ("reasoning_gym:nothing", "not registered"),
        ("reasoning_gym:leg_counting?size=-5", "leg_counting.size=-5: ValueError"),
        ("reasoning_gym:leg_counting?size=many", "TypeError"),
        ("long" * 100, "no such file"),
    ):
        with pytest.raises(Refused, match=says):
            list(read(sources_of(path if ":" in path else str(tmp_path / path))[0]))


def test_keys_that_only_other_rows_have_are_not_shown_to_the_model(tmp_path: Path, tokenizer_dir: str) -> None:
    def called(name: str, **arguments: Any) -> list[Any]:
        calls = [{"function": {"name": name, "arguments": arguments}}]
        return [*CHAT, {"role": "assistant", "content": None, "tool_calls": calls}, *CHAT]

    tools = [[{"name": "8", "properties": {"a": {"type": "x"}}}], [{"name": "9", "properties": {"b": {"enum": ["y", None]}}}]]
    rows = [{"prompt": called("8", a=1), "tools": tools[0]}, {"prompt": called("9", b=2), "tools": tools[1]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (template := tmp_path / "t.jinja").write_text("{{ tools | tojson }}{{ messages | tojson }}")
    spec = {"tool_key": "tools", "apply_chat_template": True, "chat_template_path": str(template), "tokenizer_dir": tokenizer_dir}
    found = load_prompts(data_of(path=str(tmp_path / "rows.parquet"), **spec)).prompts
    assert [prompt.metadata["tools"] for prompt in found] == tools
    for prompt in found:  # of the messages' own keys the template's engine decides
        assert "null" not in re.sub(r'"(content|tool_calls)": null|\["y", null\]', "", prompt.text)


def test_a_row_is_named_by_its_own_file_and_hidden_files_are_none(tmp_path: Path, tokenizer_dir: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "1.jsonl").write_text('{"prompt": "1"}\n' * 3)
    (folder / "2.jsonl").write_text('{"prompt": "1"}\n\n{"prompt": ""}\n')
    (folder / "._1.jsonl").write_bytes(b"\0\5\x16\7")  # as macOS leaves beside a file
    with pytest.raises(Refused, match=r"/2\.jsonl row 3: the prompt is"):
        load_prompts(data_of(path=str(folder), tokenizer_dir=tokenizer_dir))
    assert count(sources_of(str(folder))[0]) == (5, 5)


def test_many_sources_may_be_longer_than_a_path() -> None:
    text = ", ".join(f"1*{i:03}.jsonl" for i in range(1000))
    assert [source.path for source in sources_of(text)] == [f"{i:03}.jsonl" for i in range(1000)]


def test_a_generator_of_problems_is_a_data_set(tokenizer_dir: str) -> None:
    spec = {"input_key": "question", "label_key": "answer", "metadata_key": "metadata", "tokenizer_dir": tokenizer_dir}
    text = "3*reasoning_gym:leg_counting?size=4&seed=1, 1*reasoning_gym:basic_arithmetic?size=2"
    made = load_prompts(data_of(path=text, **spec))
    assert [weight for _, weight in made.parts] == [3, 1] and [p.index for p in made.prompts] == list(range(6))
    assert made == load_prompts(data_of(path=text, **spec))
    assert made.prompts[1].metadata["index"] == 1 and made.prompts[1].label.isdigit()


def own_rows(path: str) -> Any:
    """A data source as a user writes it."""
    return ({"prompt": f"{i}+{path}="} for i in range(3))


def test_a_function_gives_the_rows(tokenizer_dir: str) -> None:
    found = load_prompts(data_of(path="7", tokenizer_dir=tokenizer_dir, data_source_path="tests.actors.test_prompts.own_rows"))
    assert [p.text for p in found.prompts] == ["0+7=", "1+7=", "2+7="]


def test_a_data_source_written_for_miles_gives_all_prompts_of_the_run(tokenizer_dir: str) -> None:
    spec = data_of(path="7", tokenizer_dir=tokenizer_dir, data_source_path="tests.miles_async.test_try_hooks.Source")
    found = load_prompts(spec, {"num_rollout": 3, "rollout_batch_size": 100, "n_samples_per_prompt": 2})
    assert [(p.text, p.label, p.metadata) for p in found.prompts[-2:]] == [
        ("7+298=", "298", {"i": 298}), ("7+299=", "299", {"i": 299})
    ] and len(found.prompts) == 300  # fmt: skip


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
       seed=st.integers(0, 3), shuffle=st.booleans(), weighted=st.booleans())  # fmt: skip
def test_each_source_has_its_share_and_is_seen_evenly(
    sizes: list[int], weights: list[int], seed: int, shuffle: bool, weighted: bool
) -> None:
    parts = [(size, float(weight) if weighted else 0.0) for size, weight in zip(sizes, weights, strict=False)]
    order, cursor = RowOrder(parts=parts, run_seed=seed, shuffle=shuffle), Cursor()
    seen: list[int] = []
    for _ in range(3 * sum(sizes)):
        started = RowOrder(parts=parts, run_seed=seed, shuffle=shuffle)  # a sampler started here
        row, after = started.take(Cursor.parse(cursor.text()))
        assert (row, after) == order.take(cursor)
        seen.append(row)
        cursor = after
    starts = list(accumulate(sizes, initial=0))
    shares = quotas(parts) if weighted else sizes
    for i, size in enumerate(sizes):
        own = Counter(row for row in seen if starts[i] <= row < starts[i + 1])
        whole = len(seen) // sum(shares) * shares[i]
        assert whole <= own.total() <= whole + shares[i]
        assert not own or max(own.values()) - min(own.get(starts[i] + k, 0) for k in range(size)) <= 2
