"""Workers come and go: engines die, workers join from outside, drain and vanish."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from bus import Bus, ledger
from bus.topology import PREFIXES, PROMPTS
from tests.crash.conftest import Launch
from tests.crash.house import Run, until
from tests.crash.judge import judge
from tests.crash.mischief import join

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

TWO: dict[str, dict[str, Any]] = {
    "sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8},
    "rollout": {"num_rollout": 30},
}


def until_it_works(run: Run, name: str) -> None:
    """Wait until a worker's tokens are in the accounts."""

    async def tokens(bus: Bus) -> int:
        return (await ledger.read_accounts(bus)).tokens_by_worker.get(name, 0)

    until(f"tokens of {name}", lambda: run.ask(tokens) > 0)


async def held(bus: Bus, name: str = "guest") -> int:
    """Samples that a worker has taken and not given back."""
    rows = [
        await bus.link.run("XPENDING", bus.keys.stream(stream.name), "generation", "-", "+", 100, name) for stream in (PREFIXES, PROMPTS)
    ]
    return sum(map(len, rows))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_an_engine_dies_under_its_worker(number: signal.Signals, run_of: Launch) -> None:
    settings = {**TWO, "sglang": {**TWO["sglang"], "engine_token_deadline_s": 3.0}}
    run = run_of(settings)
    run.start()
    run.until_step(1)
    os.kill(run.engine_pids()[0], number)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_the_only_engine_dies(run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 30}})
    run.start()
    run.until_step(1)
    os.kill(run.engine_pids()[0], signal.SIGKILL)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_a_worker_vanishes_while_another_works(run_of: Launch) -> None:
    run = run_of(TWO)
    run.start(fault="generation-1:after_save:6:KILL")
    run.finish()
    assert run.struck
    judge(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["drains", "vanishes"])
@pytest.mark.slow
def test_a_worker_joins_and(number: signal.Signals, run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 100_000}})
    run.start()
    run.until_step(1)
    guest = join(run, "guest")
    try:
        until_it_works(run, "guest")
        run.until("samples under way there", lambda: run.ask(held) > 0)
        guest.send_signal(number)
        assert guest.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        guest.kill()
        guest.wait()
    run.until("others to take over what it held", lambda: run.ask(held) == 0, seconds=60.0)
    run.until_step(run.step() + 2)
    run.drain()
    judge(run, steps=run.saved())


@pytest.mark.slow
def test_a_worker_that_joined_outlives_the_runs_own(run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 100_000}})
    run.start()
    run.until_step(1)
    guest = join(run, "guest")
    try:
        until_it_works(run, "guest")
        os.kill(run.pid("generation-0"), signal.SIGSTOP)
        step = run.step()
        until("training to go on with the guest", lambda: run.step() >= step + 2)
        os.kill(run.pid("generation-0"), signal.SIGCONT)
        run.until_step(run.step() + 2)
    finally:
        guest.terminate()
        guest.wait(20)
    run.drain()
    judge(run, steps=run.saved())
