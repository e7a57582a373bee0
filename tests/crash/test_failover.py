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
@pytest.mark.takes(40)
def test_another_server_becomes_the_primary(how: str, run_of: Launch, house: Failover) -> None:
    """What the successor had not heard is done again: by the rooms, or, of steps, by the trainer from its checkpoint. A move by
    SENTINEL FAILOVER loses too: the old primary takes writes for seconds after its successor was chosen."""
    # The change takes seconds, in which the toy does a hundred steps and more.
    settings = {"num_rollout": 10_000}
    run = run_of({"rollout": settings, "ckpt": {"keep_last": 10_000, "save_interval": 20}, "bus": {"bus_url": house.url}})
    run.start()
    run.until_step(3)
    if "behind" in how:
        house.sever()
        run.until_step(run.step() + 2)
    (house.move if how == "moved" else house.promote)()
    run.until_step(run.step() + 40)
    run.drain()
    loses = how != "killed"
    judge(run, whole_policy=not loses, steps=run.step())
    assert ("it lost its last moments" in (run.dir / "metrics.jsonl").read_text()) == loses
