"""Trackers get every point, also after a failure and a crash; Prometheus sees the run."""

import asyncio
import gc
import inspect
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import threading
import time

import aiohttp
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strictly
from prometheus_client.parser import text_string_to_metric_families

from actors.recorder import trackers
from actors.recorder.actor import from_thread
from actors.recorder.exporter import Exporter, ExporterSpec, families, plain
from actors.recorder.feed import Feed
from actors.recorder.file import FILE
from actors.recorder.history import History, history_of
from actors.recorder.points import Points
from actors.recorder.tracker_kinds import TrackerSpec, opens
from actors.recorder.trackers import PLACES, follow_all
from actors.runtime.snapshot import read_snapshot
from bus import Bus, Out
from bus.messages.control import EvalDone
from bus.topology import EVAL_RESULTS
from miles_async.launcher.place import Place
from miles_async.launcher.plan import recorder_spec
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from tests.crash.house import REPO
from tests.miles_async.console_data import Story, config
from tests.system.test_metrics_page import section

METRICS = REPO / "docs" / "metrics.md"
NOTHING = {f.name: None for f in msgspec.structs.fields(TrackerSpec)}


def step(number, loss, wall=None):
    return {"kind": "step", "wall": wall or 1000.0 + number, "step": number, "dropped": [], "metrics": {"train/loss": loss}}


def drop(reason):
    return {"kind": "drop", "wall": 1.0, "reason": reason}


def write(run_dir, *records, cut=b""):
    with (run_dir / FILE).open("ab") as file:
        file.write(b"".join(json.dumps(r).encode() + b"\n" for r in records) + cut)


class Kept:
    """A tracker that fails when it is told to."""

    def __init__(self):
        self.points, self.closed, self.opened, self.fail = [], None, 0, False

    def __call__(self):
        self.opened += 1
        return self

    def take(self, points):
        if self.fail:
            raise ConnectionError("no route\nsecond line")
        self.points += points

    def close(self, finished):
        self.closed = finished


def end(followers, finished=True):
    for follower in followers:
        follower.end(finished)
    assert all(follower.join(60) for follower in followers)


def test_points_say_what_was_dropped_since_the_step_before():
    points = Points()
    made = [points.of(r) for r in (drop("stale"), drop("zero_std"), drop("stale"), step(1, 0.5), step(2, 0.25))]
    assert made[:3] == [None, None, None]
    assert made[3].values == {
        "train/loss": 0.5,
        "rollout/dropped/stale": 2.0,
        "rollout/dropped/zero_std": 1.0,
        "rollout/fully_async/stale_groups_filtered": 2.0,
    }
    assert made[4].values == {"train/loss": 0.25, "rollout/fully_async/stale_groups_filtered": 0.0}
    lost = points.of({"kind": "restored", "wall": 3.0, "step": 1, "lost": [2]})
    assert (lost.step, lost.lost) == (1, True)


def test_a_tracker_that_was_away_gets_what_it_missed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "LOOK_S", 0.01)
    monkeypatch.setattr(trackers, "AGAIN_S", 0.01)
    said, kept, broken = [], Kept(), Kept()
    broken.fail = True
    say = lambda text, *, well=False: said.append((text, well))  # noqa: E731
    write(tmp_path, step(1, 0.5), drop("stale"), cut=b'{"kind": "st')
    followers = follow_all({"kept": kept, "broken": broken}, tmp_path, say)
    deadline = time.monotonic() + 20
    while not kept.points or not said or broken.opened < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [p.step for p in kept.points] == [1] and broken.points == []
    assert said == [("broken fails: ConnectionError: no route. The run goes on; it gets what it missed when it works again", False)]
    broken.fail = False
    while len(said) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert said[1] == ("broken takes metrics again", True)
    end(followers, finished=False)  # as in a crash of the recorder: the line that was cut short is written again
    assert kept.closed is False

    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: whole.rfind(b"\n") + 1])
    write(tmp_path, {"kind": "changed by hand"}, step(2, 0.25))
    end(follow_all({"kept": kept, "broken": broken}, tmp_path, say))
    for tracker in (kept, broken):
        assert [p.step for p in tracker.points] == [1, 2] and tracker.closed is True
        assert tracker.points[1].values["rollout/dropped/stale"] == 1.0
    assert (tmp_path / PLACES).stat().st_mode & 0o077 == 0


