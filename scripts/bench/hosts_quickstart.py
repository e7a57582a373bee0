"""The quickstart over three hosts against one: does it learn as well, and at most 1.15 times as long?

    sudo python -m scripts.bench hosts --quickstart --runs 3 --delay-us 500

Hosts are network namespaces of this machine (tests/hosts/net.py), so both ways share its cores: a ratio tells what the way over
hosts costs. One host: trainer, rooms and two workers, as the quickstart stands. Three: trainer, rooms and Redis on the first, a
worker on each other one, 1 Gbit/s links that take `--delay-us` each way (a packet between two hosts passes two), clocks 90 s before
and behind, memory and folders of their own. The two ways take turns, so that a busy machine meets both. The model is made before,
once: it would be made on one host in both ways, while the workers of the others look for the run and take its processors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.recorder.file import read_records
from bus.server.binary import find_server
from miles_async.quickstart.model import make_model
from miles_async.quickstart.tasks import TASKS
from tests.crash.house import REPO, until
from tests.hosts.net import Host, Net

DEADLINE_S = 1800.0
SEED = 1234  # the run's, when none is given
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO)}
ME = [sys.executable, "-m", "miles_async"]


def train(host: Host, home: Path, *flags: str) -> subprocess.Popen[bytes]:
    """The quickstart's launcher on a host."""
    own = ["--runs-dir", str(home / "runs"), "--name", "q", "--console", "none", "--no-report"]
    words = [*host.enter(), *ME, "train", str(REPO / "configs" / "quickstart.toml"), *own, *flags]
    with (home / "train.log").open("ab") as log:
        return subprocess.Popen(words, cwd=REPO, env=ENVIRONMENT, stdout=log, stderr=log)


def facts(home: Path, began: float, code: int) -> dict[str, Any]:
    """Seconds from the command, and from the first step, to the end; the last score of the held-out problems."""
    records = read_records(home / "runs" / "q")
    steps = [r for r in records if r["kind"] == "step"]
    scores = [r["metrics"]["eval/held_out"] for r in records if r["kind"] == "eval" and "eval/held_out" in r["metrics"]]
    if code or not steps:
        raise SystemExit(f"the run ended with status {code}: {(home / 'train.log').read_text()[-2000:]}")
    return {
        "s": round(time.monotonic() - began, 1),
        "steps_s": round(steps[-1]["wall"] - steps[0]["wall"], 1),
        "steps": len(steps),
        "score": round(scores[-1], 3) if scores else None,
    }


def on_one(net: Net, home: Path, delay_us: int, *flags: str) -> dict[str, Any]:
    """As it stands: nothing of it passes a link."""
    began = time.monotonic()
    return facts(home, began, train(net.host("a"), home, *flags).wait(DEADLINE_S))


def on_three(net: Net, home: Path, delay_us: int, *flags: str) -> dict[str, Any]:
    """A worker on each of two other hosts."""
    a, b, c = (net.host(name, skew_s=skew, delay_us=delay_us) for name, skew in (("a", 0), ("b", 90), ("c", -90)))
    for host in (a, b, c):
        host.shape("1gbit")
    words = f"{find_server().path} --bind 0.0.0.0 --protected-mode no --port 6379 --unixsocket {home / 'redis.sock'} --save ''"
    redis = subprocess.Popen([*a.enter(), "sh", "-c", f"exec {words} --dir {home}"], stdout=subprocess.DEVNULL)
    until("Redis", (home / "redis.sock").exists, seconds=10.0)
    url, began = f"redis://{a.address}:6379", time.monotonic()
    run = train(a, home, "--bus-url", url, "--num-generation-workers", "0", *flags)
    workers = []
    for host in (b, c):
        own = ["--bus", url, "--run", "q", "--model-path", str(home / "model"), "--name", host.name]
        joining = [*host.enter([home / "runs"]), "sh", "-c", 'until "$@"; do sleep 1; done', "sh", *ME, "worker", *own]
        with (home / f"{host.name}.log").open("ab") as log:
            workers.append(subprocess.Popen(joining, cwd=REPO, env=ENVIRONMENT, stdout=log, stderr=log))
    found = facts(home, began, run.wait(DEADLINE_S))
    for process in (*workers, redis):
        process.kill()
        process.wait(10)
    return found


def quickstart(args: argparse.Namespace) -> int:
    """Both ways in turns; the medians and their ratio."""
    flags = ["--num-rollout", str(args.steps)] if args.steps else []
    found: dict[str, list[dict[str, Any]]] = {"one": [], "three": []}
    with TemporaryDirectory(prefix="ma-quick-") as top:
        model = Path(top) / "model"
        make_model(model, TASKS["arithmetic"], seed=SEED)
        for i in range(args.runs):
            for way, run in (("one", on_one), ("three", on_three)):
                home = Path(top) / f"{way}-{i}"
                shutil.copytree(model, home / "model")
                shutil.copytree(model, home / "runs" / ".models" / f"arithmetic-seed{SEED}")
                net = Net(home / "net")
                try:
                    found[way].append(run(net, home, args.delay_us, *flags))
                finally:
                    net.close()
                print(json.dumps({way: found[way][-1]}), flush=True)
    medians = {way: statistics.median(run["s"] for run in runs) for way, runs in found.items()}
    summary = {"delay_us": args.delay_us, "runs": found, "median_s": medians, "ratio": round(medians["three"] / medians["one"], 3)}
    print(json.dumps(summary))
    if args.out:
        args.out.write_text(json.dumps(summary, indent=1) + "\n")
    return 0
