"""Supervised training earns nothing: its lines, tiles and samples tell the loss in place of a reward that is always 0."""

from __future__ import annotations

from typing import Any

import pytest

from actors.recorder.history import History
from miles_async.console.lines import plain_line
from miles_async.console.report import _tiles

STEP: dict[str, Any] = {
    "kind": "step", "wall": 2.0, "step": 1, "version": 2, "groups": [],
    "metrics": {"train/loss": 0.691, "rollout/raw_reward": 0.0, "perf/wait_s": 1.0, "perf/train_s": 1.0},
}  # fmt: skip
SAMPLE: dict[str, Any] = {"kind": "sample", "wall": 2.5, "sample": "g0/0", "prompt": "p", "response": "r", "reward": 0.0, "step": 1}


def said(policy_loss: str) -> tuple[str, str, str]:
    history = History()
    history.fold({"kind": "knob", "wall": 1.0, "epoch": 0, "values": {"policy_loss": policy_loss}})
    history.fold(STEP)
    history.fold(SAMPLE)
    assert len(history.steps) == 1, history.left_out
    return plain_line(STEP, history, total_steps=2), plain_line(SAMPLE, history, total_steps=2), _tiles(history, None)


@pytest.mark.parametrize(("policy_loss", "shown", "hidden"), [("nll", "loss", "reward"), ("ppo", "reward", "loss")])
def test_a_step_tells_what_is_learned_from(policy_loss: str, shown: str, hidden: str) -> None:
    step, sample, tiles = said(policy_loss)
    assert f"  {shown} 0." in step and hidden not in step
    assert ("reward" in sample) == (shown == "reward")
    assert shown in tiles and f"{hidden}, last tenth" not in tiles
