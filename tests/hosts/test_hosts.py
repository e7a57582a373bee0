"""Workers on other hosts: other clocks, other shared memory, other folders, links that break."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

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
LONG = {"rollout": {"num_rollout": 10_000}, "ckpt": {"keep_last": 10_000, "save_interval": 20}}
WHILE_AWAY: dict[str, Callable[[FarRun], object]] = {
    "the trainer is killed": lambda run: run.kill("trainer"),
    "Redis is restarted": lambda run: run.restart_redis(),
    "the worker here is killed": lambda run: run.kill("generation-0"),
}
CASES: dict[str, tuple[str, Callable[[Host], object], float, str]] = {
    **{f"{who} is cut for {s} s": (who, Host.cut, s, "") for who in "ba" for s in (5, 30, 90, 300)},
    **{f"{who} loses a fifth": (who, lambda host: host.lose(0.2), 30, "") for who in "ba"},
    **{f"b is deaf for {s} s": ("b", lambda host: host.lose(1.0, says=False), s, "") for s in (5, 30, 90)},
    **{f"b is mute for {s} s": ("b", lambda host: host.lose(1.0, hears=False), s, "") for s in (5, 30, 90)},
    "b is slow": ("b", lambda host: host.shape("256kbit"), 30, ""),
    **{f"b is cut and {what}": ("b", Host.cut, 15, what) for what in WHILE_AWAY},
}


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", CASES)
def test_a_worker_is_back_soon_after_its_link_and_nothing_is_lost_or_done_twice(far_run: Make, case: str) -> None:
    """A connection is half open meanwhile: no end is told. Clocks differ by three minutes."""
    who, trouble, seconds, meanwhile = CASES[case]
    run = far_run(LONG)
    hosts = {"a": run.a, "b": run.net.host("b", skew_s=90), "c": run.net.host("c", skew_s=-90)}
    run.begin()
    for name in "bc":
        run.join_from(hosts[name])
    run.until_it_serves("b", "c", more_than=1, seconds=120.0)
    trouble(hosts[who])
    if meanwhile:
        WHILE_AWAY[meanwhile](run)
    time.sleep(seconds)
    served, back_at = len(run.events("b", "activated")), time.monotonic()
    hosts[who].mend()
    run.until_it_serves("b", more_than=served, seconds=30.0)
    took_s = time.monotonic() - back_at
    print(f"{case}: b serves the next version after {took_s:.1f} s")
    assert took_s < BACK_S
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_host_of_the_chain_is_killed(far_run: Make, which: int) -> None:
    run = far_run(LONG)
    hosts = [run.net.host(name) for name in "bcd"]
    run.begin()
    for host in hosts:
        run.join_from(host)
    run.until_it_serves("b", "c", "d", more_than=1)
    dead = hosts.pop(which)
    dead.cut()  # its connections stay half open: nobody is told
    dead.kill()
    names = [host.name for host in hosts]
    served = max(len(run.events(name, "activated")) for name in names)
    run.until_it_serves(*names, more_than=served + 3, seconds=60.0)
    run.drain()
    judge(run, steps=run.step())
