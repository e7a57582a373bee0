"""Workers on other hosts: other clocks, other shared memory, other folders, links that break."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.crash.judge import judge
from tests.hosts.conftest import FarRun

Make = Callable[..., FarRun]
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


@pytest.mark.slow
@pytest.mark.parametrize("cut_s", [5.0, 30.0, 90.0])
def test_a_worker_whose_link_was_cut_is_back_soon_after_it(far_run: Make, cut_s: float) -> None:
    run = far_run({"rollout": {"num_rollout": 10_000}})
    far = run.net.host("b")
    run.begin()
    run.join_from(far)
    run.until_it_serves("b", more_than=2)
    far.cut()
    time.sleep(cut_s)
    served, back_at = len(run.events("b", "activated")), time.monotonic()
    far.mend()
    run.until_it_serves("b", more_than=served, seconds=10.0 if cut_s < 60 else 30.0)
    print(f"back after {time.monotonic() - back_at:.1f} s")
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_the_host_in_the_middle_of_the_chain_is_killed(far_run: Make) -> None:
    run = far_run({"rollout": {"num_rollout": 10_000}})
    hosts = [run.net.host(name) for name in "bcd"]
    run.begin()
    for host in hosts:
        run.join_from(host)
    run.until_it_serves("b", "c", "d", more_than=1)
    hosts[0].cut()  # its connections stay half open: nobody is told
    hosts[0].kill()
    served = len(run.events("d", "activated"))
    run.until_it_serves("c", "d", more_than=served + 3, seconds=30.0)
    run.drain()
    judge(run, steps=run.step())
