"""Actors stopped with SIGSTOP for longer than a lease and then continued: a zombie finds that its work has moved on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.crash.conftest import Launch
from tests.crash.house import LEASE_S
from tests.crash.judge import judge

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

PEERS: dict[str, dict[str, Any]] = {
    "sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8},
    "rollout": {"num_reward_workers": 2},
}


def outlast_a_lease() -> None:
    """The one wait of these tests that is a span of time: a lease is one."""
    time.sleep(2 * LEASE_S)


CASES = [
    pytest.param("generation-0:after_save:4", "generation-0", id="a-worker-with-samples-under-way"),
    pytest.param("generation-0:activating:2", "generation-0", id="a-worker-in-an-activation"),
    pytest.param("reward-0:before_commit:5", "reward-0", id="a-scorer-before-its-commit"),
    pytest.param("filter:assembling:4", "filter", id="the-filter-with-half-groups"),
    pytest.param("trainer:before_done:3", "trainer", id="the-trainer-in-a-step"),
    pytest.param("trainer:before_ack:1", "trainer", id="the-trainer-before-its-acknowledgement"),
    pytest.param("sampler:before_append:3", "sampler", id="the-sampler-before-its-append"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "actor"), CASES)
def test_stopped_at(point: str, actor: str, run_of: Launch) -> None:
    run = run_of(PEERS)
    run.start(fault=f"{point}:STOP")
    run.until(f"the stop at {point}", lambda: run.struck)
    pid = run.pid(actor)
    outlast_a_lease()
    os.kill(pid, signal.SIGCONT)
    run.finish()
    judge(run)
