"""Nodes of a Ray cluster that die and join while a run goes on: does it end well, and how soon does a node that joins serve?

    python -m scripts.bench ray_nodes --minutes 10 --every 30

The cluster is of this machine: a head with the launcher and Redis, and three nodes of two CPUs each. Every EVERY seconds a node is
killed without a word, another in turn, and a new one joins five seconds later. What the run did is judged as in the crash tests.
A node's time to serve counts from when Ray knows it, and from the start of Ray on it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.bench import REPO

os.environ["PYTHONPATH"] = str(REPO)  # of the nodes

from tests.cluster.house import RayRun
from tests.crash.house import until
from tests.crash.judge import judge
from tests.crash.toy import make_toy

AWAY_S = 5.0


def serving_on(run: RayRun, node: str, since: float) -> float:
    """Wall time at which a worker of a node first served, 0 when none has."""
    placed = [e for e in run.events("placed") if f"(node {node[:8]}" in e.text and e.text.startswith("generation-")]
    for event in placed:
        name = event.text.partition(" on ")[0]
        served = [e.wall for e in run.events("activated", name) if e.wall >= since]
        if served:
            return served[0]
    return 0.0


def main() -> None:
    """Measure, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=30.0)
    args = parser.parse_args()
    settings = {
        "rollout": {"num_rollout": 100_000, "num_reward_workers": 1},
        "sglang": {"num_generation_workers": 1},
        "launch": {"min_workers": 1, "max_workers": 3, "ray_wait_s": 120.0},
    }
    with TemporaryDirectory(prefix="ma-ray-") as folder:
        home = Path(folder)
        run = RayRun(make_toy(home / "toy"), home, settings, soon=False)
        try:
            for _ in range(3):
                run.add(cpus=2)
            run.start()
            run.until_step(1)
            joins, kills, steps = [], 0, []
            end = time.monotonic() + 60 * args.minutes
            while time.monotonic() < end:
                next_kill = time.monotonic() + args.every
                run.lose(run.nodes[0])
                kills += 1
                time.sleep(AWAY_S)
                began = time.time()
                node = run.add(cpus=2)  # until Ray says that it is there
                joined, served = time.time(), 0.0
                while time.monotonic() < next_kill and not (served := serving_on(run, node.node_id, began)):
                    time.sleep(0.2)
                joins.append((round(served - joined, 1), round(served - began, 1)) if served else None)
                steps.append(run.step())
                said = f"served {joins[-1][0]} s after it joined, {joins[-1][1]} s after its start" if served else "did not serve"
                print(f"kill {kills}: step {steps[-1]}, new node {said}, load {os.getloadavg()[0]:.1f}", flush=True)
                time.sleep(max(0.0, next_kill - time.monotonic()))
            step = run.step()
            until("training to go on after the last kill", lambda: run.step() > step)
            run.drain()
            judge(run, steps=run.step(), whole_policy=False)  # its log is cut at its length
            moved = len(run.events("moved"))
            print(json.dumps({"kills": kills, "moved": moved, "steps": run.step(), "ledger": "closed", "joins_s": joins}))
        except BaseException:
            print(run.story())
            for kind in ("placed", "moved", "leaving", "restart"):
                print(kind, *[f"{e.wall:.0f} {e.text}" for e in run.events(kind)][-20:], sep="\n  ")
            raise
        finally:
            run.clean()


if __name__ == "__main__":
    main()
