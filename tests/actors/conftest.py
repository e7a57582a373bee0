"""A tokenizer, a data set and a model's configuration in one directory, for rooms that read such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.actors.garbage import VOCABULARY


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> str:
    vocabulary = {"<unk>": 0} | {c: i + 1 for i, c in enumerate("0123456789+=")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return str(tmp_path)
