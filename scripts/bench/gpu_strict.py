"""The strictly on-policy step of `gpu_bench.py e2e`, this code against an earlier one, in turns on one machine.

    python -m scripts.bench gpu_strict --before REVISION|DIR --out DIR [--rounds 2] [--bar 0.75] [flags of gpu_bench.py]

Each round runs both codes, the order turned round by round; each run is `gpu_bench.py e2e --e2e-runs on-policy` of its own code,
with the same flags. OUT/strict.json holds both step times, their ratio and each round's; the exit status is 1 above the bar. What
OUT holds already is left out, so it may be cut off and called again. --before: a commit of this repository, or, without git, a
folder that holds the earlier code (`git archive REVISION | tar -x -C DIR`), with scripts/bench. Two GPUs;
`--engine embedded --shape tiny` rehearses it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.bench import REPO

CODES = ("before", "after")
LEAST_S = 90.0  # a run is not begun with less left


def checkout(before: str, out: Path) -> Path:
    """The folder of the earlier code."""
    if (Path(before) / "scripts" / "bench" / "gpu_bench.py").is_file():
        return Path(before).resolve()
    target = out / "code-before"
    if not (target / "scripts" / "bench" / "gpu_bench.py").is_file():
        target.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(["git", "-C", str(REPO), "archive", before], check=True, capture_output=True, timeout=60)
        subprocess.run(["tar", "-x", "-C", str(target)], input=packed.stdout, check=True, timeout=60)
    return target.resolve()


def step_of(folder: Path) -> dict[str, Any] | None:
    """What a finished run found; None without one."""
    try:
        found = json.loads((folder / "e2e.json").read_text())["runs"]["on-policy"]
        return {name: found[name] for name in ("step_s", "median_step_s", "train_s", "wait_s", "steps", "logprob_difference")}
    except (OSError, ValueError, KeyError):
        return None


def run(code: Path, folder: Path, flags: list[str], left_s: float) -> None:
    """One run of one code. Its own package comes first, whatever is installed."""
    words = [sys.executable, "-m", "scripts.bench.gpu_bench", "e2e", "--e2e-runs", "on-policy", "--out", str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "bench.log").open("ab") as log:
        subprocess.run([*words, "--budget-s", str(round(left_s)), *flags], cwd=code, env=env, stdout=log, stderr=log,
                       timeout=left_s + 30, check=False)  # fmt: skip


def summary(out: Path, rounds: int, bar: float) -> dict[str, Any]:
    """Both codes' steps and their ratio, of the rounds that are whole."""
    found = [{code: step_of(out / f"{code}-{n}") for code in CODES} for n in range(rounds)]
    whole = [one for one in found if all(one.values())]
    said: dict[str, Any] = {"bar": bar, "rounds": found, "complete": len(whole) == rounds}
    if whole:
        means = {code: statistics.mean(one[code]["step_s"] for one in whole) for code in CODES}  # type: ignore[index]
        ratios = [round(one["after"]["step_s"] / one["before"]["step_s"], 4) for one in whole]  # type: ignore[index]
        said |= {"step_s": means, "ratio": round(means["after"] / means["before"], 4), "ratio_of_each_round": ratios}
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bar", type=float, default=0.75)
    parser.add_argument("--budget-s", type=float, default=560.0)
    args, flags = parser.parse_known_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget_s
    codes = {"before": checkout(args.before, out), "after": REPO}
    for n in range(args.rounds):
        for code in CODES if n % 2 == 0 else CODES[::-1]:
            folder, left = out / f"{code}-{n}", end - time.monotonic()
            if step_of(folder) is not None:
                continue
            if left < LEAST_S:
                print(f"{code}, round {n}: not begun, {left:.0f} s are left; run the same command again", flush=True)
                continue
            run(codes[code], folder, flags, left)
            print(f"{code}, round {n}: {json.dumps(step_of(folder) or 'failed, see ' + str(folder))}", flush=True)
            said = summary(out, args.rounds, args.bar) | {"before": args.before, "flags": flags}
            (out / "strict.json").write_text(json.dumps(said, indent=1))
    said = summary(out, args.rounds, args.bar) | {"before": args.before, "flags": flags}
    (out / "strict.json").write_text(json.dumps(said, indent=1))
    print(json.dumps({name: said.get(name) for name in ("complete", "step_s", "ratio", "ratio_of_each_round")}), flush=True)
    return int(not said["complete"] or said["ratio"] > args.bar)


if __name__ == "__main__":
    sys.exit(main())
