"""Whole runs whose engines stand aside while the trainer works. Without a GPU nobody is in the other's way, but everything is
done as with one: embedded engines give weights and cache back, the trainer's memory goes to a file, turns go over the bus."""

from __future__ import annotations

from typing import Any

import pytest

from bus.messages.control import Event
from bus.messages.policy import Restored, StepDone, Turn
from tests.crash.conftest import Launch
from tests.crash.house import merged
from tests.crash.judge import judge
from tests.system.test_weight_transports import ON_POLICY, story, travelled, ways

pytestmark = pytest.mark.timeout(1200)

STEPS = 5
SHARED: dict[str, dict[str, Any]] = {
    "rollout": {"num_rollout": STEPS},
    "sglang": {
        "num_generation_workers": 2,
        "sglang_server_concurrency": 8,
        "update_weight_deadline_s": 20.0,
        "colocate": True,
        "offload_train_target": "disk",
    },
}


def turns_alternate(policy: list[Any]) -> None:
    """First the trainer's, then one after the other, each with its number, and steps in the trainer's only."""
    holder, number = "engines", 0
    for message in policy:
        if isinstance(message, StepDone):
            assert holder == "trainer", f"step {message.step} was trained in turn {number} of the engines"
        if isinstance(message, Turn):
            assert message.holder != holder or message.number > number  # a trainer that died took its turn again
            assert message.number == number + (message.holder == "trainer")
            holder, number = message.holder, message.number


def released(events: list[Event]) -> dict[int, set[str]]:
    """Turn -> workers that gave their memory back for it."""
    found: dict[int, set[str]] = {}
    for event in events:
        if event.kind == "memory released":
            found.setdefault(event.data["turn"], set()).add(event.actor)
    return found


def test_trainer_and_engines_take_turns(run_of: Launch) -> None:
    run = run_of(merged(merged(SHARED, {"sglang": {"check_weight_update_equal": True}}), ON_POLICY))
    run.start()
    run.finish()
    judge(run)
    policy, events = story(run)
    turns_alternate(policy)
    both = {"generation-0", "generation-1"}
    assert all(who == both for who in released(events).values()) and len(released(events)) > 1
    assert all("perf/turn_s" in m.metrics for m in policy if isinstance(m, StepDone))
    travelled("ipc", policy, events)


def test_a_run_that_is_stopped_saves_what_it_trained_and_goes_on(run_of: Launch) -> None:
    """With the bound at 2 behind a router, which may send a request to an engine that has just stood aside. At the stop the
    engines leave for good, so the trainer does not wait for them to save its last step. Before it a worker dies after it gave its
    memory for a turn, and nobody waits for it."""
    patient = {"launch": {"drain_timeout_s": 60.0}, "sglang": {"check_weight_update_equal": True, "use_router": True}}
    run = run_of(merged(merged(SHARED, {"rollout": {"num_rollout": 8}, "ckpt": {"save_interval": 100}}), patient))
    run.start(fault="generation-1:released:2:KILL")
    run.until("a death in a turn", lambda: run.struck)
    run.until_step(2)
    run.drain()
    stopped_at, events_before = run.saved(), len(story(run)[1])
    run.start()
    run.finish()
    judge(run)
    policy, events = story(run)
    both = {"generation-0", "generation-1"}
    undisturbed = released(events[events_before:])
    assert all(who == both for who in undisturbed.values()) and len(undisturbed) > 1
    assert "ipc" in ways(events)
    restored = [m.step for m in policy if isinstance(m, Restored)]
    assert restored[-1] == stopped_at >= 2, restored
    turns_alternate(policy)
