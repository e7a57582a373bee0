"""Studies on the quickstart task: one learning curve per run, runs side by side on cores of their own.

    python -m scripts.bench study staleness  --out docs/measurements/staleness.json --picture docs/staleness.png
    python -m scripts.bench study estimators --out docs/measurements/estimators.json --picture docs/estimators.png

Every run is `miles-async train configs/quickstart.toml` with the flags that the result file lists, pinned to two cores. What
is reported comes from the run's own metrics.jsonl. Exit status 1 when a run failed; the others are reported all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from scripts.bench import REPO, command

LIMIT_S = 900.0
CORRECTIONS = {
    "none": ("--no-use-tis", "--no-correction"),
    "tis": ("--use-tis",),
    "decoupled + mis": ("--no-use-tis", "--use-decoupled-loss", "--use-mis", "--use-rs"),
}
ESTIMATORS: dict[str, tuple[str, ...]] = {
    "grpo": ("--advantage-estimator", "grpo"),
    "gspo": ("--advantage-estimator", "gspo"),
    "reinforce++": ("--advantage-estimator", "reinforce_plus_plus"),
    "ppo": ("--advantage-estimator", "ppo", "--critic-lr", "1e-3"),
    "cispo": ("--advantage-estimator", "cispo"),
    "opd": ("--advantage-estimator", "on_policy_distillation"),
}


@dataclass(frozen=True)
class Job:
    """One run: its label, seed and flags beside the configuration file."""

    label: str
    seed: int
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return re.sub("[^a-z0-9]+", "-", f"{self.label}-s{self.seed}")


def staleness_jobs(seeds: list[int], config: list[str]) -> list[Job]:
    """Bounds 0, 2, 4, 8, each with every correction, each with every seed."""
    return [
        Job(f"{bound}, {label}", seed, (*config, "--max-weight-staleness", str(bound), *flags))
        for seed in seeds
        for bound in (0, 2, 4, 8)
        for label, flags in CORRECTIONS.items()
    ]


def estimator_jobs(seeds: list[int], config: list[str], teacher: str) -> list[Job]:
    """One family each; distillation needs the directory of a teacher."""
    extra = {"opd": ("--opd-teacher-load", teacher)}
    return [Job(label, seed, (*config, *flags, *extra.get(label, ()))) for seed in seeds for label, flags in ESTIMATORS.items()]


async def run_all(jobs: list[Job], at_once: int, runs: Path) -> list[dict[str, Any]]:
    """Each run on two cores of its own, `at_once` of them at a time; models are made once per seed, by the first."""
    cores = sorted(os.sched_getaffinity(0))
    free: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
    for slot in range(at_once):
        free.put_nowait(tuple(cores[(2 * slot + i) % len(cores)] for i in range(2)))
    first = {job.seed: asyncio.Event() for job in jobs}
    makers: set[int] = set()

    async def one(job: Job) -> dict[str, Any]:
        maker = job.seed not in makers
        makers.add(job.seed)
        if not maker:
            await first[job.seed].wait()
        pair = await free.get()
        try:
            return await run_one(job, pair, runs)
        finally:
            free.put_nowait(pair)
            first[job.seed].set()

    return list(await asyncio.gather(*(one(job) for job in jobs)))


async def run_one(job: Job, cores: tuple[int, ...], runs: Path) -> dict[str, Any]:
    """Waits for the run, at most LIMIT_S."""
    argv = [
        *("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "miles_async", "train"),
        *("configs/quickstart.toml", "--runs-dir", str(runs), "--name", job.name, "--console", "plain"),
        *("--seed", str(job.seed), "--rollout-seed", str(job.seed), *job.flags),
    ]
    log = runs / f"{job.name}.log"
    began = time.monotonic()
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*argv, cwd=REPO, stdout=out, stderr=out)
        try:
            code: int | None = await asyncio.wait_for(process.wait(), LIMIT_S)
        except TimeoutError:
            process.terminate()
            code = await process.wait()
    row = {"label": job.label, "seed": job.seed, "flags": list(job.flags), "exit": code}
    row |= {"wall_s": round(time.monotonic() - began, 1), **measures(runs / job.name / "metrics.jsonl")}
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] if code else []
    print(f"{job.name}: exit {code}, {row['wall_s']:.0f} s, final {row.get('final')} {' '.join(tail)}", flush=True)
    return row


def measures(file: Path) -> dict[str, Any]:
    """Held-out accuracy by step, and means over the steps of what tells how stale the data was."""
    curve: dict[int, float] = {}
    steps: list[dict[str, float]] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        said = json.loads(line)
        if said["kind"] == "eval":
            curve[int(said["step"])] = float(said["metrics"][f"eval/{said['name']}"])
        elif said["kind"] == "step":
            steps.append(said["metrics"])
    if not curve or not steps:
        return {}

    def mean(name: str) -> float:
        return sum(m.get(name, 0.0) for m in steps) / len(steps)

    last = sorted(curve)
    return {
        "curve": {str(step): curve[step] for step in last},
        "start": curve[last[0]],
        "final": curve[last[-1]],
        "best": max(curve.values()),
        "staleness": mean("train/staleness"),
        "staleness_max": max(m.get("train/staleness_max", 0.0) for m in steps),
        "kl": mean("train/train_rollout_kl"),
        "steps": len(steps),
    }


def draw(rows: list[dict[str, Any]], file: Path, columns: int) -> None:
    """Curves of all labels, mean over seeds; one panel per group of `columns` labels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(r["label"] for r in rows if r.get("curve")))
    panels = [labels[i : i + columns] for i in range(0, len(labels), columns)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels) + 1, 3.6), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for label in panel:
            curves = [r["curve"] for r in rows if r["label"] == label and r.get("curve")]
            steps = sorted({int(s) for c in curves for s in c})
            means = [100 * sum(c[str(s)] for c in curves if str(s) in c) / sum(str(s) in c for c in curves) for s in steps]
            axis.plot(steps, means, marker="o", markersize=3, label=label)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("held-out accuracy, %")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line per label: final accuracy of each seed, realised staleness."""
    lines = ["| run | start | final, each seed | mean staleness (largest) | wall |", "|---|---|---|---|---|"]
    for label in dict.fromkeys(r["label"] for r in rows):
        of = [r for r in rows if r["label"] == label and r.get("curve")]
        if not of:
            lines.append(f"| {label} | failed | | | |")
            continue
        finals = ", ".join(f"{100 * r['final']:.1f} %" for r in of)
        starts = ", ".join(f"{100 * r['start']:.1f} %" for r in of)
        stale = sum(r["staleness"] for r in of) / len(of)
        wall = sum(r["wall_s"] for r in of) / len(of)
        most = max(r["staleness_max"] for r in of)
        lines.append(f"| {label} | {starts} | {finals} | {stale:.2f} ({most:.0f}) | {wall:.0f} s |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=["staleness", "estimators"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--at-once", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="runs side by side")
    parser.add_argument("--runs-dir", type=Path, default=REPO / "runs" / "study")
    parser.add_argument(
        "--teacher", type=Path, help="estimators: the distillation's teacher, a model directory or a run's checkpoints"
    )
    parser.add_argument("--flags", default="", help="flags of every run, in one word")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.study == "estimators" and (args.teacher is None or not args.teacher.is_dir()):
        parser.error(
            f"--teacher {args.teacher or '(unset)'} is no directory. Give --teacher runs/quickstart/checkpoints, which "
            "scripts/quickstart.sh makes, or a model directory"
        )
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    common = args.flags.split()
    if args.study == "staleness":
        jobs = staleness_jobs(args.seeds, common)
    else:
        jobs = estimator_jobs(args.seeds, common, str(args.teacher.resolve()))
    began = time.monotonic()
    rows = asyncio.run(run_all(jobs, args.at_once, args.runs_dir.resolve()))
    import torch

    result = {
        "command": command(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cores": len(os.sched_getaffinity(0)),
        "at_once": args.at_once,
        "wall_s": round(time.monotonic() - began),
        "runs": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.picture and any(row.get("curve") for row in rows):
        draw(rows, args.picture, 3 if args.study == "staleness" else len(ESTIMATORS))
    print(table(rows))
    return int(any(r["exit"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
