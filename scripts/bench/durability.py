"""What checkpoints and saved prefixes cost: quickstart wall time with and without them, in pairs.

    python -m scripts.bench durability --pairs 5 --out durability.json

The two runs of a pair go one after the other on the same two cores, first one first in every other pair. `--at-once` pairs
run side by side, each on cores of its own. The first run of all only makes the model. Exit status 1 when a run failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

from scripts.bench import command
from scripts.bench.study import REPO, Job, run_one

WITH: tuple[str, ...] = ()
WITHOUT = ("--no-save", "--partial-save-tokens", "1000000")


async def measure(pairs: int, at_once: int, runs: Path) -> list[dict[str, Any]]:
    """Rows in pairs: [with, without] wall seconds."""
    cores = sorted(os.sched_getaffinity(0))
    free: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    for slot in range(at_once):
        free.put_nowait((cores[2 * slot % len(cores)], cores[(2 * slot + 1) % len(cores)]))
    await run_one(Job("model", 1, ("--num-rollout", "1")), (cores[0], cores[-1]), runs)

    async def pair(number: int) -> dict[str, Any]:
        own = await free.get()
        try:
            walls: dict[str, dict[str, Any]] = {}
            jobs = [Job(f"with-{number}", 1, WITH), Job(f"without-{number}", 1, WITHOUT)]
            for job in jobs if number % 2 else reversed(jobs):
                walls[job.label.split("-")[0]] = await run_one(job, own, runs)
        finally:
            free.put_nowait(own)
        ok = all(w["exit"] == 0 for w in walls.values())
        seconds = {name: w["wall_s"] for name, w in walls.items()}
        return {"ok": ok, **seconds, "ratio": seconds["with"] / seconds["without"]}

    return list(await asyncio.gather(*(pair(n) for n in range(pairs))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--runs-dir", type=Path, default=REPO / "runs" / "durability")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    rows = asyncio.run(measure(args.pairs, args.at_once, args.runs_dir.resolve()))
    middle = {name: statistics.median(row[name] for row in rows) for name in ("with", "without", "ratio")}
    result = {
        "command": command(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "pairs": rows,
        "medians": middle,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(middle))
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
