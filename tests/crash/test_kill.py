"""Every actor killed with SIGKILL at each step of its protocol: the run finishes and nothing is lost or trained twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.record import read_record
from tests.crash.conftest import Launch
from tests.crash.house import evaluating, merged, until
from tests.crash.judge import judge
from tests.crash.test_stop import PEERS, outlast_a_lease

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

SLICED: dict[str, dict[str, Any]] = {"rollout": {"max_tokens_per_slice": 16}}
ABORTING: dict[str, dict[str, Any]] = {"sglang": {"pause_generation_mode": "abort"}}

# One run of all these, and of a worker that is stopped for longer than a lease, stands for the matrix in every run of the tests.
FAST = ("generation-1:after_save:5", "trainer:checkpoint_half:2", "trainer:after_done:3", "filter:assembling:3")
STOPPED = "generation-0:after_save:4"

POINTS: dict[str, dict[str, dict[str, Any]]] = {
    # the cursor, the groups and their samples are one step
    "sampler:after_append:1": {},
    "sampler:before_append:3": {},
    # a sample under way, a sample done, a weight activation
    "generation:after_save:5": {},
    "generation:before_commit:9": {},
    "generation:after_commit:9": {},
    "generation:activating:3": {},
    # a sample that stopped early, on its way through the partial buffer
    "generation:after_commit:8": SLICED,
    "partial:before_commit:6": SLICED,
    "partial:after_commit:6": SLICED,
    "generation:activating:2": ABORTING,
    # scoring and assembling
    "reward:before_commit:9": {},
    "reward:after_commit:9": {},
    "filter:assembling:3": {},
    "filter:before_commit:3": {},
    "filter:after_commit:3": {},
    # a step, its announcement, its checkpoint
    "trainer:before_step:4": {},
    "trainer:before_done:3": {},
    "trainer:after_done:3": {},
    "trainer:before_announce:4": {},
    "trainer:after_announce:4": {},
    "trainer:checkpoint_copied:1": {},
    "trainer:checkpoint_half:2": {},
    "trainer:checkpoint_durable:3": {},
    "trainer:before_ack:2": {},
    # who serves what
    "publisher:before_order:4": {},
    "publisher:after_order:4": {},
}

# Episodes of several turns, hit between any two of their records; and what comes after them.
EPISODES: dict[str, dict[str, Any]] = {
    **{point: {} for point in ("before_tell:9", "after_tell:9", "before_save:20", "after_save:20", "before_tell:30")},
    **{point: {} for point in ("after_save:60", "before_commit:6", "after_commit:6", "activating:3")},
    "after_tell:25": {"rollout": {"max_tokens_per_slice": 16}},
    "after_save:25": {"rollout": {"max_tokens_per_slice": 7}},
    "after_commit:20": {"rollout": {"max_tokens_per_slice": 10}},
    "activating:2": ABORTING,
    "before_tell:12": {"rollout": {"partial_rollout": False}},
    "after_tell:40": {"rollout": {"staleness_policy": "member"}},
}
PROGRAMS = {
    **{f"rollout:generation:{point}": settings for point, settings in EPISODES.items()},
    **{f"rewritten:{point}": {} for point in ("generation:after_tell:20", "trainer:after_done:3", "trainer:checkpoint_half:2")},
    **{f"rewritten:{point}": {} for point in ("filter:after_commit:3", "reward:after_commit:9", "trainer:before_ack:2")},
    **{f"lost_world:{point}": {} for point in ("generation:after_tell:20", "generation:activating:3")},
}

# Groups leave in parts, so that some are half trained at each of these moments.
IN_PARTS: dict[str, dict[str, Any]] = {"rollout": {"staleness_policy": "member"}}
IN_PARTS_POINTS = (
    *("filter:turned:3", "filter:after_commit:4", "trainer:after_done:3", "trainer:checkpoint_half:2", "trainer:before_ack:2"),
    "sampler:after_append:2",
)


def _cases() -> list[Any]:
    cases = []
    for point, settings in POINTS.items():
        name = point.replace(":", "-") + (
            "-sliced" if settings is SLICED else "-aborting" if settings is ABORTING else ""
        )
        cases.append(pytest.param(point, settings, id=name))
    return cases


EVALUATOR_POINTS = (
    "evaluator:collecting:7",
    "evaluator:after_commit:1",
    "evaluator:before_issue:2",
)


@pytest.mark.slow
@pytest.mark.parametrize("point", EVALUATOR_POINTS)
def test_evaluator_killed_at(point: str, run_of: Launch, toy: Path) -> None:
    run = run_of(evaluating(toy))
    run.start(fault=f"{point}:KILL")
    run.finish()
    assert run.struck, f"nobody came to {point}"
    facts = judge(run)
    measured = [result.step for result in facts.results]
    assert measured[-1] == run.steps, "the last version was not measured"
    assert len(measured) == len(set(measured)), "a version was measured twice"
    assert all(result.n_samples == 12 for result in facts.results)


def test_killed_and_stopped_at_one_place_after_the_other(run_of: Launch) -> None:
    run = run_of(PEERS)
    run.start(fault=",".join([f"{STOPPED}:STOP", *(f"{point}:KILL" for point in FAST)]))
    until(f"the stop at {STOPPED}", lambda: f"{STOPPED}:STOP" not in run.to_come)
    zombie = run.pid("generation-0")
    outlast_a_lease()
    os.kill(zombie, signal.SIGCONT)
    run.finish()
    assert run.to_come == []
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "settings"), _cases())
def test_killed_at(point: str, settings: dict[str, dict[str, Any]], run_of: Launch) -> None:
    run = run_of(settings)
    run.start(fault=f"{point}:KILL")
    run.finish()
    assert run.struck, f"nobody came to {point}"
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("point", IN_PARTS_POINTS)
def test_killed_while_groups_are_trained_in_parts(point: str, run_of: Launch) -> None:
    run = run_of(IN_PARTS)
    run.start(fault=f"{point}:KILL")
    run.finish()
    assert run.struck, f"nobody came to {point}"
    facts = judge(run)
    assert any(verdict.members for verdict in facts.verdicts), "no group left in parts"


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c.endswith(":after_tell:9") else pytest.mark.slow) for c in PROGRAMS])
def test_killed_in_mid_episode(case: str, run_of: Launch) -> None:
    program, _, point = case.partition(":")
    path = {"rollout": {"custom_generate_function_path": f"tests.crash.episode.{program}"}}
    run = run_of(merged(PROGRAMS[case], path))
    run.start(fault=f"{point}:KILL")
    run.finish()
    assert run.struck, f"nobody came to {point}"
    judge(run)
    for file in (run.home / "batches").iterdir():
        for scored in (s for group in read_record(file).groups for s in group.samples):
            spoken = [span.n for span in scored.rollout.response.spans if not span.made]
            assert spoken == [2, 2] or (program == "rewritten" and len(scored.rollout.strands) == 2)
