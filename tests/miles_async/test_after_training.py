"""After a run: its checkpoint answers by `chat` and, to OpenAI's client, by `serve-model`; `export` writes it as a plain model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_async.cli.app import main
from miles_async.settings.runs import write_run_file
from tests.engine.models import make_model
from tests.miles_async.mistakes import ROOT, TOKENIZER

ENDS_S = 60


def run_with(tmp_path: Path, *steps: int) -> Path:
    """A run's folder as training leaves it: checkpoints with the optimizer's files beside the model's."""
    run_dir = tmp_path / "runs" / "one"
    for step in steps:
        at = run_dir / "checkpoints" / f"iter_{step:07d}"
        make_model("qwen3", at, seed=step)
        vocabulary = {f"w{i}": i for i in range(30)} | {"?": 30}
        made = json.loads(TOKENIZER) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}
        made["model"]["vocab"] = vocabulary
        (at / "tokenizer.json").write_text(json.dumps(made))
        (at / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (at / "generation_config.json").write_text('{"eos_token_id": 29}')
        (at / "optimizer.safetensors").write_bytes(b"the trainer's")
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{max(steps)}\n")
    (run_dir / "settings.toml").write_text("[rollout]\nrollout_max_response_len = 8\n")
    write_run_file(run_dir, run="one", bus_url="redis://127.0.0.1:1/0")
    return run_dir


def greedy(model: Path, text: str, n: int) -> str:
    """What transformers says with the model in that directory."""
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(text, return_tensors="pt").input_ids
    made = loaded.generate(ids, max_new_tokens=n, do_sample=False, eos_token_id=29, pad_token_id=29)[0, ids.shape[1] :]
    return str(tokenizer.decode([i for i in made.tolist() if i != 29]))


def test_an_export_is_the_model_alone_and_chat_says_what_transformers_says_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path, 3, 5)
    monkeypatch.chdir(tmp_path)
    for step, target in ((3, "first"), (5, "last")):
        assert main(["export", "one", target, *(["--step", "3"] if step == 3 else [])]) == 0
        assert not list(Path(target).glob("optimizer*")) and (Path(target) / "generation_config.json").is_file()
    capfd.readouterr()
    assert main(["chat", "one", "--step", "3", "--ask", "w3 w4", "--threads", "1"]) == 0
    first = capfd.readouterr().out.strip()
    assert first == greedy(tmp_path / "first", "w3 w4", 8), "the checkpoint of that step"
    assert main(["export", "one", "last"]) == 2 and "not empty" in capfd.readouterr().err
    assert main(["chat", "one", "--step", "4", "--ask", "w3"]) == 2
    assert "has no checkpoint of that step" in (said := capfd.readouterr().err) and "It has 3, 5." in said


def test_openais_client_talks_to_a_served_run_whole_and_as_a_stream(tmp_path: Path) -> None:
    run_with(tmp_path, 5)
    (tmp_path / "key").write_text("secret\n")
    words = ["serve-model", "one", "--port", "0", "--threads", "1", "--engine", "cpu", "--api-key-file", "key"]
    process = subprocess.Popen(
        [sys.executable, "-m", "miles_async", *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+/v1", line)
        assert found, line
        client = OpenAI(base_url=found[0], api_key="secret", max_retries=0, timeout=ENDS_S)
        assert [one.id for one in client.models.list()] == ["one"]
        ask = {"model": "one", "messages": [{"role": "user", "content": "w3 w4"}], "temperature": 0.0}
        whole = client.chat.completions.create(**ask)
        text = greedy(tmp_path / "runs/one/checkpoints/iter_0000005", "w3 w4", 8)
        assert whole.choices[0].message.content == text and whole.usage is not None and whole.usage.prompt_tokens == 2
        pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)]
        assert "".join(pieces) == text
        two = client.chat.completions.create(**ask, n=2, max_tokens=3)
        assert [choice.finish_reason for choice in two.choices] == ["length", "length"]
        assert client.completions.create(model="one", prompt="w3 w4", temperature=0.0).choices[0].text == text
        with pytest.raises(BadRequestError, match="leave no space in a context"):
            client.completions.create(model="one", prompt="w3 " * 5000)
        with pytest.raises(Exception, match="asks for its key"):
            OpenAI(base_url=found[0], api_key="other", max_retries=0).models.list()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0 and "Traceback" not in errors, errors


@pytest.mark.parametrize("command", ["chat", "serve-model"])
def test_adapters_alone_are_refused_with_the_command_that_merges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    at = run_with(tmp_path, 5) / "checkpoints" / "iter_0000005"
    (at / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main([command, "one"]) == 2
    assert "miles-async export one MODEL" in capfd.readouterr().err
    assert main(["export", "one", "model"]) == 2
    assert "--base DIR" in capfd.readouterr().err and not (tmp_path / "model").exists()


def test_nobody_else_is_served_without_a_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-model", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "--api-key-file" in capfd.readouterr().err
