"""The trainer's GPU lent to an engine while the trainer waits, and somebody killed meanwhile. Without a GPU it is a seat on the
CPU, and everything is done as with one."""

from __future__ import annotations

from typing import Any

import pytest

from bus.messages.policy import StepDone, Turn
from tests.crash.conftest import Launch
from tests.crash.house import merged
from tests.crash.judge import judge
from tests.crash.test_kill import cases, killed
from tests.system.test_weight_transports import story

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

LENDING: dict[str, dict[str, Any]] = {
    "rollout": {"num_rollout": 4, "rollout_max_response_len": 230, "rollout_batch_size": 6, "over_sampling_batch_size": 12},
    "sglang": {"sglang_server_concurrency": 2, "lend_trainer_gpus": True, "lend_after_s": 0.1, "update_weight_deadline_s": 20.0},
}


def steps_in_the_trainers_turn(policy: list[Any]) -> int:
    """How often the GPU was lent; no step was trained meanwhile."""
    holder, lent = "trainer", 0
    for message in policy:
        if isinstance(message, StepDone):
            assert holder == "trainer", f"step {message.step} was trained while the GPU was lent"
        if isinstance(message, Turn):
            holder, lent = message.holder, lent + (message.holder == "engines")
    return lent


# Deaths of rooms share one run; that of the trainer stands alone, as in test_kill.py.
CASES: dict[str, tuple[str, ...]] = {
    # the engine that was lent the GPU; a worker after it gave the GPU back; the publisher before it orders a version
    "rooms": ("lent-0:before_save:3", "lent-0:released:2", "publisher:before_order:3"),
    "the trainer before it has its GPU": ("trainer:turn_taken:2",),
}


@pytest.mark.slow
@pytest.mark.takes(30)
@pytest.mark.parametrize("points", cases({name: (points,) for name, points in CASES.items()}))
def test_killed_while_gpus_are_lent(points: tuple[str, ...], run_of: Launch) -> None:
    run = run_of(merged(LENDING, {"rollout": {"num_rollout": 4 + 2 * (len(points) - 1)}}))
    killed(run, points)
    judge(run)
    policy, _ = story(run)
    assert steps_in_the_trainers_turn(policy) > 1
