"""Mistakes that cost nothing to find: one line, status 2, nothing printed before it, nothing left on disk, no library loaded."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(16)
GOOD = (
    "--hf-checkpoint model --prompt-data d.jsonl --input-key q --label-key a --num-rollout 2 --rollout-batch-size 2 --rm-type math"
)
MISTAKES = {
    "--hf-checkpoint nope": ("hf_checkpoint = 'nope': no such directory (looked in", "Give a downloaded Hugging Face directory"),
    "--hf-checkpoint cut": ("hf_checkpoint = 'cut': model.safetensors is cut: it has", "Download it again."),
    "--hf-checkpoint empty": ("the directory has no config.json", "Give a directory with config.json"),
    "--hf-checkpoint builtin:nope": ("no such builtin model", "Builtin models: builtin:arithmetic"),
    "--prompt-data none.jsonl": ("prompt_data = 'none.jsonl': no such file (looked in", "Give the path of a data set."),
    "--prompt-data d.tsv": (".tsv is not a known data format", "Give a .jsonl, .json, .csv"),
    "--prompt-data bad.jsonl": ("bad.jsonl, line 2, is not JSON", "Each line must be one JSON object."),
    "--prompt-data none.csv@[0:x]": ("not a slice", "Write path@[a:b] with whole numbers."),
    "--input-key question": ("has no key 'question'", "input_key = 'question'"),
    "--label-key answer": ("label_key = 'answer'", "has no key 'answer'"),
    "--rm-type maths": ("rm-type = 'maths'", "Did you mean math?"),
    "--custom-rm-path r.py:scor": ("r.py has no function scor", "Did you mean score?"),
    "--custom-rm-path none.py:score": ("no such file none.py (looked in", "Write FILE.py:NAME."),
    "--custom-rm-path broken.py:score": ("broken.py, line 1:", "Correct it."),
    "--chat-template-path none.jinja --apply-chat-template": ("chat_template_path = 'none.jinja': no such file", "Jinja"),
    "--apply-chat-template": ("apply_chat_template = true: model has no chat template", "--chat-template-path FILE"),
    "--colocate --engine sglang": ("colocate = true: trainer and engines would take turns on a GPU", "Leave it out"),
    "--rollout-max-response-len 9999": ("the model's context", "Set it to at most"),
    "--name a/b": ("name = 'a/b'", "Use letters, digits"),
    "--rollout-bach-size 4": ("rollout-bach-size", "Did you mean --rollout-batch-size?"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, body in {"model": WEIGHTS, "cut": WEIGHTS[:-5], "empty": b""}.items():
        (tmp_path / name).mkdir()
        if body:
            (tmp_path / name / "config.json").write_text('{"max_position_embeddings": 2048}')
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (tmp_path / name / file).write_text("{}")
            (tmp_path / name / "model.safetensors").write_bytes(body)
    row = '{"q": "1+1=", "a": "2"}\n'
    (tmp_path / "d.jsonl").write_text(row * 4)
    (tmp_path / "bad.jsonl").write_text(row + "{\n")
    (tmp_path / "d.tsv").write_text("q\ta\n")
    (tmp_path / "r.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    return tmp_path


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_with_what_is_wrong_and_what_to_do(folder: Path, words: str) -> None:
    what, remedy = MISTAKES[words]
    before = sorted(folder.rglob("*"))
    code = (
        "import sys; from miles_async.cli.app import main; status = main(sys.argv[1:]);"
        "print([n for n in ('torch', 'transformers', 'tokenizers', 'aiohttp') if n in sys.modules]); sys.exit(status)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *GOOD.split(), *words.split()], cwd=folder, env=env, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and what in done.stderr and remedy in done.stderr, done.stderr
    assert sorted(folder.rglob("*")) == before, "nothing is left behind"
