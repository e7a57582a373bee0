"""What --lend-trainer-gpus brings: the same run with and without, one GPU training, one generating, where generation is the bound.

    python -m scripts.bench gpu_lend --out DIR                          two GPUs, SGLang: DIR/lend.json, about 8 minutes
    python -m scripts.bench gpu_lend --out DIR --runs lent-offload      the trainer's memory leaves the GPU while it is lent
    python -m scripts.bench gpu_lend --out DIR --engine embedded --shape tiny --mean-tokens 50 --new-tokens 200 --slots 4 --batch 8
                                                                  the same on a CPU: a lent GPU is a core

Random weights of a real shape, stop tokens such that lengths are geometric, random rewards, everything else real. A run that is
in DIR/lend.json already is left out; --again measures it anew. Every figure is a mean over the steps after the first three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import traceback
from typing import Any

from scripts.bench import gpu_bench, gpu_e2e
from scripts.bench import gpu_parts as parts
from scripts.bench import gpu_tails_read as read

GROUP = 8
LENT = ["--lend-trainer-gpus"]
RUNS = {"apart": [], "lent": LENT, "lent-offload": [*LENT, "--offload-train"]}


def words_of(b: gpu_bench.Bench, name: str) -> list[str]:
    """Flags of one run."""
    a = b.args
    model = gpu_e2e.with_tokenizer(b.model())
    prompts = b.out / "prompts.jsonl"
    rows = [{"prompt": f"{i}+{i % 97}=", "label": str(i + i % 97)} for i in range(4096)]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--input-key", "prompt", "--label-key", "label"),
        *("--rm-type", "deterministic_random", "--num-rollout", str(a.steps + gpu_e2e.WARM), "--use-tis"),
        *("--rollout-batch-size", str(a.batch), "--n-samples-per-prompt", str(GROUP), "--max-weight-staleness", "2"),
        *("--rollout-max-response-len", str(a.new_tokens), "--sglang-server-concurrency", str(a.slots)),
        *("--rollout-stop-token-ids", *map(str, read.stop_ids(a.mean_tokens, a.new_tokens, b.vocab))),
        *("--no-save", "--console", "none", "--no-report", "--runs-dir", str(b.scratch / "runs"), "--name", name),
        *("--engine", a.engine, "--update-weight-transport", a.transport, "--lend-after-s", str(a.after_s), *RUNS[name]),
    ]
    if a.engine == "embedded":
        return [*words, "--num-generation-workers", "1"]
    words += ["--rollout-num-gpus", "1", "--rollout-gpu-ids", "1", "--model-dtype", "bfloat16", "--max-tokens-per-gpu", "32768"]
    for flag, value in b.engine_args().items():
        words += [f"--sglang-{flag}", str(value)]
    return words


def lending(b: gpu_bench.Bench, name: str) -> dict[str, Any]:
    """What a run's steps say of it."""
    rows = gpu_e2e.rows_of(b.out / f"{name}.metrics.jsonl")
    steps = [row["metrics"] for row in rows if row["kind"] == "step"][gpu_e2e.WARM :]
    made = sum(m.get("rollout/tokens", 0.0) for m in steps)
    waits = [m.get("perf/gpu_wait_s", 0.0) for m in steps]
    return {
        "lent_share_of_time": round(sum(m.get("perf/lent_s", 0.0) for m in steps) / sum(m["perf/step_s"] for m in steps), 4),
        "lent_share_of_tokens": round(sum(m.get("perf/lent_tokens", 0.0) for m in steps) / max(1.0, made), 4),
        "gpu_wait_s": {"mean": round(statistics.mean(waits), 4), "max": round(max(waits), 4)},
        "steps_that_lent": sum(m.get("perf/lent_s", 0.0) > 0 for m in steps),
        "load": round(os.getloadavg()[0], 2),
    }


async def measure(b: gpu_bench.Bench) -> int:
    """All runs that were asked for; saved after each."""
    found, failed = b.found("lend"), {}
    for name in b.args.runs:
        if name in found:
            continue
        try:
            async with asyncio.timeout(max(1.0, b.left_s)):
                found[name] = await gpu_e2e._run(b, await asyncio.to_thread(words_of, b, name), name, 0)
            found[name] |= lending(b, name) | {"steps_per_hour": round(3600 / found[name]["step_s"], 1)}
        except Exception as error:  # noqa: BLE001 - the other runs go on; the file says why this one is missing
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
        ratio = {
            name: round(found["apart"]["step_s"] / run["step_s"], 3)
            for name, run in found.items()
            if name != "apart" and "apart" in found
        }
        done = not failed and RUNS.keys() <= found.keys()
        b.save("lend", {"runs": found, "times_as_many_steps": ratio, "failed": failed}, done=done)
    b.save_logs()
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--models", default="/dev/shm/gpu-bench-models", help="folder for random weights (default %(default)s)")
    parser.add_argument("--shape", choices=sorted(parts.SHAPES), default="0.6b")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=["apart", "lent"])
    parser.add_argument("--steps", type=int, default=8, help="training steps that count")
    parser.add_argument("--batch", type=int, default=32, help=f"groups of {GROUP} samples a step")
    parser.add_argument("--slots", type=int, default=64, help="samples at once on one engine: what makes generation the bound")
    parser.add_argument("--mean-tokens", type=float, default=650.0)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--after-s", type=float, default=2.0, help="--lend-after-s")
    parser.add_argument("--transport", choices=("disk", "nccl", "ipc"), default="nccl", help="to the engine that is not lent")
    parser.add_argument("--server-args", default="{}", help="further SGLang flags as JSON, names without dashes in front")
    parser.add_argument("--budget-s", type=float, default=570.0)
    parser.add_argument("--again", action="store_true", help="measure what is there already")
    return asyncio.run(measure(gpu_bench.Bench(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
