"""A run that Ray places: nodes that die, join and are drained, a launcher that dies, trainers over several nodes, refusals."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

from actors.runtime.child import free_port
from miles_async.launcher.ray_cluster import check_head
from miles_async.settings.errors import SettingsError
from tests.cluster.house import RayRun, with_jobs
from tests.crash.house import REPO, Tables, merged, until
from tests.crash.judge import judge
from tests.system.test_colocate import SHARED, turns_alternate
from tests.system.test_weight_transports import story

Make = Callable[..., RayRun]
pytestmark = [pytest.mark.crash, pytest.mark.timeout(500)]

SMALL: Tables = {"rollout": {"num_reward_workers": 1}, "launch": {"ray_wait_s": 60.0}}
LONG = merged(SMALL, {"rollout": {"num_rollout": 100_000}})
WAITING = merged(LONG, {"launch": {"min_workers": 1, "max_workers": 3}})


def pids(run: RayRun) -> dict[str, list[int]]:
    """Of all actors."""
    return {file.stem: run.pids(file.stem) for file in (run.dir / "actors").glob("*.json")}


def test_a_run_that_ray_places_ends_with_its_steps_and_leaves_nothing(ray_run: Make, tmp_path: Path) -> None:
    """Then the head of another Ray is named before a model is made: one cluster, since each takes ten seconds of a processor."""
    run = ray_run(merged(SMALL, {"rollout": {"num_rollout": 4}}), head_cpus=4)
    run.start()
    run.finish()
    judge(run)
    placed = [event.text.partition(" on ")[0] for event in run.events("placed")]
    assert sorted(placed) == ["generation-0", "recorder, sampler, filter, partial", "reward-0", "trainer, publisher"]
    assert not run.processes(), "a place of Ray's outlived the run"

    gcs = GcsClient(address=run.cluster.address)
    told = json.dumps(get_cluster_metadata(gcs) | {"ray_version": "2.0.0"}).encode()
    gcs.internal_kv_put(CLUSTER_METADATA_KEY, told, True, KV_NAMESPACE_CLUSTER)
    words = [sys.executable, "-m", "miles_async", "train", "configs/quickstart.toml", "--runs-dir", str(tmp_path)]
    words += ["--launcher", "ray", "--ray-address", run.cluster.address, "--bus-url", "redis://127.0.0.1:1", "--console", "none"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    refusal = [line for line in done.stderr.splitlines() if not line.startswith("note:")]
    assert done.returncode == 2 and len(refusal) == 1, done.stderr
    assert "cannot be joined: Version mismatch: The cluster was started with: Ray: 2.0.0" in refusal[0]
    assert not (tmp_path / ".models").exists()


@pytest.mark.slow
def test_a_run_goes_on_where_there_is_room_when_a_node_dies(ray_run: Make) -> None:
    run = ray_run(LONG, head_cpus=4)
    node = run.add(cpus=4)
    run.start()
    run.until_step(2)
    there = [event.text for event in run.events("placed") if f"(node {node.node_id[:8]}" in event.text]
    assert there, run.story()
    run.lose(node)
    until("its actors to be placed anew", lambda: len(run.events("placed")) >= 4 + len(there))
    step = run.step()
    until("training to go on", lambda: run.step() >= step + 2)
    assert not run.events("restart"), "a lost node counted as a crash"
    assert {e.text.partition(": ")[2] for e in run.events("moved")} == {
        f"node {node.node_ip_address} ({node.node_id[:8]}) is gone; it is placed anew"
    }
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
@pytest.mark.takes(200)
def test_a_head_that_is_started_again_has_never_two_of_an_actor(ray_run: Make) -> None:
    """Its launcher ends, the run's actors go on, and a launcher on the new one is refused until they have ended."""
    run = ray_run(LONG)
    run.add(cpus=6)
    run.start()
    run.until_step(2)
    until("a checkpoint", lambda: run.saved() > 0)
    before = pids(run)
    run.lose_head()
    assert run.join(seconds=200.0) == 1, run.output()
    assert "Failed to connect to GCS within 60 seconds" in run.output().strip().splitlines()[-1], run.output()
    assert "Traceback" not in run.output(), run.output()
    step = run.step()
    until("training to go on", lambda: run.step() >= step + 2)
    assert pids(run) == before
    run.another_cluster()
    run.add(cpus=6)
    run.start()
    assert run.join(seconds=120.0) == 2, run.output()
    refusal = run.output().strip().splitlines()[-1]
    assert "live, and this Ray cluster does not keep them" in refusal and "miles-async stop" in refusal, refusal
    assert pids(run) == before
    done = run.command("stop", "--bus-url", run.url, "--run", "r")
    assert done.returncode == 0, done.stderr
    until("all of them to end", lambda: not run.processes(), seconds=120.0)
    saved = run.saved()
    run.start()
    until("training to go on", lambda: run.step() >= saved + 4, seconds=240.0)
    assert {name: len(found) for name, found in pids(run).items()} == {name: len(found) for name, found in before.items()}
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_workers_come_with_nodes_and_make_room_for_what_is_needed(ray_run: Make) -> None:
    run = ray_run(WAITING)
    first, _ = run.add(cpus=3), run.add(cpus=1)
    run.start()
    run.until_step(1)
    assert {e.actor for e in run.events("activated")} == {"generation-0"}
    run.add(cpus=3)
    for name in ("generation-1", "generation-2"):
        run.until_it_serves(name)
    run.lose(first)
    made_room = lambda: any("its space is needed for" in event.text for event in run.events("leaving"))  # noqa: E731
    until("an engine to make room", made_room)  # what was ready before that is still trained
    step = run.step()
    until("the rooms to be placed in their stead", lambda: run.step() >= step + 3)
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_the_next_launcher_finds_what_runs(ray_run: Make) -> None:
    run = ray_run(LONG)
    run.add(cpus=6)
    run.start()
    run.until_step(2)
    before = pids(run)
    assert run.launcher is not None
    run.launcher.kill()
    run.launcher.wait(10)
    step = run.step()
    until("training to go on without a launcher", lambda: run.step() > step)
    run.start()
    until("the second launcher", lambda: len(run.events("adopted")) >= len(before))
    assert pids(run) == before
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_a_node_that_ray_drains_is_left_before_it_is_gone(ray_run: Make) -> None:
    run = ray_run(merged(LONG, {"sglang": {"num_generation_workers": 1}}), head_cpus=0)
    node, _ = run.add(cpus=4), None
    run.start()
    run.until_step(2)
    other = run.add(cpus=4)
    words = ["drain-node", "--address", run.cluster.address, "--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    words += ["--reason-message", "spot", "--deadline-remaining-seconds", "60"]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words], check=True, capture_output=True, timeout=60)
    until("all to move", lambda: sum(f"(node {other.node_id[:8]}" in e.text for e in run.events("placed")) >= 4)
    assert "checkpoint" in (run.dir / "logs" / "trainer.log").read_text()
    run.lose(node)
    step = run.step()
    until("training to go on", lambda: run.step() >= step + 2)
    assert not run.events("restart"), run.story()
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
def test_a_trainer_over_two_nodes_outlives_one_of_its_ranks(ray_run: Make) -> None:
    run = ray_run(merged(LONG, {"perf": {"actor_num_nodes": 2, "trainer_threads": 4}}))
    for _ in range(2):
        run.add(cpus=6)
    run.start()
    run.until_step(2)
    [rank] = [p for p in run.processes() if "actors.trainer.follower" in p.cmdline()]
    rank.kill()
    step = run.step()
    until("training to go on with new ranks", lambda: run.step() >= step + 2)
    placed, parts = run.events("placed"), ("trainer, publisher", "part 1 of trainer")
    first, other = (next(event for event in placed if part in event.text) for part in parts)
    assert first.text[-9:-1] != other.text[-9:-1], "both on one node"
    assert "trainer was killed by signal 9" in run.events("restart")[0].text
    run.drain()
    judge(run, steps=run.step())


@pytest.mark.slow
@pytest.mark.takes(200)
def test_engines_on_the_trainers_nodes_take_turns_and_outlive_one_of_them(ray_run: Make) -> None:
    own: Tables = {"rollout": LONG["rollout"], "perf": {"actor_num_nodes": 2, "trainer_threads": 3}}
    run = ray_run(merged(merged(SHARED, LONG), own))
    for _ in range(2):
        run.add(cpus=5)
    run.start()
    run.until_step(2)
    first, other = run.node_of("trainer, publisher, generation-0"), run.node_of("generation-1")
    assert None not in (first, other) and first is not other, run.story()
    served = len(run.events("activated", "generation-1"))
    run.add(cpus=5)
    run.lose(other)
    run.until_it_serves("generation-1", more_than=served, seconds=200.0)
    step = run.step()
    until("training to go on", lambda: run.step() >= step + 2, seconds=200.0)
    assert run.node_of("generation-1") is run.nodes[-1] and run.node_of("trainer, publisher, generation-0") is first
    run.drain()
    judge(run, steps=run.step())
    turns_alternate(story(run)[0])


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused_with_what_it_has(ray_run: Make) -> None:
    run = ray_run(merged(SMALL, {"launch": {"ray_wait_s": 5.0}, "perf": {"trainer_threads": 8}}), head_cpus=1)
    run.start()
    assert run.join(seconds=120) == 2
    said = run.output().splitlines()[-1]
    assert "ray_wait_s = 5.0: no space for trainer (8 CPU); rooms (1 CPU, 1 CPU)" in said and "1 node(s)" in said, said
    assert not run.processes()


@pytest.mark.slow
def test_a_folder_that_the_trainers_node_cannot_write_is_refused_before_anything_starts(ray_run: Make, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    run = ray_run(merged(SMALL, {"ckpt": {"dump_details": f"{tmp_path}/taken/dump"}}), head_cpus=4)
    run.start()
    assert run.join(seconds=120) == 2
    said = run.output().splitlines()[-1]
    assert "launcher = 'ray': node " in said and f", save_debug_train_data = '{tmp_path}/taken/dump/" in said, said
    assert f": {tmp_path}/taken is a file, not a folder. Choose a folder" in said, said
    assert not run.processes()


@pytest.mark.slow
def test_a_run_that_is_submitted_as_a_job_ends_with_its_steps(ray_run: Make) -> None:
    pytest.importorskip("aiohttp_cors", reason="ray without [default] has no dashboard, which takes jobs")
    run = ray_run(merged(SMALL, {"rollout": {"num_rollout": 4}}), head_cpus=5, jobs=True)
    run.submit()
    run.finish()
    judge(run)
    said = run.output().splitlines()
    assert said[0].startswith("job raysubmit_") and "finished at step 4" in said, run.output()
    assert not run.processes(), "a place of Ray's outlived the run"


@pytest.mark.slow
def test_a_jobs_output_is_shown_and_a_dashboard_that_dies_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp_cors", reason="ray without [default] has no dashboard, which takes jobs")
    head = {"num_cpus": 1, **with_jobs(free_port())}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        words = [sys.executable, "-m", "miles_async", "ray", "submit", "nosuch.toml"]
        words += ["--ray-address", f"http://127.0.0.1:{head['dashboard_port']}", "--python"]
        done = subprocess.run([*words, sys.executable], cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 1 and not done.stderr, done.stderr
        assert "miles-async train: no such settings file: nosuch.toml" in done.stdout
        (waits := tmp_path / "waits").write_text("#!/bin/sh\necho it waits\nexec sleep 100\n")
        waits.chmod(0o755)
        with subprocess.Popen([*words, str(waits)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as submit:
            assert submit.stdout is not None and any("it waits" in line for line in submit.stdout)
            cluster.head_node.kill_dashboard()
            _, said = submit.communicate(timeout=60)
        assert submit.returncode == 2 and len(said.splitlines()) == 1, said
        assert "miles-async ray: the dashboard is lost" in said and "ray job logs raysubmit_" in said
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("answer", [b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_server_at_the_address_is_named_at_once(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.accept()[0].close()  # the first look: does anybody listen
            with server.accept()[0] as peer, suppress(OSError):  # it may have hung up
                peer.sendall(answer)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(100):
                    continue

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        says = f"answers {answer[:9]!r}" if answer else "says nothing"
        with pytest.raises(SettingsError, match=re.escape(f"{address}': is no head of a Ray cluster: it {says}")):
            check_head(address)


def test_without_a_cluster_one_line_says_so() -> None:
    began = time.monotonic()
    words = [sys.executable, "-m", "miles_async", "ray", "submit", "run.toml", "--ray-address", "127.0.0.1:1"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "ray_address = '127.0.0.1:1': does not answer" in done.stderr, time.monotonic() - began


JOINS = """
import sys
from miles_async.launcher.ray_cluster import connect
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
try:
    connect(settings_from(hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=1, rm_type="math", launcher="ray",
                          ray_address=sys.argv[1], bus_url="redis://127.0.0.1:1"))
except SettingsError as error:
    sys.exit(f"{error}")
"""


@pytest.mark.slow
def test_a_cluster_that_wants_another_token_says_so_in_one_line_to_a_run_and_to_a_job() -> None:
    pytest.importorskip("aiohttp_cors", reason="ray without [default] has no dashboard, which takes jobs")
    head, dashboard, auth = free_port(), free_port(), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(head), "--num-cpus", "4"]
    start += ["--dashboard-agent-listen-port", str(free_port()), "--dashboard-port", str(dashboard)]
    start += ["--min-worker-port", "0", "--max-worker-port", "0"]
    start += ["--disable-usage-stats", "--temp-dir"]
    commands = (
        ["-m", "miles_async", "ray", "submit", "run.toml", "--ray-address", f"http://127.0.0.1:{dashboard}"],
        ["-c", JOINS, f"127.0.0.1:{head}"],
    )
    with (
        TemporaryDirectory(prefix="ma-ray-") as folder,
        subprocess.Popen([*start, folder], env=os.environ | auth, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            until("the head", lambda: listens(head) and listens(dashboard), seconds=60)
            for words in commands:
                for token, says in ((auth | {"RAY_AUTH_TOKEN": "b" * 32}, "refuses the token of this host"), ({}, "wants a token")):
                    own, line = os.environ | token, [sys.executable, *words]
                    done = subprocess.run(line, env=own, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
                    said = done.stderr.splitlines()
                    assert done.returncode and len(said) == 1 and f"the Ray cluster {says}" in said[0], done.stderr
        finally:
            process.terminate()
            process.wait(30)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