def test_a_tracker_that_hangs_holds_up_nobody(tmp_path):
    let_go, kept = threading.Event(), Kept()
    hangs = Kept()
    hangs.take = lambda points: let_go.wait(60)
    write(tmp_path, step(1, 0.5))
    followers = follow_all({"hangs": hangs, "kept": kept}, tmp_path, lambda text, *, well=False: None)
    for follower in followers:
        follower.end(True)
    assert followers[1].join(20) and [p.step for p in kept.points] == [1]
    assert not followers[0].join(0.05)
    let_go.set()
    assert followers[0].join(20)


def test_a_tracker_that_does_not_answer_is_named_once_though_it_never_fails(tmp_path, monkeypatch):
    """A client that tries again for minutes said nothing meanwhile."""
    monkeypatch.setattr(trackers, "LOOK_S", 0.01)
    monkeypatch.setattr(trackers, "AGAIN_S", 0.01)
    monkeypatch.setattr(trackers, "LATE_S", 0.01)
    said, told, tries = [], threading.Event(), []
    slow = Kept()

    def take(points):
        tries.append(points)
        if len(tries) == 1:
            assert told.wait(20)
        if len(tries) < 4:
            raise ConnectionError("no route")
        slow.points += points

    def say(text, *, well=False):
        said.append((text.partition(". ")[0], well))
        told.set()

    slow.take = take
    write(tmp_path, step(1, 0.5))
    [follower] = follow_all({"slow": slow}, tmp_path, say)
    deadline = time.monotonic() + 60
    while len(said) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    late, failed = ("slow has not answered for 0 s", False), ("slow fails: ConnectionError: no route", False)
    assert said == [late, failed, ("slow takes metrics again", True)]
    end([follower])
    assert [p.step for p in slow.points] == [1]


def spec_of(tmp_path, **on):
    flags = {name: False for name in NOTHING if name.startswith("use_")}
    return TrackerSpec(**NOTHING | flags | {"run": "r", "run_dir": str(tmp_path), "config": {"lr": 0.1, "eval": [1]}} | on)


def sent(tmp_path, spec, *records):
    """Write lines, and let the tracker of `spec` take them, as one start of a run does."""
    write(tmp_path, *records)
    said = []
    end(follow_all(opens(spec), tmp_path, lambda text, *, well=False: said.append(text)))
    assert said == []


def test_tensorboard_forgets_steps_that_are_trained_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = spec_of(tmp_path, use_tensorboard=True)
    restored = {"kind": "restored", "wall": 1003.5, "step": 1, "lost": [2, 3]}
    sent(tmp_path, spec, step(1, 0.5), step(2, 0.4), step(3, 0.3))
    sent(tmp_path, spec, restored, step(2, 0.2, wall=1004.0))
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [(e.step, round(e.value, 6)) for e in curves.Scalars("train/loss")] == [(1, 0.5), (2, 0.2)]


def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "ml").as_uri()
    spec = spec_of(tmp_path, use_mlflow=True, mlflow_tracking_uri=uri)
    sent(tmp_path, spec, step(1, 0.5))
    sent(tmp_path, spec, step(2, 0.25))
    client = mlflow.tracking.MlflowClient(uri)
    number = client.get_experiment_by_name("miles_async").experiment_id
    [one] = client.search_runs([number])
    assert [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, "train/loss")] == [(1, 0.5), (2, 0.25)]
    assert one.data.params["lr"] == "0.1" and one.info.status == "FINISHED"
    odd = {"eval/h/pass@4": 0.5, "a,b": 1.0, "../up": 2.0, "a//b": 3.0, "": 4.0, "x" * 300: 5.0, "Größe": 6.0}
    sent(tmp_path, spec, step(3, 0.125) | {"metrics": odd}, step(4, 0.0625))
    kept = client.get_run(one.info.run_id).data.metrics
    assert {kept[name] for name in ("eval/h/pass_4", "a_b", "_.._up", "_a__b", "_", "x" * 250, "Größe")} == set(odd.values())
    assert kept["train/loss"] == 0.0625


