"""Workers on other hosts: other clocks, other shared memory, other folders, links that break."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.crash.house import Missed, Tables, merged
from tests.crash.judge import judge
from tests.hosts.conftest import FarRun
from tests.hosts.net import Host

Make = Callable[..., FarRun]
BACK_S = 10.0  # the next version served, from the moment the link is back
pytestmark = pytest.mark.timeout(240)


def test_workers_of_two_hosts_whose_clocks_differ_serve_versions_that_they_fetch(far_run: Make) -> None:
    run = far_run({"rollout": {"num_rollout": 10_000, "max_weight_staleness": 0}})  # it ends when both have served
    early, late = run.net.host("b", skew_s=90), run.net.host("c", skew_s=-90)
    for host in (run.a, early, late):
        host.shape("1gbit")
    run.begin()
    workers = [run.join_from(early), run.join_from(late)]
    run.until_it_serves("b", "c", more_than=2, seconds=120.0)
    run.drain()
    judge(run, steps=run.step())
    for name in ("b", "c"):
        served = run.events(name, "activated")
        assert {event.data["transport"] for event in served} == {"network"}, run.story()
        assert abs(served[0].wall - time.time()) > 60, "the clock of this host was to be wrong"
    for process in workers:
        process.terminate()
        assert process.wait(30) == 0, run.story()
    assert [p.name for host in (early, late) for p in host.shm.iterdir()] == [], "nothing is left in their memory"


# Nothing of the policy log is trimmed, so that the judge sees all steps.
LONG: Tables = {"rollout": {"num_rollout": 10_000}, "ckpt": {"keep_last": 10_000, "save_interval": 20}}
# Samples that wait for their environment most of the time: each worker always holds some, and minutes of it cost little.
SLOW = merged(LONG, {"rollout": {"custom_generate_function_path": "tests.crash.episode.slow"}})
TROUBLES: dict[str, Callable[[Host], object]] = {
    "is cut": Host.cut,
    "loses a fifth": lambda host: host.lose(0.2),
    "is deaf": lambda host: host.lose(1.0, says=False),
    "is mute": lambda host: host.lose(1.0, hears=False),
    "is slow": lambda host: host.shape("256kbit"),
}
WHILE_AWAY: dict[str, Callable[[FarRun], object]] = {
    "the trainer is killed": lambda run: run.kill("trainer"),
    "Redis is restarted": lambda run: run.restart_redis(),
    "the worker here is killed": lambda run: run.kill("generation-0"),
}
Trouble = tuple[str, str, float, str]  # of whom, what, for how many seconds, what is done to the run meanwhile


def times(who: str, what: str, *seconds: float) -> list[Trouble]:
    return [(who, what, s, "") for s in seconds]


# Each run with what befalls its hosts: at once, and within one list one after the other.
RUNS: dict[str, tuple[Tables, list[list[Trouble]]]] = {
    "b for minutes": (
        SLOW,
        [times("b", "is cut", 300), [*times("a", "is cut", 5, 30, 90), *times("a", "loses a fifth", 30)]],
    ),
    "a for minutes": (SLOW, [times("a", "is cut", 300)]),
    "cut and deaf": (SLOW, [times("b", "is cut", 5, 30, 90), times("d", "is deaf", 5, 30, 90)]),
    "mute and bad": (
        SLOW,
        [times("b", "is mute", 5, 30, 90), [*times("d", "loses a fifth", 30), *times("d", "is slow", 30)]],
    ),
    "meanwhile": (LONG, [[("b", "is cut", 15, what) for what in WHILE_AWAY]]),
}


def befalls(run: FarRun, hosts: dict[str, Host], troubles: list[Trouble], seen_by: str) -> list[str]:
    """Do it to its host; what was wrong afterwards. `seen_by`: the worker that is to be back when host a was away."""
    wrong = []
    for who, what, seconds, meanwhile in troubles:
        case = f"{who} {what} for {seconds} s{meanwhile and ' and '}{meanwhile}"
        worker = seen_by if who == "a" else who
        run.until_it_serves(worker, more_than=len(run.events(worker, "activated")), seconds=60.0)
        TROUBLES[what](hosts[who])
        if meanwhile:
            WHILE_AWAY[meanwhile](run)
        time.sleep(seconds)
        served, back_at = len(run.events(worker, "activated")), time.monotonic()
        hosts[who].mend()
        try:
            run.until_it_serves(worker, more_than=served, seconds=30.0)
        except Missed as error:
            wrong.append(f"{case}: {error}")
        took_s = time.monotonic() - back_at
        print(f"{case}: {worker} serves the next version after {took_s:.1f} s")
        if took_s >= BACK_S:
            wrong.append(f"{case}: {worker} was back after {took_s:.1f} s")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_a_worker_is_back_soon_after_its_link_and_nothing_is_lost_or_done_twice(far_run: Make, name: str) -> None:
    """A connection is half open meanwhile: no end is told. Clocks differ by three minutes. A fault names its trouble."""
    settings, troubles = RUNS[name]
    run = far_run(settings)
    hosts = {"a": run.a, "b": run.net.host("b", skew_s=90), "c": run.net.host("c", skew_s=-90)}
    if any(who == "d" for track in troubles for who, *_ in track):
        hosts["d"] = run.net.host("d")
    run.begin()
    workers = [name for name in hosts if name != "a"]
    for worker in workers:
        run.join_from(hosts[worker])
    run.until_it_serves(*workers, more_than=1, seconds=120.0)
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(befalls, run, hosts, track, "b" if len(troubles) == 1 else "c") for track in troubles]
    assert [fault for track in found for fault in track.result()] == []
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_hosts_of_the_chain_are_killed(far_run: Make) -> None:
    """One in its middle, then the first, then the last."""
    run = far_run(LONG)
    hosts = [run.net.host(name) for name in "bcde"]
    run.begin()
    for host in hosts:
        run.join_from(host)
    run.until_it_serves(*(host.name for host in hosts), more_than=1, seconds=120.0)
    for which in (1, 0, -1):
        dead = hosts.pop(which)
        dead.cut()  # its connections stay half open: nobody is told
        dead.kill()
        names = [host.name for host in hosts]
        served = max(len(run.events(name, "activated")) for name in names)
        run.until_it_serves(*names, more_than=served + 3, seconds=60.0)
    run.drain()
    judge(run, steps=run.step())
