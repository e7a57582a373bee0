"""Whole runs of gpu_bench.py: one GPU trains, one generates. Random weights of a real shape, random rewards, real everything else.

Runs of the same settings at max staleness 2, through `miles-async train`: asynchronous; strictly on-policy (staleness 0);
rollouts alone (--debug-rollout-only); and the trainer alone, on the batches that the first run recorded. Async efficiency is
max(rollout alone, train alone) / step time, medians after the first steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import gpu_parts as parts

WARM = 3  # first steps, with compilation and an empty pipeline, are left out


async def e2e(b: Any) -> None:
    """Step times of the four runs, one result; a run that is there already is not made again."""
    model = await asyncio.to_thread(_with_tokenizer, b.model())
    prompts = b.out / "e2e-prompts.jsonl"
    rows = [{"prompt": f"{i}+{i % 97}=", "label": str(i + i % 97)} for i in range(4096)]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    record = str(b.scratch / "batches" / "{rollout_id}.msgpack")
    runs: dict[str, list[str]] = {
        "async": [],
        "on-policy": ["--max-weight-staleness", "0"],
        "rollout-alone": ["--debug-rollout-only"],
        # recording hashes all weights at every step, so it is a run of its own
        "recorded": ["--save-debug-rollout-data", record],
        "train-alone": ["--load-debug-rollout-data", record],
    }
    found: dict[str, Any] = {}
    for name in b.args.e2e_runs or runs:
        found[name] = await _run(b, model, prompts, name, runs[name])
        b.save("e2e", {"runs": found}, done=False)
    if b.args.e2e_runs:
        return
    step, alone = found["async"]["step_s"], [found[n]["step_s"] for n in ("rollout-alone", "train-alone")]
    b.save(
        "e2e",
        {
            "runs": found,
            "async_efficiency": round(max(alone) / step, 4),
            "on_policy_ratio": round(found["on-policy"]["step_s"] / step, 4),
        },
        done=True,
    )


def _with_tokenizer(model: Path) -> Path:
    sys.path.insert(0, str(parts.REPO))
    from miles_async.quickstart.tokenizer import save_tokenizer

    save_tokenizer(model)
    return model


async def _run(b: Any, model: Path, prompts: Path, name: str, flags: list[str]) -> dict[str, Any]:
    """One run to its end; median seconds a step, and what it says of staleness and drops."""
    a = b.args
    gpu = a.engine == "sglang"
    words = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--input-key", "prompt", "--label-key", "label"),
        *("--rm-type", "deterministic_random", "--num-rollout", str(a.train_steps), "--rollout-batch-size", "32"),
        *("--n-samples-per-prompt", "8", "--rollout-max-response-len", str(a.new_tokens), "--max-weight-staleness", "2"),
        *("--use-tis", "--no-save", "--console", "none", "--no-report", "--runs-dir", str(b.scratch / "runs")),
        *("--name", f"e2e-{name}", "--engine", a.engine, "--sglang-server-concurrency", str(a.concurrent)),
        *("--update-weight-transport", "nccl", "--update-weight-buffer-size", str(a.bucket_mib << 20), *flags),
    ]
    if gpu:
        words += ["--model-dtype", "bfloat16", "--max-tokens-per-gpu", "32768", "--rollout-num-gpus", "1"]
        words += ["--rollout-gpu-ids", str(a.gpu + 1)]
        for flag, value in b.engine_args().items():
            words += [f"--sglang-{flag}", str(value)]
    else:
        words += ["--num-generation-workers", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(parts.REPO), os.environ.get("PYTHONPATH", "")])}
    log = b.out / f"e2e-{name}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "miles_async", "train", *words), stdout=file, stderr=file, env=env
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    lines = (b.scratch / "runs" / f"e2e-{name}" / "metrics.jsonl").read_text().splitlines() if code == 0 else []
    rows = [json.loads(line) for line in lines]
    done = [row for row in rows if row["kind"] == "step"]
    steps, walls = [row["metrics"] for row in done], [row["wall"] for row in done]
    if code != 0 or len(steps) <= WARM:
        raise RuntimeError(f"run {name} ended with {code} after {len(steps)} steps: {log.read_text()[-1500:]}")
    late = steps[WARM:]
    return {
        "step_s": statistics.median(end - start for start, end in zip(walls[WARM - 1 :], walls[WARM:], strict=False)),
        "train_s": statistics.median(m["perf/train_s"] for m in late),
        "wait_s": statistics.median(m["perf/wait_s"] for m in late),
        "tokens_per_s": statistics.median(m["perf/tokens_per_s"] for m in late),
        "staleness": statistics.mean(m.get("train/staleness", 0.0) for m in late),
        "drops": sum(row["kind"] == "drop" for row in rows),
    }