def test_wandb_offline_keeps_one_id_for_all_starts(tmp_path):
    pytest.importorskip("wandb")
    spec = spec_of(tmp_path, use_wandb=True, wandb_mode="offline")
    sent(tmp_path, spec, step(1, 0.5))
    sent(tmp_path, spec, step(2, 0.25))
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({f.name for f in files}) == 1
    deadline = time.monotonic() + 20  # its own process writes on after finish() has returned
    while not all(b"train/loss" in f.read_bytes() for f in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_wandb_goes_on_when_its_own_process_has_died(tmp_path):
    pytest.importorskip("wandb")
    opened = opens(spec_of(tmp_path, use_wandb=True, wandb_mode="offline"))["wandb"]
    tracker, points = opened(), Points()
    listed = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    [core] = [row for row in map(str.split, listed.splitlines()) if int(row[1]) == os.getpid() and "wandb-core" in row[2]]
    os.kill(int(core[0]), signal.SIGKILL)
    # The library never waits for a process that died, of which Python warns at any time after: in whatever test that is.
    [died] = [o for o in gc.get_objects() if isinstance(o, subprocess.Popen) and o.pid == int(core[0])]
    assert died.wait(20) == -signal.SIGKILL
    with pytest.raises(Exception):  # noqa: B017 - the library's own, some time after
        for number in range(1, 10_000):
            tracker.take([points.of(step(number, 0.5))])
    tracker = opened()
    tracker.take([points.of(step(2, 0.5))])
    tracker.close(finished=True)


def test_trackio_has_both_starts(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "t", raising=False)
    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path / "t", raising=False)
    spec = spec_of(tmp_path, use_trackio=True, trackio_project="p")
    sent(tmp_path, spec, step(1, 0.5))
    [file] = (tmp_path / "t").glob("p*.db")
    assert sqlite3.connect(file).execute("select step, run_name from metrics").fetchall() == [(1, "r")]


@pytest.fixture
def place(tmp_path):
    return Place(run_dir=str(tmp_path), model_dir="", weights_dir="", blob_dir="", stop_token_ids=(), num_rollout=1, fingerprint="")


def test_the_settings_name_trackers_and_keep_the_key_to_the_recorder(place):
    flags = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x", "num_rollout": 1, "rm_type": "math"}
    none = recorder_spec(settings_from(**flags, use_tensorboard=False), place)
    assert (none.trackers, none.exporter) == (None, None)
    s = settings_from(**flags, use_wandb=True, wandb_key="hidden", use_prometheus=True, name="mine", use_tensorboard=False)
    spec = recorder_spec(s, place)
    assert spec.trackers.wandb_key == "hidden" and "hidden" not in str(spec.trackers.config)
    told = recorder_spec(settings_from(**flags, use_wandb=True, rm_url=["http://me:hidden@host/rm?key=hidden"]), place)
    assert told.trackers.config["rm_url"] == ["http://host/rm"] and "hidden" not in str(told.trackers.config)
    assert list(opens(spec.trackers)) == ["wandb"]
    assert spec.exporter == ExporterSpec(host="127.0.0.1", port=9090, run="mine")
    with pytest.raises(SettingsError, match="wandb_mode"):
        settings_from(**flags, wandb_mode="nowhere")


def test_a_tracker_that_is_late_for_the_end_of_the_run_tells_nobody():
    told = []

    async def tell():
        told.append(True)

    async def run():
        await asyncio.to_thread(from_thread, asyncio.get_running_loop(), tell())
        async with asyncio.timeout(20):
            while not told:  # noqa: ASYNC110 - it comes in one of the next turns of the loop
                await asyncio.sleep(0)
        return asyncio.get_running_loop()

    from_thread(asyncio.run(run()), late := tell())
    assert told == [True] and inspect.getcoroutinestate(late) == inspect.CORO_CLOSED


