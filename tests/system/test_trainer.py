"""The trainer in whole runs: several ranks, hooks, the first step's self-check, and batches that cannot be trained."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from actors.trainer.followers import MODULE
from tests.crash.conftest import Launch
from tests.crash.house import RUN_DEADLINE_S, Run
from tests.crash.judge import judge
from tests.system.test_train import records

PATIENCE_S = RUN_DEADLINE_S  # two ranks load torch twice, and again after a death

HUGE = """
import torch

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: 1e6 * (x * torch.cat(loss_masks)).sum()
"""
CHOOSY = """
def advantages(args, inputs):
    if inputs.mask.numel() > 100:
        raise RuntimeError("this batch is not for me")
    a = inputs.rewards[inputs.index]
    return a, a
"""


def followers(run: Run) -> list[int]:
    """Pids of the ranks other than 0."""
    found = []
    for process in run.processes():
        try:
            if MODULE in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def last_line(run: Run) -> str:
    return run.output().strip().splitlines()[-1]


@pytest.mark.timeout(1200)
def test_two_ranks_finish_and_survive_the_death_of_one(run_of: Launch) -> None:
    run = run_of({"perf": {"actor_num_gpus_per_node": 2}, "rollout": {"num_rollout": 5}, "ckpt": {"save_interval": 1}})
    run.start(fault="trainer:before_step:3:STOP", flags=("--ci-test",))
    run.until("the third step", lambda: run.struck, seconds=PATIENCE_S)
    [rank] = followers(run)
    os.kill(rank, signal.SIGKILL)
    run.kill("trainer", signal.SIGCONT)
    run.until("another rank 1", lambda: bool(followers(run)) and followers(run) != [rank], seconds=PATIENCE_S)
    run.finish(seconds=PATIENCE_S)
    assert not followers(run)
    judge(run)
    faults = [f["text"] for f in records(run, "fault") if f["event"] == "restart"]
    assert len(faults) == 1, faults
    assert "rank 1 of 2 of the trainer was killed by signal 9" in faults[0]
    assert records(run, "restored")[-1]["step"] >= 1


@pytest.mark.timeout(1200)
def test_a_first_step_that_cannot_be_trained_or_fails_its_self_check_ends_the_run_and_is_trained_once_the_cause_is_gone(
    run_of: Launch,
) -> None:
    """First a function refuses the batch; then a step fails its self-check, which ends the run under --ci-test only."""
    run = run_of({"rollout": {"num_rollout": 2}, "grpo": {"custom_pg_loss_reducer_function_path": "huge.reducer"}})
    (run.home / "huge.py").write_text(HUGE)
    (run.home / "choosy.py").write_text(CHOOSY)
    run.start(flags=("--custom-advantage-function-path", "choosy.advantages"))
    assert run.join(seconds=PATIENCE_S) == 1, run.story()
    assert "trainer cannot go on: step 1 cannot be trained: custom_advantage_function_path" in last_line(run)
    assert "this batch is not for me" in last_line(run) and "Its 4 groups stay pending" in last_line(run)
    assert "Traceback" not in run.output()
    assert not [f for f in records(run, "fault") if f["event"] == "restart"]

    run.start(flags=("--ci-test",))
    assert run.join(seconds=PATIENCE_S) == 1, run.story()
    assert "trainer cannot go on: step 1 failed 1 of its" in last_line(run)
    assert "grad_norm = " in last_line(run) and "Likely cause: " in last_line(run)
    assert not [f for f in records(run, "fault") if f["event"] == "restart"]
    assert "self-check" in [f["event"] for f in records(run, "fault") if f["actor"] == "trainer"]

    run.start()
    assert run.join(seconds=PATIENCE_S) == 0, run.story()
    judge(run)
