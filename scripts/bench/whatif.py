"""How well `miles-async whatif` foresees a run that it did not see: recorded under some settings, measured under others.

    python -m scripts.bench whatif --out whatif.json

Real rooms over a real Redis with scripted engines (schedule_house.py); the record of the first predicts each of the others. The
engines sleep, so figures hold on a machine with idle processors: see `load`. Files lie in shared memory and are removed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

from actors.recorder.feed import Feed
from actors.recorder.records import Record
from miles_async.console.whatif import compare, recorded, sound
from scripts.bench import command
from scripts.bench.schedule import STEP_DEADLINE_S
from scripts.bench.schedule_engine import LENGTHS
from scripts.bench.schedule_house import LOADS, Case, prefer, run_of

SHOWN = ("step_s", "wait", "idle", "masked", "mean_age")


@dataclass(frozen=True, kw_only=True)
class Known(Case):
    """A case whose trainer takes what it is told, however many slots there are."""

    train: float

    @property
    def train_s(self) -> float:
        return self.train


async def record(case: Case, folder: Path, nice: int | None) -> list[Record]:
    """The record of a run of so many steps."""
    found: list[Record] = []
    async with run_of(case, folder) as (bus, pids, _):
        feed = Feed(bus)  # what a run's recorder reads
        try:
            while len(feed.history.steps) <= case.warm + case.steps:
                async with asyncio.timeout(STEP_DEADLINE_S):
                    before = len(feed.history.steps)
                    while len(feed.history.steps) == before:
                        found += (await feed.read(0.5))[0]
                if nice is not None and before == 0:
                    prefer(list(pids.values()), nice)
        finally:
            await feed.close()
    return sound(found)


def measure(case: Case, nice: int | None) -> tuple[list[Record], float]:
    """The record, and the machine's load while it was made."""
    shared = Path("/dev/shm")
    folder = Path(mkdtemp(prefix="bench-whatif-", dir=shared if shared.is_dir() else None))
    try:
        return asyncio.run(record(case, folder, nice)), os.getloadavg()[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bound", type=int, nargs="+", default=[1, 2, 4], help="recorded at the first, predicted for the others")
    parser.add_argument("--slots", type=int, nargs="*", default=[48], help="of the engine; predicted too, at the second bound")
    parser.add_argument("--lengths", choices=LENGTHS, default="lognormal")
    parser.add_argument("--load", choices=list(LOADS), default="R=T")
    parser.add_argument("--median-s", type=float, default=1.0, help="of a sample's seconds")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--nice", type=int, help="priority of the run's processes, as in schedule.py")
    parser.add_argument("--keep", type=Path, help="folder that gets the records")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    case = Case(lengths=args.lengths, load=args.load, bound=args.bound[0], policy="split", median_s=args.median_s)
    first = Known(
        lengths=args.lengths, load=args.load, bound=args.bound[0], policy="split", median_s=args.median_s, proportional=True,
        steps=args.steps, train=case.train_s,
    )  # fmt: skip
    asked: list[tuple[dict[str, Any], Case]] = [({"max_weight_staleness": b}, replace(first, bound=b)) for b in args.bound[1:]]
    asked += [
        (
            {"max_weight_staleness": args.bound[1], "sglang_server_concurrency": n},
            replace(first, bound=args.bound[1], slots=n),
        )
        for n in args.slots
    ]
    rows: list[dict[str, Any]] = []
    records, load = measure(first, args.nice)
    seen = recorded(records)
    for patch, case in [({}, first), *asked]:
        own, own_load = (records, load) if case is first else measure(case, args.nice)
        found, truth = compare(seen, patch, seeds=args.seeds), recorded(own).measured
        figures = found.then or found.simulated
        rows.append(
            {
                "asked": patch or "the recorded run itself",
                "ratio": round(figures["step_s"].mean / truth.step_s, 4),
                "load": round(own_load, 1),
                **{name: [round(figures[name].mean, 4), round(getattr(truth, name), 4)] for name in SHOWN},
                "error_s": [round(figures["step_s"].spread, 4), round(truth.error_s, 4)],
            }
        )
        print(rows[-1], flush=True)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            name = "_".join(map(str, patch.values())) or "recorded"
            (args.keep / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in own))
    facts = {"date": date.today().isoformat(), "command": command(), "train_s": first.train}
    if args.out:
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
