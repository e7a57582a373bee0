"""One command learns: a whole run through the real launcher, engines and Redis, then replayed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.launcher.prepare import free_weights, shared_memory
from tests.crash.conftest import Launch
from tests.crash.house import evaluating, merged
from tests.crash.judge import judge
from tests.crash.test_detach import assert_ended_run_can_be_asked, contents

pytestmark = pytest.mark.timeout(1200)


def records(run, kind: str) -> list[dict]:
    """Lines of one kind in metrics.jsonl."""
    lines = (run.dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def test_a_run_from_prompt_to_gradient_and_back(run_of: Launch, toy: Path) -> None:
    settings = merged(
        evaluating(toy),
        {
            "rollout": {"num_rollout": 4},
            "grpo": {"use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"},
            "launch": {"report": True},
        },
    )
    run = run_of(settings)
    run.start()
    assert run.join() == 0, run.story()
    judge(run)

    steps = records(run, "step")
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    first = steps[0]["metrics"]
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4, "engine and trainer compute the same log-probs"
    assert first["train/kl_loss"] == 0.0, "the policy is its own reference before the first update"
    assert first["train/pg_clipfrac"] == 0.0
    assert all(s["metrics"]["rollout/fully_async/max_staleness"] <= 2 for s in steps)
    assert {e["step"] for e in records(run, "eval")} >= {0, 4}
    report = (run.dir / "report.html").read_text()
    assert 'id="data"' in report and "http://" not in report.replace("http://www.w3.org", "")

    replayed = run.command("replay", "--run", "r", "--from", "3", "--to", "4")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all steps equal bit for bit" in replayed.stdout

    before, in_memory = contents(run.dir), shared_memory(run.dir).parent
    free_weights(in_memory / "weights")  # which was made to be named
    run.start()
    assert run.join() == 0
    assert "run r has finished: 4 of 4 steps are done" in run.output()
    assert not in_memory.exists(), "nor leaves a folder in shared memory"
    assert contents(run.dir) == before, "a finished run that is started again says so and touches nothing"
    assert_ended_run_can_be_asked(run)

    run.start(flags=("--num-rollout", "6"))
    assert run.join() == 0, run.story()
    assert [s["step"] for s in records(run, "step")] == [1, 2, 3, 4, 5, 6], "given more steps it goes on"
    judge(run, steps=6)


def test_users_mistakes_are_refused_in_one_line_before_anything_starts(run_of: Launch, toy: Path) -> None:
    cases = {
        ("--prompt-data", "nowhere.jsonl"): "nowhere.jsonl",
        ("--input-key", "question"): "question",
        ("--rm-type", "exactmatch"): "exact_match",
        ("--global-batch-size", "7"): "global_batch_size",
        ("--rollout-bach-size", "4"): "rollout-batch-size",
        ("--bus-url", "redis://127.0.0.1:1"): "127.0.0.1:1",
        ("--hf-checkpoint", str(toy)): "config.json",
    }
    run = run_of()
    for flags, named in cases.items():
        run.start(flags=flags)
        assert run.join() == 2, (flags, run.story())
        last = (run.home / "launcher.log").read_text().strip().splitlines()[-1]
        assert named in last, (flags, last)
    log = (run.home / "launcher.log").read_text()
    assert "Traceback" not in log
    assert len(log.strip().splitlines()) == len(cases)
    assert not (run.dir / "actors").exists()
