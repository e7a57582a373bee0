"""Every actor killed with SIGKILL at each step of its protocol: the run finishes and nothing is lost or trained twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.record import read_record
from tests.crash.conftest import Launch
from tests.crash.house import STEPS, Run, Tables, evaluating, merged, until
from tests.crash.judge import judge
from tests.crash.test_stop import PEERS, outlast_a_lease

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

SLICED: Tables = {"rollout": {"max_tokens_per_slice": 16}}
ABORTING: Tables = {"sglang": {"pause_generation_mode": "abort"}}

# One run of all these, and of a worker that is stopped for longer than a lease, stands for the matrix in every run of the tests.
FAST = ("generation-1:after_save:5", "trainer:checkpoint_half:2", "trainer:after_done:3", "filter:assembling:3")
STOPPED = "generation-0:after_save:4"

# By name: settings, and the points of one run. Deaths of rooms whose work no checkpoint takes back share one; those of the trainer
# stand alone, because the second would undo what the first left behind.
POINTS: dict[str, tuple[Tables, tuple[str, ...]]] = {
    # the cursor with its groups and samples; a sample under way and a weight activation; a score; half a group; who serves what
    "rooms": (
        {},
        (
            *("sampler:before_append:3", "generation:after_save:5", "generation:activating:3", "reward:before_commit:9"),
            *("filter:assembling:3", "publisher:before_order:4"),
        ),
    ),
    "after their commits": (
        {},
        ("sampler:after_append:1", "generation:before_commit:9", "reward:after_commit:9", "filter:after_commit:3"),
    ),
    "late": ({}, ("generation:after_commit:9", "filter:before_commit:3", "publisher:after_order:4")),
    # samples that stopped early, on their way through the partial buffer
    "sliced": (SLICED, ("generation:after_commit:8", "partial:before_commit:6", "partial:after_commit:6")),
    "aborting": (ABORTING, ("generation:activating:2",)),
    # a step, its announcement, its checkpoint
    **{
        point: ({}, (f"trainer:{point}",))
        for point in (
            *("before_step:4", "before_done:3", "after_done:3", "before_announce:4", "after_announce:4"),
            *("checkpoint_copied:1", "checkpoint_half:2", "checkpoint_durable:3", "before_ack:2"),
        )
    },
}

# Episodes of several turns, hit between any two of their records; and what comes after them.
_SLICES = {n: {"rollout": {"max_tokens_per_slice": n}} for n in (7, 10, 16)}
EPISODES: dict[str, tuple[str, Tables, tuple[str, ...]]] = {
    "turns": ("rollout", {}, tuple(f"generation:{p}" for p in ("before_tell:9", "after_tell:9", "before_save:20", "activating:3"))),
    "late turns": ("rollout", {}, tuple(f"generation:{p}" for p in ("after_save:20", "before_tell:30", "before_commit:6"))),
    "ends": ("rollout", {}, tuple(f"generation:{p}" for p in ("after_commit:6", "after_save:60"))),
    "slices of 16": ("rollout", _SLICES[16], ("generation:after_tell:25",)),
    "slices of 7": ("rollout", _SLICES[7], ("generation:after_save:25",)),
    "slices of 10": ("rollout", _SLICES[10], ("generation:after_commit:20",)),
    "aborting": ("rollout", ABORTING, ("generation:activating:2",)),
    "whole": ("rollout", {"rollout": {"partial_rollout": False}}, ("generation:before_tell:12",)),
    "in parts": ("rollout", {"rollout": {"staleness_policy": "member"}}, ("generation:after_tell:40",)),
    "rewritten": ("rewritten", {}, ("generation:after_tell:20", "filter:after_commit:3", "reward:after_commit:9")),
    **{f"rewritten, {p}": ("rewritten", {}, (f"trainer:{p}",)) for p in ("after_done:3", "checkpoint_half:2", "before_ack:2")},
    "lost world": ("lost_world", {}, ("generation:after_tell:20", "generation:activating:3")),
}

# Groups leave in parts, so that some are half trained at each of these moments.
IN_PARTS: Tables = {"rollout": {"staleness_policy": "member"}}
IN_PARTS_POINTS: dict[str, tuple[str, ...]] = {
    "rooms": ("filter:turned:3", "filter:after_commit:4", "sampler:after_append:2"),
    **{point: (f"trainer:{point}",) for point in ("after_done:3", "checkpoint_half:2", "before_ack:2")},
}


def cases(table: dict[str, tuple[Any, ...]], fast: str = "") -> list[Any]:
    """Each run of a table, and as variants each point of those with several, alone. `fast`: one that every run of the tests has."""
    cases = []
    for name, (*settings, points) in table.items():
        cases.append(pytest.param(*settings, points, id=name.replace(":", "-"), marks=() if name == fast else pytest.mark.slow))
        for point in points if len(points) > 1 else ():
            cases.append(pytest.param(*settings, (point,), id=f"alone-{name}-{point.replace(':', '-')}", marks=pytest.mark.slow))
    return cases


def killed(run: Run, points: Sequence[str]) -> None:
    """It ends well, with a death at each of these points on its way. A worker that dies counts anew."""
    run.start(fault=",".join(f"{point}:KILL" for point in points))
    run.finish()
    assert run.struck, f"nobody came to {run.to_come}"


def longer(settings: Tables, points: Sequence[str]) -> Tables:
    """Each death but the first takes some steps more."""
    return merged(settings, {"rollout": {"num_rollout": STEPS + 4 * (len(points) - 1)}, "launch": {"restart_budget": 10}})


EVALUATOR = {"evaluator": (("evaluator:collecting:7", "evaluator:after_commit:1", "evaluator:before_issue:2"),)}


@pytest.mark.parametrize("points", cases(EVALUATOR))
def test_evaluator_killed_at(points: tuple[str, ...], run_of: Launch, toy: Path) -> None:
    run = run_of(longer(evaluating(toy), points))
    killed(run, points)
    facts = judge(run)
    asked = [result.asked for result in facts.results]  # most of its tokens may be of a later version
    assert asked[-1] == facts.results[-1].step == run.steps, "the last version was not measured"
    assert len(asked) == len(set(asked)), "a version was measured twice"
    assert all(result.n_samples == 12 for result in facts.results)


def test_killed_and_stopped_at_one_place_after_the_other(run_of: Launch) -> None:
    run = run_of(PEERS)
    run.start(fault=",".join([f"{STOPPED}:STOP", *(f"{point}:KILL" for point in FAST)]))
    until(f"the stop at {STOPPED}", lambda: f"{STOPPED}:STOP" not in run.to_come)
    zombie = run.pid("generation-0")

    def asked(actor: str) -> bool:
        try:
            run.kill(actor, signal.SIGTERM)
        except ProcessLookupError:  # one of the deaths to come was its own: it is about to be started again
            return False
        return True

    for actor in ("publisher", "reward-0", "filter"):  # asked politely, each ends as if its work were done
        until(f"{actor}, alive", lambda actor=actor: asked(actor))
    outlast_a_lease()
    os.kill(zombie, signal.SIGCONT)
    run.finish()
    assert run.to_come == []
    judge(run)


@pytest.mark.parametrize(("settings", "points"), cases(POINTS))
def test_killed_at(settings: Tables, points: tuple[str, ...], run_of: Launch) -> None:
    run = run_of(longer(settings, points))
    killed(run, points)
    judge(run)


@pytest.mark.parametrize("points", cases({name: (points,) for name, points in IN_PARTS_POINTS.items()}))
def test_killed_while_groups_are_trained_in_parts(points: tuple[str, ...], run_of: Launch) -> None:
    run = run_of(longer(IN_PARTS, points))
    killed(run, points)
    facts = judge(run)
    assert any(verdict.members for verdict in facts.verdicts), "no group left in parts"


@pytest.mark.parametrize(("program", "settings", "points"), cases(EPISODES, fast="turns"))
def test_killed_in_mid_episode(program: str, settings: Tables, points: tuple[str, ...], run_of: Launch) -> None:
    path = {"rollout": {"custom_generate_function_path": f"tests.crash.episode.{program}"}}
    run = run_of(merged(longer(settings, points), path))
    killed(run, points)
    judge(run)
    for file in (run.home / "batches").iterdir():
        for scored in (s for group in read_record(file).groups for s in group.samples):
            spoken = [span.n for span in scored.rollout.response.spans if not span.made]
            assert spoken == [2, 2] or (program == "rewritten" and len(scored.rollout.strands) == 2)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_rollout_function(run_of: Launch) -> None:
    """Worker and function are gone at once, later the worker alone at a commit: the groups that were held are made again."""
    run = run_of(longer({"rollout": {"rollout_function_path": "tests.crash.episode.whole_groups"}}, ("one", "two")))
    killed(run, ("generation:before_commit:40",))
    assert (run.home / "runs" / "struck").exists()
    judge(run)
    for file in (run.home / "batches").iterdir():
        for scored in (s for group in read_record(file).groups for s in group.samples):
            assert [(span.made, span.n) for span in scored.rollout.response.spans if not span.made] == [(False, 1)]
