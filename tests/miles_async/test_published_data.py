"""Data sets as they are published, with the settings that docs/data.md tells for them: right at the first attempt.

The rows are of our own, in the columns, types and file formats of the originals.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from actors.reward.rules import RULES
from actors.reward.sample import Sample
from actors.runtime.prompts import load_prompts
from miles_async.cli.flags import parse_flags
from miles_async.launcher.plan import training_data
from miles_async.launcher.preflight import check_data, check_labels
from miles_async.settings.load import load

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
ASK = "Ann has 7 pens and buys 8 more. How many pens has she?"
SOLVED = "She has 7 + 8 = <<7+8=15>>15 pens.\n#### 15"
TEMPLATE = (
    "{{ tools or '' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


def asked(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"content": ASK, "role": "user"}, *more]


def verl(source: str, truth: str, **extra: Any) -> dict[str, Any]:
    model = {"ground_truth": truth, "style": "rule"}
    return {
        "data_source": source,
        "prompt": asked(),
        "ability": "math",
        "reward_model": model,
        "extra_info": {"index": 0} | extra,
    }


SAID = {"content": "15", "role": "assistant"}
CALLED = '[{"name": "add", "arguments": {"a": 7, "b": 8}}]'
TOOLS = '[{"name": "add", "description": "Adds.", "parameters": {"a": {"type": "int", "description": "one"}}}]'
# data set: (format, a row, its label as it shall be read)
SETS: dict[str, tuple[str, dict[str, Any], str]] = {
    "openai/gsm8k": ("parquet", {"question": ASK, "answer": SOLVED}, SOLVED),
    "GSM8K as verl prepares it": ("parquet", verl("openai/gsm8k", "15", answer=SOLVED, split="train"), "15"),
    "HuggingFaceH4/MATH-500": (
        "jsonl",
        {
            "problem": ASK,
            "solution": "$\\boxed{15}$",
            "answer": "15",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/1.json",
        },
        "15",
    ),
    "HuggingFaceH4/aime_2024": (
        "parquet",
        {"id": 60, "problem": ASK, "solution": "", "answer": "015", "url": "", "year": "2024"},
        "015",
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": ("parquet", verl("math_dapo", "15"), "15"),
    "zhuzilin/dapo-math-17k": ("jsonl", {"prompt": asked(), "label": "15"}, "15"),
    "agentica-org/DeepScaleR-Preview-Dataset": ("json", {"problem": ASK, "answer": "15", "solution": ""}, "15"),
    "Skywork/Skywork-OR1-RL-Data": ("parquet", verl("train-math", '["15"]', model_difficulty={"a": 3}), "15"),
    "allenai/RLVR-GSM": (
        "parquet",
        {"messages": asked(), "ground_truth": "15", "dataset": "gsm8k", "constraint_type": None, "constraint": None},
        "15",
    ),
    "open-r1/OpenR1-Math-220k": (
        "parquet",
        {"problem": ASK, "solution": "", "answer": "15", "generations": ["15"], "messages": asked(SAID)},
        "15",
    ),
    "hiyouga/geometry3k": (
        "parquet",
        {"images": [{"bytes": PIXEL, "path": None}], "problem": f"<image>{ASK}", "answer": "15"},
        "15",
    ),
    "HuggingFaceH4/ultrachat_200k": ("parquet", {"prompt": ASK, "prompt_id": "0", "messages": asked(SAID)}, ""),
    "teknium/OpenHermes-2.5": (
        "json",
        {
            "conversations": [{"from": "human", "value": ASK, "weight": None}, {"from": "gpt", "value": "15"}],
            "source": "x",
        },
        "",
    ),
    "Salesforce/xlam-function-calling-60k": (
        "json",
        {"id": 0, "query": ASK, "answers": CALLED, "tools": TOOLS},
        CALLED,
    ),
}


def written(folder: Path, kind: str, row: dict[str, Any]) -> Path:
    file = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), file)
    else:
        file.write_text(json.dumps([row, row]) if kind == "json" else 2 * (json.dumps(row) + "\n"))
    return file


def told(name: str) -> list[str]:
    """The words of the page's row for a data set."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and name in line.split("|")[1]:
            return shlex.split(line.split("|")[2].strip().strip("`"))
    raise AssertionError(f"{PAGE.name} has no row for {name}")


def test_every_data_set_of_the_page_is_tried() -> None:
    section = PAGE.read_text().split("## Published data sets")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!data set|-)(.+?) \|", section, re.MULTILINE)
    assert len(rows) == len(SETS) and all(any(name in row for row in rows) for name in SETS)


def model_of(folder: Path, kind: str) -> str:
    """A directory that says what reading rows asks of a model: its configuration, words and chat template."""
    folder.mkdir()
    config = {"model_type": kind, "vocab_size": 256, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return str(folder)


@pytest.mark.parametrize("name", SETS)
def test_a_published_data_set_is_read_right_with_what_the_page_tells(name: str, tmp_path: Path) -> None:
    kind, row, label = SETS[name]
    model = model_of(tmp_path / "model", "qwen2_vl" if "images" in row else "qwen2")
    words = [
        "--prompt-data",
        str(written(tmp_path, kind, row)),
        "--hf-checkpoint",
        model,
        "--num-rollout",
        "3",
        *told(name),
    ]
    settings = load(None, parse_flags(words, frozenset()).values).settings
    found, held_out = check_data(settings)
    assert found.rows == 2 and not held_out and check_labels(settings, found) == ()
    if "images" in row:  # shown to a model in tests/actors/test_pictures.py
        return
    first, second = load_prompts(training_data(settings, model, (0,))).prompts
    assert ASK in first.text and first.label == label and first.text == second.text
    assert ("'add'" in first.text) == ("tools" in row)
    if settings.flat.supervised:
        assert sum(first.mask) >= len("15")
    elif settings.flat.rm_type is not None:
        answer = "<think></think>I add.\nAnswer: \\boxed{15}"
        score = RULES[settings.flat.rm_type](Sample(sample_id="0/0", prompt=first.text, response=answer, label=first.label))
        assert (score["score"] if isinstance(score, dict) else score) == 1.0
