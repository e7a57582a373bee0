"""The task of long answers as configs/long.toml has it: first steps of a whole run, from a beginner that can do short columns."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from actors.trainer.record import read_record
from miles_async.quickstart.columns import COLUMNS, draw
from miles_async.quickstart.model import make_model
from miles_async.quickstart.task import WarmStart
from tests.crash.conftest import Launch
from tests.crash.house import REPO, Run, Tables, merged
from tests.crash.judge import judge

pytestmark = pytest.mark.timeout(1200)

BEGINNER = replace(
    COLUMNS,
    draw_lesson=lambda rng, _share: draw(rng, spread=0.5, median=3),
    lessons=WarmStart(learn_steps=160, careless_steps=8, batch_size=24, development=100, accepted=(0.0, 1.0)),
)
"""A warm start of some seconds: right now and then on short columns, lost on long ones."""


def shipped() -> Tables:
    """configs/long.toml, with places that hold from any directory, fewer steps and smaller batches."""
    tables = tomllib.loads((REPO / "configs" / "long.toml").read_text(encoding="utf-8"))
    name, held_out = tables["eval"]["eval_prompt_data"]
    return merged(
        tables,
        {
            "rollout": {
                "prompt_data": str(REPO / tables["rollout"]["prompt_data"]),
                "num_rollout": 3,
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "over_sampling_batch_size": 8,
            },
            "eval": {"eval_prompt_data": [name, f"{REPO / held_out}@[0:24]"], "eval_interval": 3},
            "ckpt": {"save_interval": 3},
        },
    )


def responses(run: Run) -> list[int]:
    """Response tokens of every trained sample."""
    pattern = Path(str(run.setting("ckpt", "save_debug_rollout_data")))
    records = [read_record(pattern.with_name(f"{step}.msgpack")) for step in range(run.steps)]
    return [m.rollout.response.n_tokens for r in records for g in r.groups for m in g.samples]


def test_long_answers_train_from_the_first_step(run_of: Launch) -> None:
    run = run_of(shipped())
    make_model(run.home / "runs" / ".models" / "columns-seed1234", BEGINNER, seed=1)
    run.start()
    assert run.join() == 0, run.story()
    judge(run, n_prompts=COLUMNS.train)

    said = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    steps = [r["metrics"] for r in said if r["kind"] == "step"]
    assert [0.0 < m["rollout/raw_reward"] < 1.0 for m in steps] == [True] * 3, "each batch has right and wrong answers"
    assert all(m["train/train_rollout_logprob_abs_diff"] < 1e-3 for m in steps[:1])
    accuracy = [r["metrics"]["eval/held_out"] for r in said if r["kind"] == "eval"]
    assert len(accuracy) == 2 and all(0.0 <= share <= 1.0 for share in accuracy)
    lengths = sorted(responses(run))
    assert lengths[0] <= 20 and lengths[-1] >= 40, f"a beginner's answers differ in length: {lengths}"
