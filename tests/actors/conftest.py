"""A tokenizer, a data set and a model's configuration in one directory, for rooms that read such; a version of weights, and depots
that serve one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.runtime import depot as depot_module
from actors.runtime.depot import Depot
from tests.actors.garbage import VOCABULARY
from tests.actors.parcels import SIZE, Serve


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


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "v1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(Random(1).randbytes(SIZE))
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    return folder


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Depots of folders, whatever the parcel; impatient, so that what never comes is known soon."""
    monkeypatch.setattr(depot_module, "PATIENCE_S", 0.3)
    made: list[Depot] = []

    def make(folder: Path) -> Depot:
        made.append(Depot(lambda _: folder, "secret", host="127.0.0.1", bind="127.0.0.1"))
        return made[-1]

    yield make
    for depot in made:
        depot.close()
