"""The launcher killed in each second of its start, and the same command again: one set of actors goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from bus import Bus
from bus.messages.control import Event
from bus.topology import EVENTS
from miles_async.launcher.local import running
from tests.crash.conftest import Launch
from tests.crash.house import UNLOWERED, Run, Tables, until
from tests.crash.judge import judge
from tests.crash.test_launcher import kill_launcher

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

SHORT: Tables = {"rollout": {"num_rollout": 4}}
FOREVER: Tables = {"rollout": {"num_rollout": 100_000}}
SECONDS = (0.2, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 13.0, 16.0)
AFTER_ORDERS = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0)
LOOK_S = 0.2


class Doubles:
    """Actors of which two processes were seen twice in a row, whoever started them."""

    def __init__(self, run: Run) -> None:
        self._run, self._over = run, threading.Event()
        self.found: Counter[str] = Counter()
        self.seen: set[str] = set()

    def look(self) -> None:
        before: set[str] = set()
        while not self._over.wait(LOOK_S):
            now = running(self._run.dir)
            self.seen |= now.keys()
            two = {name for name, processes in now.items() if len(processes) > 1}
            self.found.update(two & before)
            before = two

    @contextmanager
    def watched(self) -> Iterator[Doubles]:
        thread = threading.Thread(target=self.look)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()


def cold(run: Run) -> None:
    """Start the command with interpreters of its own, which load what they need, as anywhere but in these tests."""
    run.start(wrap=UNLOWERED)


def killed_in_its_start(run: Run, after_s: float, *, since: str = "start", folder_too: bool = False) -> Doubles:
    """Kill the launcher so long after its start, or after it wrote what it orders; give the same command, and wait for its good
    end."""
    doubles = Doubles(run)
    with doubles.watched():
        cold(run)
        if since == "orders":
            run.until("its orders", (run.dir / "actors" / "trainer.json").exists)
        time.sleep(after_s)  # the one thing that is tried here
        kill_launcher(run)
        if folder_too:
            shutil.rmtree(run.dir, ignore_errors=True)
        cold(run)
        run.finish()
    return doubles


@pytest.mark.slow
@pytest.mark.parametrize("after_s", SECONDS)
def test_killed_in_a_second_of_its_start(after_s: float, run_of: Launch) -> None:
    run = run_of(SHORT)
    doubles = killed_in_its_start(run, after_s)
    assert doubles.seen >= {"trainer", "sampler", "recorder"} and not doubles.found
    assert not run.processes()
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", AFTER_ORDERS)
def test_killed_so_long_after_its_orders(after_s: float, run_of: Launch) -> None:
    """While fork servers load, and what they forked begins."""
    run = run_of(SHORT)
    doubles = killed_in_its_start(run, after_s, since="orders")
    assert not doubles.found
    assert not run.processes()
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", SECONDS[3::3])
def test_killed_in_its_start_and_its_folder_gone(after_s: float, run_of: Launch) -> None:
    run = run_of(SHORT)
    doubles = killed_in_its_start(run, after_s, folder_too=True)
    assert not doubles.found
    assert not run.processes()
    judge(run)


def stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_who_was_ordered_by_a_launcher_that_died_before_he_began_does_not_begin(run_of: Launch) -> None:
    """A light actor and the trainer, each forked already."""
    run = run_of(SHORT)
    run.start(fault="filter:renamed:1:STOP,trainer:renamed:1:STOP")
    run.until("both to be forked", lambda: run.struck)
    orphans = [run.pid("filter"), run.pid("trainer")]
    until("them to stand still", lambda: all(map(stopped, orphans)))
    kill_launcher(run)
    for pid in orphans:
        os.kill(pid, signal.SIGCONT)
    until("them to end", lambda: not any(map(psutil.pid_exists, orphans)), seconds=30)
    for name in ("filter", "trainer"):
        assert not (run.dir / "logs" / f"{name}.log").exists(), "it began"
    doubles = Doubles(run)
    with doubles.watched():
        run.start()
        run.finish()
    assert not doubles.found
    judge(run)


async def adopted(bus: Bus) -> list[str]:
    """What the launcher says of processes that it found."""
    events = [await bus.message(entry) for entry in await bus.scan_all(EVENTS)]
    return [event.text for event in events if isinstance(event, Event) and event.kind == "adopted"]


@contextmanager
def second_of(run: Run, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process of an actor with the first one's command line, as an orphan would be: nobody keeps it."""
    words = psutil.Process(run.pid(name)).cmdline()
    command = [*UNLOWERED, sys.executable, *(word for word in words[1:] if word)]
    with (run.home / "second.log").open("ab") as log:
        second = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=run.environment(), cwd=run.home, start_new_session=True
        )
    try:
        yield second
    finally:
        second.kill()
        second.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "sampler", "generation-0"])
def test_a_second_process_of_an_actor_ends_in_one_line_and_the_first_goes_on(name: str, run_of: Launch) -> None:
    run = run_of(FOREVER)
    run.start()
    run.until_step(1)
    first = run.pid(name)
    with second_of(run, name) as second:
        assert second.wait(120) == 77
    said = (run.home / "second.log").read_text()
    assert f"is held by process {first} on host" in said and "Traceback" not in said
    assert run.pid(name) == first
    step = run.step()
    run.until("training to go on", lambda: run.step() >= step + 2)
    run.drain()
    judge(run, steps=run.saved())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "sampler", "filter", "generation-0"])
def test_who_stood_still_until_another_took_his_name_ends_and_the_other_is_kept(name: str, run_of: Launch) -> None:
    run = run_of(FOREVER)
    run.start()
    run.until_step(1)
    first = run.pid(name)
    log = run.home / "second.log"
    with second_of(run, name) as second:
        os.kill(first, signal.SIGSTOP)
        run.until("the second to have the name", lambda: log.exists() and "has its name" in log.read_text())
        os.kill(first, signal.SIGCONT)
        run.until("the first to end", lambda: first not in run.pids(name))
        assert f"was taken by process {second.pid} on" in (run.dir / "logs" / f"{name}.log").read_text()
        kept = f"{name} (pid {second.pid}) still runs"
        run.until("the launcher to keep the other", lambda: kept in run.ask(adopted))
        step = run.step()
        run.until("training to go on", lambda: run.step() >= step + 2)
        assert run.pids(name) == [second.pid]
        run.drain()
    judge(run, steps=run.saved())


@pytest.mark.slow
def test_all_stand_still_for_a_minute_and_go_on(run_of: Launch) -> None:
    """A laptop that was closed: launcher, actors and Redis."""
    run = run_of(FOREVER)
    run.start()
    run.until_step(2)
    assert run.launcher is not None
    everybody = [run.launcher.pid, run.redis_pid(), *(p.pid for p in run.processes())]
    before = {name: run.pids(name) for name in ("trainer", "sampler", "filter")}
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everybody:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(60.0)  # the one thing that is tried here
    step = run.step()
    run.until("training to go on", lambda: run.step() >= step + 2)
    assert {name: run.pids(name) for name in before} == before
    run.drain()
    judge(run, steps=run.saved())
