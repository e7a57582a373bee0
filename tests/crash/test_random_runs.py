"""Runs by chance: under settings that are drawn, ended anywhere in any way and started again under others; tuned, killed and
stopped while they go on. Nobody thought of these cases, so each seed may find what the matrix does not ask.

`MILES_ASYNC_CRASH=all MILES_ASYNC_RANDOM=100:160 pytest tests/crash/test_random_runs.py` runs those seeds. A seed gives the
settings, the operations and their order; the moments at which they meet the run are not in it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from miles_async.settings.errors import SettingsError
from miles_async.settings.load import load
from tests.crash.chance import patch_of, settings_of
from tests.crash.conftest import Launch
from tests.crash.house import LEASE_S, Run, Tables, merged
from tests.crash.judge import judge

SEEDS = range(*map(int, os.environ.get("MILES_ASYNC_RANDOM", "0:2").split(":")))
ACTORS = (
    *("sampler", "trainer", "filter", "partial", "publisher", "reward-0", "generation-0", "generation-1", "recorder"),
    "evaluator",
)
OPERATIONS = {"tune": 5, "plan": 1, "kill": 2, "stop": 1, "redis": 1, "launcher": 1}  # with their weights
AT_MOST = {"kill": 5, "stop": 2, "redis": 1, "launcher": 1}  # of one run

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1200)]


class Chance(Random):
    """What a seed decides of one run."""

    def __init__(self, seed: int, toy: Path) -> None:
        super().__init__(seed)
        self._toy = toy
        self._kept = {"n_samples": self.choice([2, 4, 4, 6]), "shuffle": self.random() < 0.7}

    def start(self, run: Run, steps: int, more: Tables | None = None) -> None:
        """Start it under settings that the rules take."""
        while True:
            drawn = settings_of(self, self._toy, **self._kept)
            run.take(merged(merged(drawn, {"rollout": {"num_rollout": steps}}), more or {}))
            with suppress(SettingsError):
                load(run.write())
                break
        run.start()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_ends_anywhere_goes_on_under_other_settings(seed: int, run_of: Launch, toy: Path) -> None:
    run, chance, done = run_of(), Chance(seed, toy), 0
    for how in (*chance.choices(["finish", "power", "power", "launcher", "drain"], k=chance.choice([1, 2, 2])), "finish"):
        steps = done + chance.choice([2, 3, 5])
        chance.start(run, steps)
        if how != "finish":
            at = chance.randint(done, steps)
            run.until(f"step {at}", lambda at=at: on_record(run) >= at)
            time.sleep(2 * chance.random())
        end(run, how)
        done = max(done, run.saved())
    judge(run, tuned=True)


def on_record(run: Run) -> int:
    """The newest step; also when the run, and its Redis with it, has just ended."""
    file = run.dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.startswith('{"kind":"step"') and line.endswith("}")), default=0)


def end(run: Run, how: str) -> None:
    """End what goes on; what has ended meanwhile has ended well."""
    assert run.launcher is not None
    if how == "drain":
        with suppress(AssertionError):
            run.until_it_listens()
    if how == "finish" or run.launcher.poll() is not None:
        run.finish()
    elif how == "power":
        run.kill_all()
    elif how == "launcher":
        run.launcher.kill()
        run.launcher.wait(10)
    else:
        run.drain()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_is_tuned_killed_and_stopped_while_it_goes_on(seed: int, run_of: Launch, toy: Path) -> None:
    run, chance = run_of(), Chance(seed, toy)
    chance.start(run, chance.choice([8, 12, 16]), {"launch": {"restart_budget": 60}})
    assert run.launcher is not None
    left, until = dict(AT_MOST), time.monotonic() + 240
    while run.launcher.poll() is None and time.monotonic() < until:
        time.sleep(2 * chance.random())
        [what] = chance.choices([*OPERATIONS], [*OPERATIONS.values()])
        if left.get(what, 1) and on_record(run):
            left[what] = left.get(what, 1) - (what in left)
            try:
                disturb(run, what, chance)
            except ProcessLookupError:  # who is dead cannot be killed
                continue
            except (OSError, AssertionError):
                run.finish()  # what was asked of a run that has just ended is no fault
    run.finish()
    judge(run, tuned=True)


def disturb(run: Run, what: str, chance: Random) -> None:
    """One operation. A patch may be refused; then it changed nothing."""
    actor, still_s = chance.choice(ACTORS), chance.choice([0.5, LEASE_S + 1, LEASE_S + 3])
    patch, at = patch_of(chance), chance.randint(2, 16)
    assert run.launcher is not None
    if what in ("tune", "plan"):
        when = () if what == "tune" else ("--at-step", str(at))
        said = run.command("tune", "--run", run.dir.name, *when, *patch)
        assert said.returncode in (0, 2), f"{patch}: {said.returncode} {said.stdout[-300:]} {said.stderr[-500:]}"
    elif what in ("kill", "stop"):
        for pid in run.pids(actor)[:1]:
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            if what == "stop":
                time.sleep(still_s)
                os.kill(pid, signal.SIGCONT)
    elif what == "redis":
        os.kill(run.redis_pid(), signal.SIGKILL)
    elif run.launcher.poll() is None:
        run.launcher.kill()
        run.launcher.wait(10)
        run.start()
