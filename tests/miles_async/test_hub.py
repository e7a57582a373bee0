"""Models and data sets by their names on the Hub, against a server that speaks its API, in processes of their own: huggingface_hub
reads its variables when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_async.launcher.hub import chosen
from miles_async.settings.errors import SettingsError
from miles_async.settings.hub_names import HubName, data_name, model_name, names_data, revisions_in
from tests.miles_async.hub_server import hub, revision_of

ROOT = Path(__file__).parents[2]
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "evil.py": b"1/0",
    "pytorch_model.bin": b"x",
}
CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n"
CARD += b"    path: main/test-*\n- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train-*\n---\nwords\n"
ROW = b'{"question": "1+1?", "answer": "2"}\n'
GSM = {
    "README.md": CARD, "main/train-00000-of-00001.jsonl": ROW * 3, "main/test-00000-of-00001.jsonl": ROW,
    "socratic/train-00000-of-00002.jsonl": ROW, "socratic/train-00001-of-00002.jsonl": ROW * 4,
}  # fmt: skip
REPOS: dict[str, dict[str, bytes]] = {
    "models/Qwen/tiny": MODEL,
    "models/owner/gated": MODEL,
    "models/owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    "datasets/openai/gsm8k": GSM,
    "datasets/owner/plain": {"train.csv": b"question,answer\n1+1?,2\n", "test.csv": b"question,answer\n"},
}
ASK = """
import json, sys
from miles_async.launcher.hub import data_paths, model_path
from miles_async.settings.errors import SettingsError
found = []
for what, text, kept, fetch in json.loads(sys.argv[1]):
    try:
        found.append({"model": model_path, "data": data_paths}[what](text, "here", kept, fetch=fetch))
    except SettingsError as error:
        found.append(f"REFUSED {error}")
print(json.dumps(found))
"""


def asked(tmp_path: Path, url: str, *asks: tuple[str, str], kept: Any = None, fetch: bool = True, **variables: str) -> list[str]:
    home = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    body = json.dumps([[what, text, kept or {}, fetch] for what, text in asks])
    done = subprocess.run(
        [sys.executable, "-c", ASK, body], env=env | home | variables | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_model_of_the_hub_is_a_directory_without_code_and_pickles(tmp_path: Path) -> None:
    with hub(REPOS) as (url, _):
        (path,) = asked(tmp_path, url, ("model", "Qwen/tiny"))
        (pickled,) = asked(tmp_path, url, ("model", "owner/pickled"))
    assert sorted(file.name for file in Path(path).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert revisions_in(path) == {"models/Qwen/tiny": revision_of(MODEL)}
    assert "owner/pickled on the Hub has no safetensors" in pickled


def test_a_run_keeps_the_revision_that_it_began_with_and_works_from_the_cache_without_the_hub(tmp_path: Path) -> None:
    repos = dict(REPOS)
    with hub(repos) as (url, _):
        (first,) = asked(tmp_path, url, ("model", "Qwen/tiny"))
        repos["models/Qwen/tiny"] = MODEL | {"model.safetensors": b"others!"}
        (kept,) = asked(tmp_path, url, ("model", "Qwen/tiny"), kept=revisions_in(first))
        (moved,) = asked(tmp_path, url, ("model", "Qwen/tiny"))
    assert kept == first != moved
    assert asked(tmp_path, url, ("model", "Qwen/tiny"), kept=revisions_in(first)) == [first], "nobody is there any more"
    assert asked(tmp_path, url, ("model", "Qwen/tiny"), fetch=False, HF_HUB_OFFLINE="1") == [moved]


def test_a_split_of_a_data_set_is_its_file_or_a_folder_of_its_files_with_slices_and_weights(tmp_path: Path) -> None:
    with hub(REPOS) as (url, _):
        asks = [
            ("data", t) for t in ("openai/gsm8k", "openai/gsm8k:test@[0:1]", "openai/gsm8k:socratic/train", "owner/plain:train")
        ]
        first, test, both, plain = asked(tmp_path, url, *asks)
        (mixed,) = asked(tmp_path, url, ("data", "3*openai/gsm8k:train, 1*owner/plain"))
    assert Path(first).read_bytes() == ROW * 3 and first.endswith("main/train-00000-of-00001.jsonl")
    assert test.endswith("main/test-00000-of-00001.jsonl@[0:1]") and plain.endswith("train.csv")
    assert [file.read_bytes() for file in sorted(Path(both).iterdir())] == [ROW, ROW * 4]
    assert mixed == f"3*{first}, 1*{plain}"
    assert revisions_in(both, plain).keys() == {"datasets/openai/gsm8k", "datasets/owner/plain"}


def test_what_the_hub_lacks_or_does_not_give_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    with hub(REPOS) as (url, _):
        none, gated, rev, split, config = asked(
            tmp_path, url,
            ("model", "mdoels/qwen"), ("model", "owner/gated"), ("model", "Qwen/tiny@v9"), ("data", "openai/gsm8k:dev"),
            ("data", "openai/gsm8k:other/train"),
        )  # fmt: skip
    assert "no such directory here (looked in" in none and f"{url} shows no model of this name" in none
    assert f"Accept them at {url}/owner/gated, then: hf auth login." in gated
    assert "Qwen/tiny on" in rev and "no such revision" in rev
    assert "has no split dev. It has train, test: write openai/gsm8k:train." in split
    assert "has no configuration other. It has main, socratic." in config


def test_without_the_hub_one_line_names_the_command_that_downloads(tmp_path: Path) -> None:
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        model, data = asked(tmp_path, "http://127.0.0.1:9", ("model", "Qwen/tiny"), ("data", "openai/gsm8k"), **variables)
        assert "Where it is reached: hf download Qwen/tiny;" in model and "http://127.0.0.1:9 is not reached" in model
        assert "Where it is reached: hf download openai/gsm8k --repo-type dataset;" in data
        assert "\n" not in model + data
    assert asked(tmp_path, "http://127.0.0.1:9", ("data", "openai/gsm8k"), fetch=False) == ["openai/gsm8k"]


def test_a_local_folder_of_that_name_wins_and_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name("Qwen/tiny") == HubName("model", "Qwen/tiny") and data_name("openai/gsm8k") is not None
    for folder in ("Qwen/tiny", "openai/gsm8k"):
        (tmp_path / folder).mkdir(parents=True)
    assert model_name("Qwen/tiny") is None and data_name("openai/gsm8k") is None and data_name("openai/gsm8k:train") is None
    for path in ("/a/b", "./a", "a/b/c", "data/x.jsonl", "x", "builtin:arithmetic", "reasoning_gym:a?b=1"):
        assert model_name(path) is None and not names_data(path), path
    assert names_data("3*a/b@[0:5], 1*data/x.jsonl") and not names_data("3*data/x.jsonl, 1*data/y.csv")


def test_files_of_a_split_are_told_by_the_card_else_by_their_names() -> None:
    name = HubName("dataset", "a/b")
    listed = ["data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet", "dataset_infos.json", "train.py"]
    assert chosen(name, listed, [], "f", "a/b")[0] == listed[:2]
    assert chosen(name, ["only.csv"], [{"config_name": "x", "data_files": "*.csv"}], "f", "a/b")[1:3] == ("x", "train")
    with pytest.raises(SettingsError, match="holds no files of"):
        chosen(name, ["script.py"], [], "f", "a/b")
