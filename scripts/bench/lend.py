"""Steps an hour with and without --lend-trainer-gpus where generation is the bound, on engines that take their time.

    python -m scripts.bench lend --load R=2T R=4T --steps 8 --out FILE.json

Real rooms, real Redis, a trainer that sleeps for its step and the stand-in engines of schedule.py: one that is always there,
and with lending one more while the trainer waits. R are the seconds of a batch on the first one, T those of a step. Giving memory
back and taking it again costs the engine 0.2 s each. If that cost nothing, a step would take (R + T) / 2 instead of R.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bus import Tail
from bus.messages.policy import StepDone
from bus.topology import POLICY
from scripts.bench import command
from scripts.bench.schedule_house import LOADS, Case, run_of


async def measure(case: Case, folder: Path) -> dict[str, Any]:
    """One run: its figures over the steps after the first ones."""
    done: list[StepDone] = []
    async with run_of(case, folder) as (bus, _, _):
        tail = Tail(bus, [POLICY], start="0")
        await tail.open()
        try:
            async with asyncio.timeout(300.0):
                while len(done) <= case.warm + case.steps:
                    found = [await bus.message(entry) for entry in await tail.read(0.5)]
                    done += [message for message in found if isinstance(message, StepDone)]
        finally:
            await tail.close()
    late = done[case.warm + 1 : case.warm + 1 + case.steps]
    step_s = (late[-1].wall - done[case.warm].wall) / len(late)
    waits = [d.metrics.get("perf/gpu_wait_s", 0.0) for d in late]
    lent_s = sum(d.metrics.get("perf/lent_s", 0.0) for d in late)
    means = {
        name: round(statistics.mean(d.metrics.get(f"perf/{name}", 0.0) for d in late), 3) for name in ("wait_s", "turn_s", "lent_s")
    }
    return {
        "step_s": round(step_s, 3), "steps_per_hour": round(3600 / step_s, 1),
        "lent_share_of_time": round(lent_s / (step_s * len(late)), 3),
        **means,
        "gpu_wait_s": {"mean": round(statistics.mean(waits), 3), "max": round(max(waits), 3)},
        "staleness": round(statistics.mean(d.metrics.get("rollout/fully_async/avg_staleness", 0.0) for d in late), 3),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=list(LOADS), default=["R=2T", "R=4T"])
    parser.add_argument("--ways", nargs="+", choices=("apart", "lent"), default=["apart", "lent"])
    parser.add_argument("--slots", type=int, default=32, help="of one engine")
    parser.add_argument("--median-s", type=float, default=2.5, help="of a sample's seconds")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="rows are added to those that are there")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text())["rows"] if args.out is not None and args.out.exists() else []
    for load in args.load:
        for way in args.ways:
            case = Case(
                lengths="lognormal", load=load, bound=2, policy="split", slots=args.slots, median_s=args.median_s, chunk=8,
                warm=args.warm, steps=args.steps, lends=way == "lent",
            )  # fmt: skip
            folder = Path(mkdtemp(prefix="bench-lend-", dir="/dev/shm"))
            try:
                figures = asyncio.run(measure(case, folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            sizes = {"rollout_s": round(case.rollout_s, 2), "train_s": round(case.train_s, 2)}
            rows.append({"load": load, "way": way} | sizes | figures | {"load_average": round(os.getloadavg()[0], 2)})
            print(json.dumps(rows[-1]), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps({"command": command(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