async def records(bus):
    feed = Feed(bus)
    found, more = await feed.read(0.0)
    while more:
        fresh, more = await feed.read(0.0)
        found += fresh
    await feed.close()
    return found


async def scraped(exporter, accept=""):
    deadline = time.monotonic() + 20
    while not exporter.port:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{exporter.port}/metrics", headers={"Accept": accept}) as answer:
            return answer.status, await answer.text()


async def test_prometheus_sees_actors_streams_and_the_newest_step(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        history = history_of(await records(bus))
        exporter = Exporter(bus, ExporterSpec(host="127.0.0.1", port=0, run="mine"), lambda: history, print)
        serving = asyncio.create_task(exporter.serve())
        status, text = await scraped(exporter)
        assert status == 200
        told = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
        assert {sample.labels["run"] for sample in told.values()} == {"mine"}
        last = history.steps[-1]
        assert told["miles_async_step"].value == last.step
        assert told["miles_async_rollout_raw_reward"].value == last.metrics["rollout/raw_reward"]
        assert told["miles_async_faults_total"].value == len(history.faults) > 0

        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        shown = {*told} | {f"miles_async_{plain(name)}" for name in section(METRICS.read_text(), "In every step")}
        board = json.loads((REPO / "configs" / "grafana" / "miles_async.json").read_text())
        asked = {n for p in board["panels"] for t in p["targets"] for n in re.findall(r"miles_async_\w+", t["expr"])}
        assert asked and asked <= shown
        page = {f"miles_async_{n.partition('{')[0]}" for n in section(METRICS.read_text(), "For Prometheus")}
        made = families(await read_snapshot(bus), History())
        own = {f"miles_async_{name}{'_total' if kind == 'counter' else ''}" for name, kind, _, _ in made}
        assert own == page


async def test_metrics_whose_names_prometheus_cannot_tell_apart_spoil_no_scrape(redis_url, run_name):
    """Data sets may be named in any script, and Prometheus refuses all of an answer that names a metric twice."""
    scores = {"gsm-8k": 0.1, "gsm_8k": 0.2, "数学": 0.3, "代码": 0.4, "über": 0.6, "held": 0.5}
    made = [EvalDone(name=n, version=1, step=1, metrics={f"eval/{n}": v}, n_samples=1) for n, v in scores.items()]
    async with Bus(config(redis_url, run_name)) as bus:
        await bus.append([Out(EVAL_RESULTS, one) for one in made], repeatable=True)
        history = history_of(await records(bus))
        exporter = Exporter(bus, ExporterSpec(host="127.0.0.1", port=0, run="mine"), lambda: history, print)
        serving = asyncio.create_task(exporter.serve())
        status, text = await scraped(exporter, "application/openmetrics-text; version=1.0.0")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert status == 200
    told = {(s.name, s.labels.get("metric")): s.value for family in strictly(text) for s in family.samples}
    assert told["miles_async_eval_held", None] == 0.5
    named = {metric: value for (name, metric), value in told.items() if metric}
    assert named == {f"eval/{name}": value for name, value in scores.items() if name != "held"}


async def test_a_port_that_is_taken_is_named_and_the_run_goes_on(redis_url, run_name, monkeypatch):
    monkeypatch.setattr("actors.recorder.exporter.AGAIN_S", 0.05)
    said = []
    async with Bus(config(redis_url, run_name)) as bus:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            exporter = Exporter(bus, ExporterSpec(host="127.0.0.1", port=port, run="r"), History, said.append)
            exporter.port = 0
            serving = asyncio.create_task(exporter.serve())
            deadline = time.monotonic() + 20
            while not said:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert str(port) in said[0] and "--prometheus-port" in said[0]
        assert (await scraped(exporter))[0] == 200
        assert len(said) == 1
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
