"""Two strictly on-policy runs in the deterministic mode are one: samples, log-probs, loss, gradients and weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.crash.conftest import Launch
from tests.crash.house import merged

pytestmark = pytest.mark.timeout(1200)


def test_two_runs_in_the_deterministic_mode_are_equal_to_the_last_bit(run_of: Launch) -> None:
    settings = {
        "rollout": {"num_rollout": 3, "max_weight_staleness": 0, "over_sampling_batch_size": 4},
        "sglang": {"num_generation_workers": 2},
        "ckpt": {"no_save": True},
        "launch": {"deterministic_mode": True, "debug_determinism": True},
    }
    runs = [run_of(settings), run_of(merged(settings, {"sglang": {"sglang_server_concurrency": 3}}))]  # in other company
    for run in runs:
        run.start()
    assert [run.join() for run in runs] == [0, 0], "\n".join(run.story() for run in runs)
    hashes, metrics = ([told(run.dir) for run in runs] for told in (hashes_of, trained))
    assert [line["step"] for line in hashes[0]] == [1, 2, 3]
    assert hashes[0] == hashes[1]
    assert metrics[0] == metrics[1] and {"train/loss", "train/grad_norm", "train/train_rollout_kl"} <= metrics[0][0].keys()


def hashes_of(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "determinism.jsonl").read_text().splitlines()]


def trained(run_dir: Path) -> list[dict[str, float]]:
    """What the trainer computed in each step; seconds and rates are not of it."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    return [{k: v for k, v in step.items() if k.startswith("train/") and not k.endswith("_s")} for step in steps]
