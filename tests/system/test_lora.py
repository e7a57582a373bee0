"""configs/lora.toml as it ships, from the model that the quickstart makes: it learns, and its checkpoint is a PEFT directory."""

from __future__ import annotations

import json
import tomllib

import pytest
from safetensors.torch import load_file

from actors.trainer.lora.merge import merge
from actors.trainer.lora.peft import ADAPTER
from tests.crash.conftest import Launch
from tests.crash.house import REPO, merged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_recipe_learns_the_quickstarts_task(run_of: Launch) -> None:
    tables = tomllib.loads((REPO / "configs" / "lora.toml").read_text(encoding="utf-8"))
    name, held_out = tables["eval"]["eval_prompt_data"]
    places = {
        "rollout": {"prompt_data": str(REPO / tables["rollout"]["prompt_data"])},
        "eval": {"eval_prompt_data": [name, str(REPO / held_out)]},
    }
    run = run_of(merged(tables, places))
    run.start()
    assert run.join() == 0, run.story()
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    scores = [line["metrics"]["eval/held_out"] for line in lines if line["kind"] == "eval"]
    assert scores[0] < 0.45 and scores[-1] > 0.8, scores
    newest = max(run.dir.rglob(ADAPTER), key=lambda path: path.stat().st_mtime).parent
    base = run.home / "runs" / ".models" / "arithmetic-seed1234"
    merge(base, newest, run.home / "whole")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, run.home / "whole"))
    assert {name for name, t in after.items() if not t.equal(before[name])} == {n for n in before if "_proj.weight" in n}
