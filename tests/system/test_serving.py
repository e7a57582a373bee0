"""Whole runs whose engines serve something else than the trainer trains: FP8 of it, or, by mistake, another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from actors.trainer.torch_backend.fp8 import quantized, scheme_of
from tests.crash.conftest import Launch
from tests.crash.judge import judge
from tests.crash.toy import make_toy
from tests.engine.conftest import engine_process

pytestmark = pytest.mark.timeout(1200)


def as_fp8(source: Path, target: Path) -> Path:
    """A copy of a model directory, quantised in blocks that no shape is a multiple of."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [24, 24],
    }
    (target / "config.json").write_text(json.dumps(config))
    scheme = scheme_of(target)
    assert scheme is not None
    save_file(quantized(load_file(source / "model.safetensors"), scheme), target / "model.safetensors")
    return target


def differences(run) -> list[float]:
    """Mean |log-prob of the trainer - of the engine| of each step."""
    lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    return [r["metrics"]["train/train_rollout_logprob_abs_diff"] for r in lines if r["kind"] == "step"]


def test_a_plain_trainer_publishes_fp8_to_its_engines(run_of: Launch, toy: Path, tmp_path: Path) -> None:
    fp8 = as_fp8(toy / "model", tmp_path / "fp8")
    run = run_of(
        {
            "model": {"hf_checkpoint": str(fp8)},
            "ckpt": {"ref_load": str(toy / "model"), "save_interval": 1},
            "rollout": {"num_rollout": 2, "max_weight_staleness": 0},
        }
    )
    run.start()
    assert run.join() == 0, run.story()
    judge(run)
    found = differences(run)
    assert len(found) == 2
    assert all(1e-5 < value < 0.05 for value in found), "FP8 weights are near the trained ones, and not the same"
    masters = load_file(run.checkpoints / "iter_0000002" / "model.safetensors")
    begun = load_file(toy / "model" / "model.safetensors")
    assert {str(t.dtype) for t in masters.values()} == {"torch.float32"} and masters.keys() == begun.keys()


def test_an_engine_of_another_model_is_left_out_and_the_run_goes_on(
    run_of: Launch, toy: Path, warm: Path | None, tmp_path: Path
) -> None:
    other = make_toy(tmp_path / "other", hidden_size=48) / "model"
    with engine_process(toy / "model", warm=warm) as (good, _), engine_process(other, warm=warm) as (wrong, _):
        run = run_of(
            {
                "rollout": {"num_rollout": 2},
                "sglang": {
                    "engine": "external",
                    "rollout_external_engine_addrs": [good, wrong],
                    "num_generation_workers": 2,
                },
            }
        )
        run.start()
        assert run.join() == 0, run.story()
        judge(run)
    [note] = [line for line in run.output().splitlines() if "generation-1" in line]
    assert "refused to start" in note and "its hidden_size is 48" in note and "has 32" in note
    assert "--rollout-external-engine-addrs" in note and note.endswith("the other engines go on")
