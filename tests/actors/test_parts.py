"""What data sets write in several ways is read as what it means, or refused with its row: messages, labels, metadata, files."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.runtime.parts import BadRow, parts_of
from actors.runtime.prompts import load_prompts
from actors.runtime.rows import count, read, sources_of
from actors.runtime.run import Refused
from tests.declared import data_of

KEYS = {"input_key": "prompt", "label_key": "label", "metadata_key": "metadata", "tool_key": "tools"}
ASKED = [{"role": "user", "content": "1+1="}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (b"36", "36"),
        (36.0, "36"),
        (-0.0, "0"),
        (36.5, "36.5"),
        (float("nan"), ""),
        (None, ""),
        (["12"], "12"),
        ([12.0], "12"),
        ([[7]], BadRow),
        (["1", "2"], BadRow),
        ([], BadRow),
        ({"a": "1"}, BadRow),
        (float("inf"), BadRow),
        (b"\xff", BadRow),
        (Decimal("3.50"), "3.5"),
        (Decimal("36.00"), "36"),
        (Decimal("Infinity"), BadRow),
        (1 << 80, str(1 << 80)),
        (2.0**60, str(2.0**60)),  # what a float of this size was before nobody knows
        (True, "True"),
        ("36.0", "36.0"),
    ],
)
def test_a_label_is_read_as_what_it_means(label: Any, text: Any) -> None:
    if text is BadRow:
        with pytest.raises(BadRow, match="the label") as caught:
            parts_of({"prompt": "1+1=", "label": label}, KEYS, chat=False)
        assert caught.value.setting == "label_key" and "\n" not in str(caught.value)
    else:
        assert parts_of({"prompt": "1+1=", "label": label}, KEYS, chat=False).label == text


@pytest.mark.parametrize(
    "prompt",
    [
        ASKED,
        json.dumps(ASKED),
        b'[{"role": "user", "content": "1+1="}]',
        [{"role": "human", "content": "1+1="}],
        [{"from": "human", "value": "1+1="}],
        json.dumps([{"from": "human", "value": "1+1=", "weight": None}]),
    ],
)
def test_messages_are_read_in_each_form_that_data_sets_have(prompt: Any) -> None:
    assert parts_of({"prompt": prompt}, KEYS, chat=True).prompt == ASKED
    with pytest.raises(BadRow, match="set --apply-chat-template"):
        parts_of({"prompt": prompt}, KEYS, chat=False)


def test_a_text_that_only_looks_like_messages_stays_text() -> None:
    for text in (
        '[{"role": "user"',
        '["role", "user"]',
        'What does [{"role": "user", "content": "x"}] mean?',
        '[{"role": 1}, 2]',
    ):
        assert parts_of({"prompt": text}, KEYS, chat=True).prompt == text


@pytest.mark.parametrize("content", [None, "", "  ", 7, {"text": "1"}, [], [{"type": "text", "text": ""}], [{"type": "text"}]])
def test_a_question_that_would_not_reach_the_model_is_refused(content: Any) -> None:
    for message in ({"role": "user", "content": content}, {"role": "user"}):
        with pytest.raises(BadRow, match="message 2, of user, has") as caught:
            parts_of({"prompt": [{"role": "system", "content": ""}, message]}, KEYS, chat=True)
        assert "\n" not in str(caught.value)


def test_messages_may_say_nothing_where_that_means_something() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    prompt = [{"role": "system", "content": ""}, *ASKED, call, {"role": "tool", "content": ""}]
    assert parts_of({"prompt": prompt}, KEYS, chat=True).prompt == prompt


@pytest.mark.parametrize("role", [None, "", 3])
def test_a_role_that_is_no_text_is_refused(role: Any) -> None:
    with pytest.raises(BadRow, match="message 1 has the role"):
        parts_of({"prompt": [{"role": role, "content": "x"}]}, KEYS, chat=True)


def test_metadata_and_tools_may_be_json_text() -> None:
    row = {"prompt": "1", "metadata": '{"level": 2}', "tools": b'[{"name": "f"}]'}
    found = parts_of(row, KEYS, chat=True)
    assert found.metadata == {"level": 2, "tools": [{"name": "f"}]} and found.tools == [{"name": "f"}]
    assert parts_of({"prompt": "1", "metadata": " "}, KEYS, chat=True).metadata == {}
    for metadata in ('{"level": 2', "[1]", 7):
        with pytest.raises(BadRow, match="the metadata under 'metadata' is"):
            parts_of({"prompt": "1", "metadata": metadata}, KEYS, chat=True)


def loaded(folder: str, rows: Any, template: str = TEMPLATE, *, name: str = "rows.jsonl", **spec: Any) -> list[Any]:
    file = Path(folder) / name
    file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    (Path(folder) / "own.jinja").write_text(template)
    how = {"apply_chat_template": True, "chat_template_path": f"{folder}/own.jinja", "tokenizer_dir": folder}
    return load_prompts(data_of(**(how | {"path": str(file)} | spec))).prompts


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            TEMPLATE,
            [{"role": "teacher", "content": "1"}, *ASKED],
            "message 1 has the role 'teacher', which the chat template",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            [{"role": "system", "content": "Add the numbers."}, *ASKED],
            "message 1, of system, is not in what the chat template made of it: 'Add the numbers.'",
        ),
        (
            "{{ messages[-1].content }}",
            [*ASKED, {"role": "user", "content": "and 2+2="}],
            "message 1, of user, is not in",
        ),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", ASKED, "message 1, of user, is not in"),
    ],
)
def test_what_a_template_does_not_show_is_refused_with_its_row(tokenizer_dir: str, template: str, messages: Any, says: str) -> None:
    with pytest.raises(Refused, match=r"rows\.jsonl row 2: ") as caught:
        loaded(tokenizer_dir, [{"prompt": "1"}, {"prompt": messages}], template)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_may_know_roles_of_its_own_and_lay_texts_out_anew(tokenizer_dir: str) -> None:
    own = TEMPLATE + "{% if messages[0].role == 'observer' %}{% endif %}"
    [prompt] = loaded(tokenizer_dir, [{"prompt": [{"role": "observer", "content": "1"}, *ASKED]}], own)
    assert prompt.text.startswith("<observer>1")
    past = [
        *ASKED,
        {"role": "assistant", "content": "<think>1 and 1</think>2"},
        {"role": "user", "content": '"3"\n +\t4 '},
    ]
    for shown in ("{{ m.content.split('</think>')[-1].split() | join(' ') }}", "{{ m.content | tojson }}"):
        template = "{% for m in messages %}" + shown + "{% endfor %}"
        assert "2" in loaded(tokenizer_dir, [{"prompt": past}], template)[0].text


def test_one_list_of_rows_is_a_file_and_so_is_a_row_a_line(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(3)]
    (tmp_path / "list.json").write_text("\ufeff " + json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("list.json", "lines.json"):
        [source] = sources_of(f"{tmp_path / name}@[1:]")
        assert [placed.row for placed in read(source)] == rows[1:] and count(source) == (2, 3)
    for text, says in (
        ('[{"prompt": "1"}, 2]', "row 2, is not a JSON object"),
        ('[{"prompt": "1"},\n oops]', "not a JSON list of rows: Expecting value in line 2"),
        ("[" * 100_000, "not a JSON list of rows"),
        ('{\n"prompt": "1"}', "line 1, is not JSON"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(Refused) as caught:
            list(read(sources_of(str(tmp_path / "bad.json"))[0]))
        assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (str(tmp_path / "pipe.jsonl"), "/dev/zero"):
        with pytest.raises(Refused, match="is neither a file nor a folder"):
            count(sources_of(path)[0])


def test_maps_of_arrow_are_tables(tmp_path: Path, tokenizer_dir: str) -> None:
    counts = pa.map_(pa.string(), pa.int64())
    kind = pa.struct([("level", pa.int64()), ("of", counts), ("many", pa.list_(counts))])
    told = [{"level": 1, "of": [("a", 1)], "many": [[("b", 2)], []]}, {"level": 2, "of": [], "many": None}]
    table = pa.table({"prompt": ["1", "2"], "metadata": pa.array(told, kind), "label": pa.array([3, None], pa.int64())})
    pq.write_table(table, tmp_path / "rows.parquet")
    found = load_prompts(data_of(path=str(tmp_path / "rows.parquet"), tokenizer_dir=tokenizer_dir)).prompts
    assert [prompt.metadata for prompt in found] == [
        {"level": 1, "of": {"a": 1}, "many": [{"b": 2}, {}]},
        {"level": 2, "of": {}, "many": None},
    ]
    assert [prompt.label for prompt in found] == ["3", ""]


def test_keys_lead_into_lists_and_json_text(tokenizer_dir: str) -> None:
    row = {"prompt": ASKED, "truth": '{"all": ["12", "13"]}'}
    assert loaded(tokenizer_dir, [row], label_key="truth.all.1")[0].label == "13"
    for key in ("truth.all.2", "truth.all.-1", "truth.all.x", "truth.none"):
        with pytest.raises(Refused, match=f"has no key '{key}'"):
            loaded(tokenizer_dir, [row], label_key=key)
