"""docs/metrics.md names what a run of the quickstart writes: every metric, every kind of line, and nothing else as always there."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace

import pytest

from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.model import make_model
from miles_async.quickstart.task import WarmStart
from tests.crash.conftest import Launch
from tests.crash.house import REPO, merged

pytestmark = pytest.mark.timeout(1200)

LESSONS = WarmStart(learn_steps=100, careless_steps=8, batch_size=24, development=50, accepted=(0.0, 1.0))
BEGINNER = replace(ARITHMETIC, lessons=LESSONS)
"""A warm start of a second."""
SMALL = {"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "over_sampling_batch_size": 6}


def section(page: str, head: str) -> list[str]:
    """Names in the first cells of the tables below a heading."""
    body = page.partition(f"## {head}\n")[2].partition("\n## ")[0]
    return [name for cell in re.findall(r"^\| (`[^|]+) \|", body, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)]


def pattern(name: str) -> re.Pattern[str]:
    """Capital letters stand for a number or a name."""
    return re.compile(re.sub(r"[A-Z]+", r"\\w+", re.escape(name)))


def test_the_page_names_what_the_quickstart_writes(run_of: Launch) -> None:
    tables = tomllib.loads((REPO / "configs" / "quickstart.toml").read_text(encoding="utf-8"))
    name, held_out = tables["eval"]["eval_prompt_data"]
    moved = {
        "rollout": {"prompt_data": str(REPO / tables["rollout"]["prompt_data"]), **SMALL},
        "eval": {"eval_prompt_data": [name, f"{REPO / held_out}@[0:24]"], "eval_interval": 3},
    }
    run = run_of(merged(tables, moved))
    make_model(run.home / "runs" / ".models" / "arithmetic-seed1234", BEGINNER, seed=1)
    run.start()
    assert run.join() == 0, run.story()

    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    for kind, head in (("step", "In every step"), ("eval", "In every evaluation")):
        written = {name for line in lines if line["kind"] == kind for name in line["metrics"]}
        told = [pattern(name) for name in section(page, head)]
        assert written and told
        assert [name for name in sorted(written) if not any(p.fullmatch(name) for p in told)] == [], "not on the page"
        assert [p.pattern for p in told if not any(map(p.fullmatch, written))] == [], "on the page and not written"
    assert {line["kind"] for line in lines} <= set(section(page, "Kinds of lines"))
