"""Workers on other hosts: other clocks, other shared memory, other folders, links that break."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file, save_file

from actors.publisher.members import REFUSALS
from actors.runtime.run import EXIT_BUS_GONE
from bus.identity import read_identity, write_identity
from miles_async.launcher.run import RESUME
from tests.crash.house import Tables, merged, until
from tests.crash.judge import judge
from tests.hosts.conftest import FarRun
from tests.hosts.net import Host

Make = Callable[..., FarRun]
BACK_S = 10.0  # until the next version is served, from the moment the link is back, beside the time that a version takes anyway
# By a signal: pytest-timeout's thread would end the whole process, and the run would go on for ever on its hosts, which only the
# fixture's end takes away.
pytestmark = pytest.mark.timeout(240, method="signal")


def test_workers_of_two_hosts_whose_clocks_differ_serve_versions_that_they_fetch(far_run: Make) -> None:
    """The doctor names both clocks, their full disks, and a third worker, which takes none: its directory holds another model."""
    run = far_run({"rollout": {"num_rollout": 10_000, "max_weight_staleness": 0}})  # it ends when all of that was seen
    early, late = run.net.host("b", skew_s=90), run.net.host("c", skew_s=-90)
    for host in (run.a, early, late):
        host.shape("1gbit")
    run.begin()
    workers = [run.join_from(early), run.join_from(late), run.join_from(late, "odd", deeper(run.model))]
    run.until_it_serves("b", "c", more_than=2, seconds=120.0)
    for name in ("b", "c"):
        assert abs(run.events(name, "activated")[-1].wall - time.time()) > 60, "the clock of this host was to be wrong"
    causes = (
        r"the clock of b is 1:[23]\d ahead of Redis's",
        r"the clock of c is 1:[23]\d behind Redis's",
        r"the disk of the run's folder on b has 1\d\d MB left",
        r"odd could not load version \d+: .*layers\.1\..*is its --model-path the model of the run\?",
        r"odd serves no version yet.*layers\.1\.",
    )
    until("the doctor names all", lambda: all(re.search(cause, run.doctor()) for cause in causes), seconds=60.0)
    known = run.ask(read_identity)
    resumed = msgspec.structs.replace(known, release="9.0.1")  # as a launcher of another release says it
    run.ask(lambda bus: write_identity(bus, resumed))
    alike = rf"b on b.*c on c.*filter on a.*of release {re.escape(known.release)}, the run is of 9\.0\.1"
    until("the doctor names who stayed", lambda: bool(re.search(alike, run.doctor())), seconds=60.0)
    run.ask(lambda bus: write_identity(bus, known))
    until("odd is left alone", lambda: any("odd gets no version" in e.text for e in run.events("publisher", "worker aside")))
    run.until_it_serves("b", more_than=len(run.events("b", "activated")) + 2)  # an order may have been under way
    refused = len(run.events("odd", "weights refused"))
    run.until_it_serves("b", more_than=len(run.events("b", "activated")) + 2)
    assert REFUSALS <= refused == len(run.events("odd", "weights refused")), run.story()
    run.drain()
    judge(run, steps=run.step())
    for name in ("b", "c"):
        served = run.events(name, "activated")
        assert {event.data["transport"] for event in served} == {"network"}, run.story()
    for process in workers:
        process.terminate()
        assert process.wait(30) == 0, run.story()
    assert [p.name for host in (early, late) for p in host.shm.iterdir()] == [], "nothing is left in their memory"


def deeper(model: Path) -> Path:
    """A model directory beside this one, of a model with one more layer."""
    other = model.with_name("deeper")
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    more = {"num_hidden_layers": 2, "layer_types": config["layer_types"] * 2}
    (other / "config.json").write_text(json.dumps(config | more))
    tensors = load_file(other / "model.safetensors")
    twice = {name.replace(".layers.0.", ".layers.1."): tensor for name, tensor in tensors.items()}
    save_file(tensors | twice, other / "model.safetensors", metadata={"format": "pt"})
    return other


@pytest.mark.slow
def test_a_worker_ends_with_the_last_step_also_one_that_was_away_then(far_run: Make) -> None:
    run = far_run({"rollout": {"num_rollout": 30}})
    here, away = (run.net.host(name) for name in "bc")
    run.begin()
    workers = [run.join_from(here), run.join_from(away)]
    run.until_it_serves("b", "c")
    away.cut()
    run.finish()
    judge(run)
    assert workers[0].wait(30) == 0, run.story()
    away.mend()
    assert workers[1].wait(60) == 0, run.story()


@pytest.mark.slow
def test_a_host_that_gets_another_address_serves_the_next_one_there(far_run: Make) -> None:
    run = far_run(LONG)
    first, second = (run.net.host(name) for name in "bc")
    run.begin()
    run.join_from(first)
    run.until_it_serves("b")
    run.join_from(second)
    run.until_it_serves("b", "c", more_than=1)
    first.move()
    depot = lambda: run.ask(lambda bus: bus.vitals())["b"].depot  # noqa: E731
    until("its new address to be told", lambda: depot().startswith(f"http://{first.address}:"), seconds=60.0)
    for name in "bc":
        run.until_it_serves(name, more_than=len(run.events(name, "activated")) + 1)
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_a_broadcast_reaches_engines_on_other_hosts(far_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # gloo goes by the host's name, which resolves to nothing here
    run = far_run({"rollout": {"num_rollout": 10_000}, "sglang": {"update_weight_transport": "nccl"}})
    run.begin()
    for name in "bc":
        run.join_from(run.net.host(name))
    run.until_it_serves("b", "c", more_than=4)
    run.drain()
    judge(run, steps=run.step())
    for name in "bc":
        ways = [event.data["transport"] for event in run.events(name, "activated")]
        assert ways[0] == "network" and ways.count("nccl") >= 3, f"{ways}\n{run.story()}"


# Nothing of the policy log is trimmed, so that the judge sees all steps.
LONG: Tables = {"rollout": {"num_rollout": 10_000}, "ckpt": {"keep_last": 10_000, "save_interval": 20}}
# Samples that wait for their environment most of the time: each worker always holds some, and minutes of it cost little.
IDLE = merged(LONG, {"rollout": {"custom_generate_function_path": "tests.crash.episode.idle"}})
TROUBLES: dict[str, Callable[[Host], object]] = {
    "is cut": Host.cut,
    "loses a fifth": lambda host: host.lose(0.2),
    "is deaf": lambda host: host.lose(1.0, says=False),
    "is mute": lambda host: host.lose(1.0, hears=False),
    "is slow": lambda host: host.shape("256kbit", "burst 16kb latency 2s"),  # from the first packet on
}
AWAY = ("is cut", "is deaf", "is mute")  # nothing of it is heard
WHILE_AWAY: dict[str, Callable[[FarRun], object]] = {
    "the trainer is killed": lambda run: run.kill("trainer"),
    "Redis is restarted": lambda run: run.restart_redis(),
    "the worker here is killed": lambda run: run.kill("generation-0"),
}
Trouble = tuple[str, str, float, str]  # of whom, what, for how many seconds, what is done to the run meanwhile


def times(who: str, what: str, *seconds: float) -> list[Trouble]:
    return [(who, what, s, "") for s in seconds]


# Each run with what befalls its hosts, one after the other: two at once would lengthen each other's way back.
RUNS: dict[str, tuple[Tables, list[Trouble]]] = {
    "b is cut for minutes": (IDLE, times("b", "is cut", 300)),
    "a is cut for minutes": (IDLE, times("a", "is cut", 300)),
    "one way only, heard": (IDLE, times("b", "is deaf", 5, 30, 90)),
    "one way only, said": (IDLE, times("b", "is mute", 5, 30, 90)),
    "one after the other is cut": (IDLE, [*times("b", "is cut", 5, 30), *times("a", "is cut", 5, 30)]),
    "bad links": (IDLE, [*times("b", "loses a fifth", 30), *times("a", "loses a fifth", 30), *times("b", "is slow", 30)]),
    "meanwhile": (LONG, [("b", "is cut", 15, what) for what in WHILE_AWAY]),
}


@pytest.mark.slow
@pytest.mark.timeout(900, method="signal")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.takes(15 + sum(t[2] + 8 for t in each))) for name, (_, each) in RUNS.items()],
)
def test_a_worker_is_back_soon_after_its_link_and_nothing_is_lost_or_done_twice(far_run: Make, name: str) -> None:
    """A connection is half open meanwhile: no end is told. Clocks differ by three minutes. A fault names its trouble."""
    settings, troubles = RUNS[name]
    run = far_run(settings)
    hosts = {"a": run.a, "b": run.net.host("b", skew_s=90), "c": run.net.host("c", skew_s=-90)}
    run.begin()
    for worker in "bc":
        run.join_from(hosts[worker])
    run.until_it_serves("b", "c", more_than=2, seconds=240.0)
    for who, what, seconds, meanwhile in troubles:
        last, began = run.when("b", "activated")[-3:], time.time()  # since it was away last
        case = f"{who} {what} for {seconds:g} s{' and ' if meanwhile else ''}{meanwhile}"
        TROUBLES[what](hosts[who])
        if meanwhile:
            WHILE_AWAY[meanwhile](run)
        time.sleep(seconds)
        if who == "b" and what in AWAY and seconds >= 30:
            assert re.search(r"b \(generation, pid \d+\) has been silent for .*; its process was on b", run.doctor()), case
        if what == "is slow":
            until("the doctor names the link", lambda who=who: f"the link of {who} is slow" in run.doctor(), seconds=60.0)
        served, back_at = len(run.events("b", "activated")), time.time()
        hosts[who].mend()
        run.until_it_serves("b", more_than=served, seconds=60.0)
        took_s = run.when("b", "activated")[served] - back_at  # when it was, not when it was seen
        print(f"{case}: b serves the next version after {took_s:.1f} s")
        peers = [when for when in run.when("c", "activated") if when > began] if who == "b" else []  # of who was never away
        usual_s = max(after - before for before, after in (*pairwise(last), *pairwise(peers)))
        assert took_s < BACK_S + usual_s, case
        run.until_it_serves("b", more_than=served + 2)  # well again before the next
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
@pytest.mark.takes(140)
@pytest.mark.timeout(900, method="signal")
@pytest.mark.parametrize("waits", [True, False], ids=["waited_for", "ends_it"])
def test_everybody_is_cut_from_the_bus_for_90_seconds(far_run: Make, waits: bool) -> None:
    """Trainer, rooms, launcher and a worker on a third host, each connection half open. Within --bus-deadline-s all go on as they
    are; beyond it the run ends with the cause and what to do, and the same command goes on, with the worker that waited."""
    run = far_run(merged(IDLE, {"bus": {"bus_deadline_s": 240.0 if waits else 30.0}}), bus_apart=True)
    run.begin()
    worker = run.join_from(run.net.host("b", skew_s=90))
    run.until_it_serves("b", more_than=2, seconds=240.0)
    before = {name: run.pids(name) for name in ("trainer", "sampler", "filter", "generation-0", "recorder")}
    assert all(before.values())
    run.r.cut()
    cut_at = time.monotonic()
    if not waits:
        assert run.join(seconds=85.0) == EXIT_BUS_GONE, run.output()
        [said] = [line for line in run.output().splitlines() if "ended with status 75" in line]
        assert "did not answer" in said and RESUME in said and "Traceback" not in run.output(), run.output()
        assert not run.processes()
    time.sleep(max(0.0, cut_at + 90.0 - time.monotonic()))
    step, served = run.step(), len(run.events("b", "activated"))
    run.r.mend()
    if not waits:
        run.begin()
    run.until_it_serves("b", more_than=served + 2, seconds=120.0)
    run.until("training to go on", lambda: run.step() >= step + 4)
    if waits:
        assert {name: run.pids(name) for name in before} == before, "some did not wait"
    assert worker.poll() is None, run.story()
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
@pytest.mark.takes(40)
@pytest.mark.timeout(600, method="signal")  # more than its waits together
def test_hosts_of_the_chain_are_killed(far_run: Make) -> None:
    """One in its middle, then the first, then the last."""
    run = far_run(LONG)
    hosts = [run.net.host(name) for name in "bcde"]
    run.begin()
    for host in hosts:
        run.join_from(host)
    run.until_it_serves(*(host.name for host in hosts), more_than=1, seconds=240.0)
    for which in (1, 0, -1):
        dead = hosts.pop(which)
        dead.cut()  # its connections stay half open: nobody is told
        dead.kill()
        served = {host.name: len(run.events(host.name, "activated")) for host in hosts}
        for name, before in served.items():  # each by its own count: one at the end of the chain may pass versions over
            run.until_it_serves(name, more_than=before + 3, seconds=60.0)
    run.drain()
    judge(run, steps=run.step())
