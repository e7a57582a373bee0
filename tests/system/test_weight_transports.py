"""Whole runs whose weights travel each of the ways there are, on a machine without a GPU: gloo stands where NCCL is and shared
files where CUDA IPC is; trainer, publisher, workers, engines and bus are the product's."""

from __future__ import annotations

from typing import Any

import pytest

from bus import Bus
from bus.messages.active import Activate, PolicyActive
from bus.messages.control import Event
from bus.messages.policy import PolicyAnnounced, SendFailed, StepDone
from bus.topology import ACTIVE, EVENTS, POLICY
from tests.crash.conftest import Launch
from tests.crash.house import Run, merged, until
from tests.crash.judge import judge
from tests.trainer import own_transport

pytestmark = pytest.mark.timeout(1200)

STEPS = 5
OWN = f"{own_transport.__file__}:KIND"
TWO: dict[str, dict[str, Any]] = {
    "rollout": {"num_rollout": STEPS},
    "sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8, "update_weight_deadline_s": 20.0},
}
# What is trained was made by the very weights that train on it, so that log-probs must agree after every update.
ON_POLICY: dict[str, dict[str, Any]] = {"rollout": {"max_weight_staleness": 0, "over_sampling_batch_size": 4}}


async def told(bus: Bus) -> tuple[list[Any], list[Any]]:
    """Everything on policy, and the events."""
    policy = [await bus.message(e) for e in await bus.scan_all(POLICY)]
    events = [await bus.message(e) for e in await bus.scan_all(EVENTS)]
    return policy, [m for m in events if isinstance(m, Event)]


def story(run: Run) -> tuple[list[Any], list[Any]]:
    """`told` of a run that has ended."""
    server = run.server()
    try:
        found: tuple[list[Any], list[Any]] = run.ask(told)
        return found
    finally:
        server.stop()


def ways(events: list[Event]) -> list[str]:
    """How each activation came."""
    return [e.data["transport"] for e in events if e.kind == "activated"]


def travelled(transport: str, policy: list[Any], events: list[Event]) -> None:
    """A run of STEPS steps on policy: every version came this way, and is what was trained."""
    assert ways(events).count(transport) >= STEPS, ways(events)
    compared = {e.data["compared"] for e in events if e.kind == "activated" and e.data["transport"] == transport}
    assert len(compared) == 1 and compared.pop() > 5
    assert {m.manifest.transport for m in policy if isinstance(m, PolicyAnnounced)} == {transport}
    gaps = [m.metrics["train/train_rollout_logprob_abs_diff"] for m in policy if isinstance(m, StepDone)]
    assert len(gaps) == STEPS and max(gaps) < 1e-4, gaps


@pytest.mark.parametrize("transport", ["nccl", OWN], ids=["nccl", "own"])
def test_a_run_whose_weights_travel_by_nccl_or_a_way_of_ones_own(run_of: Launch, transport: str) -> None:
    """By ipc: test_colocate.py, and test_supervised.py with engines that keep their memory."""
    way = {"sglang": {"update_weight_transport": transport, "check_weight_update_equal": True}}
    run = run_of(merged(merged(TWO, ON_POLICY), way))
    run.start()
    run.finish()
    judge(run)
    travelled(transport, *story(run))


def test_a_worker_killed_while_weights_are_broadcast_stops_nobody(run_of: Launch) -> None:
    """Twice: in its first life while it receives, in its second as it is ready to."""
    run = run_of(merged(TWO, {"sglang": {"update_weight_transport": "nccl"}, "rollout": {"num_rollout": 100_000}}))
    run.start(fault="generation-1:receiving:1:KILL,generation-1:ready:2:KILL")
    run.until("both deaths", lambda: run.struck)
    run.until_step(run.step() + 2)
    run.drain()
    judge(run, steps=run.saved())
    policy, events = story(run)
    broken = [e for e in events if e.kind in ("transfer failed", "transport failed")]
    assert broken and any(isinstance(m, SendFailed) for m in policy)
    assert "nccl" in ways(events)


def test_rolling_one_of_two_engines_serves_on_while_the_other_is_away(run_of: Launch) -> None:
    run = run_of(merged(TWO, {"sglang": {"update_weight_wave_fraction": 0.5}, "rollout": {"num_rollout": 2000}}))
    run.start()
    run.until_step(1)

    orders: list[tuple[str, ...]] = []

    def enough() -> bool:
        """Collects whom each order is for since both engines are known to serve; whether both had several more."""
        said = run.ask(active)
        states = [(i, [*m.serving.values()]) for i, m in enumerate(said) if isinstance(m, PolicyActive)]
        known = [i for i, versions in states if len(versions) == 2 and min(versions) > 0]
        orders[:] = [m.workers for m in said[known[0] :] if isinstance(m, Activate)] if known else []
        return min(orders.count((name,)) for name in ("generation-0", "generation-1")) > 2

    until("both engines to be ordered three more versions", enough)
    assert all(len(workers) == 1 for workers in orders)
    run.drain()


async def active(bus: Bus) -> list[Any]:
    """Orders, and who serves what."""
    return [await bus.message(e) for e in await bus.scan_all(ACTIVE)]
