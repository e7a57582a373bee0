"""What the scheduling rule costs: real rooms over a real Redis, with engines and a trainer that take the time they are told.

    python -m scripts.bench schedule --bound 2 --out schedule.json

Nine cases: lengths log-normal, the same with 2 % ten times as long, geometric; the trainer's seconds T as long as the engines'
seconds R for a batch, half and double. The engines (schedule_engine.py) speak HTTP in a process of their own, the trainer
sleeps, and each room is its own process, as the launcher starts it (schedule_house.py). Per case: efficiency max(R, T) / step,
tokens lost (all drops in the ledger) and masked, ages of tokens when they are trained (before the mask), groups trained in
parts, samples born too old (older than the step they were issued at / over the bound already), CPU a sample; beside it the
figures of the simulation in miles_async/console/whatif, which has no overhead, for the same samples.

A machine with other load adds to every step: see `median_step_s`, `between_steps_ms` and `load_average` of each row.
`--jobs` runs so many cases at once, on a machine that has the cores for them. `--policy`, `--over-sampling` and `--set
name=value` go to the settings as they are; `--set governor=true --set governor_staleness=1:6` lets the governor move the bound.
Files lie in shared memory and are removed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import mean, median, pstdev
from tempfile import mkdtemp
from typing import Any

import aiohttp
import msgspec

from actors.runtime.seeds import rng_for
from actors.trainer.record import RecordedBatch, path_of, read_record
from bus import Bus, Tail, ledger
from bus.messages.policy import StepDone
from bus.topology import POLICY
from miles_async.console.whatif.setup import Draw, DrawnGroup, SimulatedKnobs, SimulatedPace
from miles_async.console.whatif.simulation import Simulation
from scripts.bench import command
from scripts.bench.schedule_engine import LENGTHS, seconds_of, serve, tokens_of
from scripts.bench.schedule_house import LOADS, Case, governed, prefer, run_of, settings_of, train

STEP_DEADLINE_S = 60.0


# -- what is seen of it ----------------------------------------------------------------------------------------------


class Look(msgspec.Struct):
    """The accounts and the processes at one instant."""

    wall: float
    dropped: dict[str, int]
    trained: int
    area: float  # requests running, integrated over seconds
    at: float
    cpu: dict[str, float]


async def look(bus: Bus, pids: dict[str, int], url: str) -> Look:
    accounts = await ledger.read_accounts(bus)
    async with aiohttp.ClientSession() as http, http.get(f"{url}/stats") as answer:
        stats = await answer.json()
    cpu = {name: cpu_s(pid) for name, pid in pids.items()}
    return Look(time.time(), accounts.tokens_dropped, accounts.tokens_trained, stats["area"], stats["at"], cpu)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alive(pid: int) -> bool:
    """Whether a process runs, and not only waits to be collected."""
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


async def watch(case: Case, folder: Path, nice: int | None) -> dict[str, Any]:
    """Run a case; its row, with those of the simulation beside."""
    done: list[StepDone] = []
    async with run_of(case, folder) as (bus, pids, url), governed(bus) as record:
        tail = Tail(bus, [POLICY], start="0")
        await tail.open()
        first = None
        try:
            while len(done) <= case.warm + case.steps:
                async with asyncio.timeout(STEP_DEADLINE_S):
                    before = len(done)
                    while len(done) == before:
                        for name, pid in pids.items():
                            if not alive(pid):
                                raise RuntimeError(f"{name} ended: {(folder / f'{name}.log').read_text()[-2000:]}")
                        for entry in await tail.read(0.5):
                            if isinstance(message := await bus.message(entry), StepDone):
                                done.append(message)
                if nice is not None and before == 0:
                    prefer(list(pids.values()), nice)
                if first is None and len(done) > case.warm:
                    first = await look(bus, pids, url)
        finally:
            await tail.close()
        assert first is not None
        last = await look(bus, pids, url)
    records = [read_record(path_of(str(folder / "batches" / "{rollout_id}"), d.step)) for d in done]
    log = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    over_sampling = settings_of(case, folder, 0).rollout.over_sampling_batch_size
    row = row_of(case, done, records, {s: (began, ended) for s, began, ended in log}, first, last)
    moves = [f"{r['values']}: {r['reason']}" for r in record if r["kind"] == "knob" and r["author"] == "governor"]
    row |= {"governor": moves} if moves else {}
    twice = len(log) - len({sample_id for sample_id, _, _ in log})  # not 0: an engine was given up, or a lease lost
    return row | {"generated_twice": twice, "over_sampling": over_sampling, "simulated": simulated(case, over_sampling)}


def row_of(
    case: Case,
    done: Sequence[StepDone],
    records: Sequence[RecordedBatch],
    lives: dict[str, tuple[float, float]],
    first: Look,
    last: Look,
) -> dict[str, Any]:
    """One line of the table; shares are of tokens and in percent. `lives`: first and last token of each sample that ended."""
    seen = done[case.warm :]
    step_s = (seen[-1].wall - seen[0].wall) / (len(seen) - 1)
    ages: dict[int, int] = {}
    began: dict[str, float] = {}  # group -> when it was first trained
    ends: dict[str, float] = {}  # group -> end of its last member
    samples = issued_late = born_late = masked = 0
    for record in records[case.warm :]:
        step, starts = record.done.step - 1, record.done.wall - case.train_s
        bound = int(record.knobs["max_weight_staleness"])
        for group in record.groups:
            for scored in group.samples:
                task, spans = scored.rollout.task, scored.rollout.response.spans
                began.setdefault(task.group_id, starts)
                samples += 1
                for span in spans:
                    ages[step - span.step] = ages.get(step - span.step, 0) + span.n
                    masked += span.n * (step - span.step > bound)
                issued_late += spans[0].step < task.step
                if (life := lives.get(task.sample_id)) is not None:
                    ends[task.group_id] = max(ends.get(task.group_id, 0.0), life[1])
                    born_late += sum(d.wall < life[0] for d in done) - spans[0].step > bound
    tokens = sum(ages.values())
    gone = {r: n - first.dropped.get(r, 0) for r, n in last.dropped.items() if n > first.dropped.get(r, 0)}
    whole = sum(gone.values()) + last.trained - first.trained
    mean_metric = lambda name: sum(d.metrics[name] for d in seen[1:]) / (len(seen) - 1)  # noqa: E731
    return {
        **{k: v for k, v in asdict(case).items() if k != "more"},
        **case.more,
        "rollout_s": round(case.rollout_s, 3),
        "train_s": round(case.train_s, 3),
        "step_s": round(step_s, 3),
        "median_step_s": round(median(b.wall - a.wall for a, b in itertools.pairwise(seen)), 3),
        "efficiency": round(max(case.rollout_s, case.train_s) / step_s, 3),
        "running": round((last.area - first.area) / (last.at - first.at), 1),
        "lost_percent": round(100 * sum(gone.values()) / whole, 2),
        "lost_by_reason_percent": {r: round(100 * n / whole, 2) for r, n in gone.items()},
        "masked_percent": round(100 * masked / tokens, 2),
        "mean_age": round(sum(a * n for a, n in ages.items()) / tokens, 2),
        "max_age": max(ages),
        "ages_percent": {str(a): round(100 * n / tokens, 2) for a, n in sorted(ages.items())},
        "split_percent": round(100 * sum(ends.get(g, 0.0) > at for g, at in began.items()) / len(began), 1),
        "samples": samples,
        "issued_newer_than_born": issued_late,
        "born_over_bound": born_late,
        "between_steps_ms": round(1e3 * (step_s - mean_metric("perf/wait_s") - case.train_s), 1),
        "cpu_ms_a_sample": {
            name: round(1e3 * (last.cpu[name] - at) / (samples * (len(seen) - 1) / len(seen)), 2) for name, at in first.cpu.items()
        },
        "load_average": round(os.getloadavg()[0], 1),
        "cores_busy": round(sum(last.cpu[n] - at for n, at in first.cpu.items()) / (last.wall - first.wall), 2),
    }


def simulated(case: Case, over_sampling: int, run: str = "bench") -> dict[str, float]:
    """What the simulation says of the same samples, or of those that a run of another name draws."""
    ids = (f"{run}/g{1 + i // case.group:07d}/{i % case.group}" for i in itertools.count())
    seconds = (seconds_of(case.lengths, case.median_s, seed) for seed in ids)
    draws = (Draw(round(tokens_of(s, case.median_s, case.tokens)) if case.proportional else case.tokens, s) for s in seconds)
    groups = (DrawnGroup(tuple(itertools.islice(draws, case.group))) for _ in itertools.count())
    knobs = SimulatedKnobs(
        max_weight_staleness=case.bound, staleness_policy=case.policy, rollout_batch_size=case.batch,
        n_samples_per_prompt=case.group, over_sampling_batch_size=over_sampling, slots=case.slots,
    )  # fmt: skip
    found = Simulation(knobs, SimulatedPace(train_s=case.train_s), groups, rng_for(0, "bench")).play(case.steps, case.warm)
    return {
        "efficiency": round(max(case.rollout_s, case.train_s) / found.step_s, 3),
        "masked_percent": round(100 * found.masked, 2),
        "mean_age": round(found.mean_age, 2),
        "max_age": found.max_age,
        "split_percent": round(100 * found.split, 1),
        "running": round(case.slots * (1 - found.idle), 1),
    }


# -- table -----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table, for people."""
    head = (
        "lengths", "load", "bound", "policy", "workers", "eff", "simulated", "lost %", "masked %", "simulated", "age", "max",
        "split %", "simulated", "running", "late", "cores",
    )  # fmt: skip
    print(" | ".join(head))
    for r in rows:
        model = r["simulated"]
        print(
            " | ".join(
                str(x)
                for x in (
                    r["lengths"], r["load"], r["bound"], r["policy"], r["workers"], r["efficiency"],
                    model["efficiency"], r["lost_percent"], r["masked_percent"], model["masked_percent"],
                    r["mean_age"], r["max_age"], r["split_percent"], model["split_percent"], r["running"],
                    f"{r['issued_newer_than_born']}/{r['born_over_bound']}", r["cores_busy"],
                )
            )
        )  # fmt: skip


