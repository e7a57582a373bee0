"""Every actor killed with SIGKILL at each step of its protocol: the run finishes and nothing is lost or trained twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.conftest import Launch
from tests.crash.house import evaluating
from tests.crash.judge import judge

pytestmark = [pytest.mark.crash, pytest.mark.timeout(400)]

SLICED: dict[str, dict[str, Any]] = {"rollout": {"max_tokens_per_slice": 16}}
ABORTING: dict[str, dict[str, Any]] = {"sglang": {"pause_generation_mode": "abort"}}

FAST = {"generation:after_save:5", "trainer:checkpoint_half:2", "trainer:after_done:3", "filter:assembling:3"}

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
        marks = () if point in FAST and not settings else (pytest.mark.slow,)
        cases.append(pytest.param(point, settings, id=name, marks=marks))
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
