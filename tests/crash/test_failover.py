"""A run on a Redis with a replica and sentinels: who the primary is changes, and the ledger closes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.conftest import Launch
from tests.crash.judge import judge
from tests.failover import Failover, failover

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def house() -> Iterator[Failover]:
    with failover() as made:
        yield made


@pytest.mark.parametrize("how", ["killed", "moved", "killed when its replica was two steps behind"])
def test_another_server_becomes_the_primary(how: str, run_of: Launch, house: Failover) -> None:
    """What the replica had not heard is done again: by the rooms, or, of steps, by the trainer from its checkpoint."""
    run = run_of({"rollout": {"num_rollout": 16}, "bus": {"bus_url": house.url}})
    run.start()
    run.until_step(3)
    behind = "behind" in how
    if behind:
        house.sever()
        run.until_step(run.step() + 2)
    (house.move if how == "moved" else house.promote)()
    run.finish()
    judge(run, whole_policy=not behind)
    assert ("lost its last moments" in run.story()) == behind