def cases_of(args: argparse.Namespace) -> Iterator[Case]:
    more = {}
    for item in args.set:
        name, _, value = item.partition("=")
        try:
            more[name] = json.loads(value)
        except ValueError:
            more[name] = value
    for bound, workers, lengths, load in itertools.product(args.bound, args.workers, args.lengths, args.load):
        yield Case(
            lengths=lengths, load=load, bound=bound, policy=args.policy, over_sampling=args.over_sampling, workers=workers,
            slots=args.slots, median_s=args.median_s, tokens=args.tokens, proportional=args.proportional,
            chunk=args.chunk, warm=args.warm, steps=args.steps,
            more=more,
        )  # fmt: skip


def measure(case: Case, nice: int | None, keep: bool) -> dict[str, Any]:
    """The row of one case, in a folder of its own."""
    shared = Path("/dev/shm")
    folder = Path(mkdtemp(prefix="bench-schedule-", dir=shared if shared.is_dir() else None))
    try:
        return asyncio.run(watch(case, folder, nice))
    finally:
        if keep:
            print(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    if sys.argv[1:2] == ["--engines"]:
        serve(int(sys.argv[2]), json.loads(sys.argv[3]))
        return 0
    if sys.argv[1:2] == ["--trainer"]:
        train(sys.argv[3], float(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bound", type=int, nargs="+", default=[2])
    parser.add_argument("--policy", default="split")
    parser.add_argument("--over-sampling", type=int, help="groups; default: the settings'")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--load", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--slots", type=int, default=64, help="of all workers together")
    parser.add_argument("--median-s", type=float, default=0.5, help="of a sample's seconds")
    parser.add_argument("--tokens", type=int, default=128, help="of every sample, or of a mean one")
    parser.add_argument("--proportional", action="store_true", help="a sample's tokens follow its seconds")
    parser.add_argument("--chunk", type=int, default=0, help="tokens an event; 0: one event at the end")
    parser.add_argument("--warm", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting")
    parser.add_argument("--nice", type=int, help="priority of the run's processes, for a machine with other work; below 0: root")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--draws", type=int, default=0, help="no run: the simulation alone, for so many other draws of samples")
    parser.add_argument("--keep", action="store_true", help="leave each run's folder, and say where it is")
    parser.add_argument("--note", default="", help="goes into the file: what this build is")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.draws:
        for case in cases_of(args):
            admitted = case.over_sampling or (case.bound + 1) * case.batch
            found = [simulated(case, admitted, f"draw-{n}")["efficiency"] for n in range(args.draws)]
            spread = f"from {min(found)} to {max(found)}, deviation {pstdev(found):.3f}"
            print(f"{case.lengths}, {case.load}: efficiency {mean(found):.3f}, {spread}")
        return 0
    rows: list[dict[str, Any]] = []
    facts = {
        "date": date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": command(), "note": args.note,
    }  # fmt: skip
    with ProcessPoolExecutor(args.jobs) as pool:
        for case, row in [(case, pool.submit(measure, case, args.nice, args.keep)) for case in cases_of(args)]:
            if (error := row.exception()) is not None:
                print(f"{case} failed: {error!r}", flush=True)
                continue
            rows.append(row.result())
            show(rows[-1:])
            if args.out:
                args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    print()
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
