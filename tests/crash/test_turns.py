"""Trainer and engines on shared GPUs, killed in the middle of a turn: nobody waits for the dead for ever."""

from __future__ import annotations

import pytest

from tests.crash.conftest import Launch
from tests.crash.house import merged
from tests.crash.judge import judge
from tests.system.test_colocate import SHARED, turns_alternate
from tests.system.test_weight_transports import story

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

CASES = [
    pytest.param("trainer:turn_taken:2", id="the-trainer-before-it-is-back"),
    pytest.param("trainer:before_turn_given:2", id="the-trainer-after-it-left-the-device"),
    pytest.param("generation-1:released:2", id="a-worker-after-it-gave-its-memory"),  # also in tests/system/test_colocate.py
]


@pytest.mark.slow
@pytest.mark.parametrize("point", CASES)
def test_killed_in_a_turn(point: str, run_of: Launch) -> None:
    run = run_of(merged(SHARED, {"rollout": {"num_rollout": 8}}))
    run.start(fault=f"{point}:KILL")
    run.finish()
    assert run.struck
    judge(run)
    policy, _ = story(run)
    turns_alternate(policy)
