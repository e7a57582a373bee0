"""How long a trace takes with many samples on record: the look-up by itself, and the whole command with its start.

    .venv/bin/python scripts/bench_trace.py --samples 100000

The record is written here as a recorder writes it: one line for each sample, step and dropped group, 128 samples a step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


from actors.recorder.file import FILE as METRICS  # noqa: E402
from actors.recorder.trained import append_trained  # noqa: E402
from miles_async.console.trace import trace_file  # noqa: E402
from miles_async.settings.runs import write_run_file  # noqa: E402

GROUP, BATCH = 8, 128


def write_record(run_dir: Path, n_samples: int) -> None:
    """A run of n_samples trained samples, as many dropped ones, and a checkpoint every 20 steps."""
    lines: list[dict[str, Any]] = []
    for step in range(1, n_samples // BATCH + 1):
        first = (step - 1) * 2 * BATCH // GROUP
        groups = [f"g{first + n:07d}" for n in range(BATCH // GROUP)]
        head = {"wall": float(step), "step": step}
        metrics = {f"train/metric_{n}": n / 7 for n in range(110)}
        told = {"version": step + 1, "knob_epoch": 0, "groups": groups, "dropped": [], "metrics": metrics}
        lines.append({"kind": "step", "entry": f"policy@{step}-0", **head, **told})
        for n in range(BATCH // GROUP):
            name = f"g{first + BATCH // GROUP + n:07d}"
            drop = {
                "group": name,
                "prompt": "p1",
                "reason": "zero_std_1",
                "samples": GROUP,
                "tokens": 99,
                "reward": 1.0,
            }
            lines.append({"kind": "drop", "wall": float(step), "entry": f"verdicts@{step}-{n}", **drop})
        if step % 20 == 0:
            lines.append({"kind": "checkpoint", "entry": f"policy@{step}-1", **head, "path": "x", "save_s": 1.0})
        marks = [["issued", "", 0, 1.5], ["begun", "generation-0", 0, 2.5], ["ended", "generation-0", 90, 3.5]]
        life = {"marks": marks, "spans": [[step, step - 1, 90]], "finish": "stop", "generate_s": 1.0, "reward": 1.0}
        life |= {"scorer": "math", "score_s": 0.1, "judged": 4.5, "trained": 90, "share": 0.0078}
        at = {"kind": "trained", "wall": float(step), "entry": f"trained@{step}-0", "step": step}
        append_trained(run_dir, [{**at, "sample": f"{g}/{i}", **life} for g in groups for i in range(GROUP)])
    (run_dir / METRICS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def timed(body: Callable[[], Any], times: int) -> float:
    """Median milliseconds."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        body()
        spent.append(1000 * (time.perf_counter() - began))
    return statistics.median(spent)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ma-trace-") as home:
        run_dir = Path(home) / "many"
        run_dir.mkdir()
        write_run_file(run_dir, run="many", bus_url=f"unix://{home}/gone.sock")
        write_record(run_dir, args.samples)
        sample = f"g{args.samples // BATCH // 2 * 2 * BATCH // GROUP:07d}/3"
        found = trace_file(run_dir, sample)
        assert {"issued", "batch", "checkpoint"} <= {moment.what for moment in found.moments}, found
        words = [sys.executable, "-m", "miles_async", "trace", sample, "--runs-dir", home, "--run", "many"]
        size = sum(file.stat().st_size for file in run_dir.iterdir()) / 1e6
        look_up = timed(lambda: trace_file(run_dir, sample), 15)
        command = timed(lambda: subprocess.run(words, check=True, capture_output=True, cwd=REPO), 7)
        start = timed(lambda: subprocess.run([*words[:3], "--version"], check=True, capture_output=True, cwd=REPO), 7)
    print(
        f"{args.samples} samples, {size:.0f} MB: look-up {look_up:.0f} ms, command {command:.0f} ms (start alone {start:.0f} ms)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
