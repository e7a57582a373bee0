"""Runs by chance: under settings that are drawn, ended anywhere in any way and started again under others; tuned, killed and
stopped while they go on, with workers that join and leave. Samples are made in one turn, by programs, tools or agents. Nobody
thought of these cases, so each seed may find what the matrix does not ask.

`MILES_ASYNC_CRASH=all MILES_ASYNC_RANDOM=100:160 pytest tests/crash/test_random_runs.py` runs those seeds. A seed gives the
settings, the operations and their order; the moments at which they meet the run are not in it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from bus.messages.policy import Restored, StepDone, Turn
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import load
from tests.crash.chance import Kept, patch_of, settings_of
from tests.crash.conftest import Launch
from tests.crash.guests import Guests
from tests.crash.house import LEASE_S, RUN_DEADLINE_S, Missed, Run, Tables, merged, until
from tests.crash.judge import Facts, judge

SEEDS = range(*map(int, os.environ.get("MILES_ASYNC_RANDOM", "0:2").split(":")))
ACTORS = (
    *("sampler", "trainer", "filter", "partial", "publisher", "reward-0", "generation-0", "generation-1", "recorder"),
    *("evaluator", "environments", "reward-1", "lent-0"),
)
OPERATIONS = {"tune": 5, "plan": 1, "kill": 2, "engine": 1, "stop": 1, "redis": 1, "launcher": 1, "join": 2, "leave": 1}  # weights
AT_MOST = {"kill": 5, "engine": 2, "stop": 2, "redis": 1, "launcher": 1, "join": 3, "leave": 3}  # of one run

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1200)]


class Chance(Random):
    """What a seed decides of one run, and the run."""

    def __init__(self, seed: int, run: Run, toys: tuple[Path, Path]) -> None:
        super().__init__(seed)
        self.run, self.guests, self.shared = run, Guests(run, self), set[str]()
        talks = self.random() < 0.5
        self._kept = Kept(toys[talks], talks, self.choice([2, 4, 4, 6]), self.random() < 0.7)

    def start(self, steps: int, more: Tables | None = None) -> None:
        """Start it under settings that the rules take."""
        while True:
            drawn = merged(settings_of(self, self._kept), {"rollout": {"num_rollout": steps}})
            self.run.take(merged(drawn, more or {}))
            with suppress(SettingsError):
                load(self.run.write())
                break
        self._kept = self._kept.begun(drawn)
        self.shared.add(next((name for name in ("colocate", "lend_trainer_gpus") if name in drawn["sglang"]), ""))
        self.run.start()

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        """Wait while guests come and go."""

        def look() -> bool:
            self.guests.tend()
            return seen()

        self.run.until(what, look)

    def finish(self) -> None:
        """Wait for a good end."""

        def ended() -> bool:
            self.guests.tend()
            return self.run.launcher is None or self.run.launcher.poll() is not None

        with suppress(Missed):  # which is told with the logs
            until("the run to end", ended, seconds=RUN_DEADLINE_S)
        self.run.finish(seconds=1.0)

    def judge(self) -> None:
        """All has ended well."""
        self.guests.end()
        facts = judge(self.run, tuned=True)
        if self.shared in ({"colocate"}, {"lend_trainer_gpus"}):
            steps_in_the_trainers_turn(facts)


def steps_in_the_trainers_turn(facts: Facts) -> None:
    """No step while the engines have the GPU. A trainer that starts takes its turn before its first step."""
    holder = "trainer"
    for message in facts.policy:
        if isinstance(message, StepDone):
            assert holder == "trainer", f"step {message.step} was trained in the engines' turn"
        holder = message.holder if isinstance(message, Turn) else "trainer" if isinstance(message, Restored) else holder


@pytest.fixture
def chance_of(run_of: Launch, toy: Path, talking_toy: Path) -> Iterator[Callable[[int], Chance]]:
    made: list[Chance] = []

    def make(seed: int) -> Chance:
        made.append(Chance(seed, run_of(), (toy, talking_toy)))
        return made[-1]

    yield make
    for chance in made:
        chance.guests.kill()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_ends_anywhere_goes_on_under_other_settings(seed: int, chance_of: Callable[[int], Chance]) -> None:
    chance, done = chance_of(seed), 0
    run = chance.run
    for how in (*chance.choices(["finish", "power", "power", "launcher", "drain"], k=chance.choice([1, 2, 2])), "finish"):
        steps, joins = done + chance.choice([2, 3, 5]), chance.random() < 0.3
        chance.start(steps)
        if how != "finish":
            at = chance.randint(done, steps)
            chance.until(f"step {at}", lambda at=at: on_record(run) >= at)
            if joins:
                chance.guests.join()
            time.sleep(2 * chance.random())
        end(chance, how)
        done = steps if how == "launcher" else max(done, run.saved())  # without a launcher it may go on to its end
    chance.judge()


def on_record(run: Run) -> int:
    """The newest step; also when the run, and its Redis with it, has just ended."""
    file = run.dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.startswith('{"kind":"step"') and line.endswith("}")), default=0)


def end(chance: Chance, how: str) -> None:
    """End what goes on; what has ended meanwhile has ended well."""
    run = chance.run
    assert run.launcher is not None
    if how == "drain":
        with suppress(AssertionError):
            run.until_it_listens()
    if how == "finish" or run.launcher.poll() is not None:
        chance.finish()
    elif how == "power":
        run.kill_all()
    elif how == "launcher":
        run.launcher.kill()
        run.launcher.wait(10)
    else:
        run.drain()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_is_tuned_killed_and_stopped_while_it_goes_on(seed: int, chance_of: Callable[[int], Chance]) -> None:
    chance = chance_of(seed)
    run = chance.run
    chance.start(chance.choice([8, 12, 16]), {"launch": {"restart_budget": 60}})
    assert run.launcher is not None
    left, until = dict(AT_MOST), time.monotonic() + 240
    while run.launcher.poll() is None and time.monotonic() < until:
        time.sleep(2 * chance.random())
        chance.guests.tend()
        [what] = chance.choices([*OPERATIONS], [*OPERATIONS.values()])
        if left.get(what, 1) and on_record(run):
            left[what] = left.get(what, 1) - (what in left)
            try:
                disturb(chance, what)
            except ProcessLookupError:  # who is dead cannot be killed
                continue
            except OSError:
                run.finish()  # what was asked of a run that has just ended is no fault
    chance.finish()
    chance.judge()


def disturb(chance: Chance, what: str) -> None:
    """One operation. A patch may be refused; then it changed nothing."""
    run, actor, still_s = chance.run, chance.choice(ACTORS), chance.choice([0.5, LEASE_S + 1, LEASE_S + 3])
    patch, at, number = patch_of(chance), chance.randint(2, 16), chance.choice([signal.SIGKILL, signal.SIGTERM])
    assert run.launcher is not None
    if what in ("tune", "plan"):
        when = () if what == "tune" else ("--at-step", str(at))
        said = run.command("tune", "--run", run.dir.name, *when, *patch)
        assert "Traceback" not in said.stderr, f"{patch}: {said.stderr}"
        if said.returncode not in (0, 2):
            run.finish()  # what was asked of a run that has just ended is no fault
    elif what in ("kill", "stop"):
        for pid in run.pids(actor)[:1]:
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            if what == "stop":
                time.sleep(still_s)
                os.kill(pid, signal.SIGCONT)
    elif what == "engine":
        for pid in run.engine_pids()[:1]:
            os.kill(pid, signal.SIGKILL)
    elif what == "redis":
        os.kill(run.redis_pid(), signal.SIGKILL)
    elif what == "join":
        chance.guests.join()
    elif what == "leave":
        chance.guests.leave(number)
    elif run.launcher.poll() is None:
        run.launcher.kill()
        run.launcher.wait(10)
        run.start()
