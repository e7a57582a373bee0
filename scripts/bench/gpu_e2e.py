"""Whole runs of gpu_bench.py through `miles-async train`: random weights of a real shape, random rewards, real everything else.

    e2e         one GPU trains, one generates: asynchronous at max staleness 2 (two ways to pause), strictly on-policy, rollouts
                alone. Async efficiency is max(rollout alone, train alone) / step time. Training alone is what the trainer is busy
                with in the on-policy run, where nothing else works meanwhile
    colocate    both on one GPU, taking turns: at max staleness 2 and strictly on-policy
    exact       strictly on-policy with --true-on-policy-mode, on two GPUs: how far engine and trainer are apart at every step
    recipes     the files of configs/ with random weights of their shapes, short responses and few steps: that they run
    parallel    trainer sharded over two GPUs, engine over two: the same, taking turns (ipc), and where four are, two others (nccl)
    repeat      one GPU for both, strictly on-policy, twice: with --deterministic-mode, then without (what differs
                without it shows that the comparison sees it): steps whose samples, tokens, log-probs, loss, gradient norm and
                weights are the same to the last bit
    lost        kill -9 of an SGLang server in mid-run: of one of two engines (one GPU, updates from disk), of the only one (nccl).
                The trainer's idle time is what it waited for batches after the kill, beyond its usual wait

Step times are means over the steps after the first ones: generation starts ahead of the trainer, so a median flatters.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from scripts.bench import REPO
from scripts.bench import gpu_parts as parts

WARM = 3  # first steps, with compilation and an empty pipeline, are left out


async def e2e(b: Any) -> None:
    """Step times of the runs on two GPUs, one result."""
    apart = _apart(b)
    found = await _runs(
        b,
        "e2e",
        {
            "async-in-place": [*apart, "--pause-generation-mode", "in_place"],
            "rollout-alone": [*apart, "--debug-rollout-only"],
            "on-policy": [*apart, "--max-weight-staleness", "0"],
            "async": apart,
        },
    )
    if not {"rollout-alone", "on-policy"} <= found.keys():
        return
    alone = max(found["rollout-alone"]["step_s"], found["on-policy"]["train_s"])
    ways = {name: run["step_s"] for name, run in found.items() if name.startswith("async")}
    b.save(
        "e2e",
        {
            "runs": found,
            "async_efficiency": {name: round(alone / step_s, 4) for name, step_s in ways.items()},
            "on_policy_ratio": {name: round(found["on-policy"]["step_s"] / step_s, 4) for name, step_s in ways.items()},
        },
        done=len(ways) == 2,
    )


def _apart(b: Any, engines: int = 1, transport: str = "nccl") -> list[str]:
    """Engines on the GPU next to the trainer's."""
    flags = ["--update-weight-transport", transport]
    if b.args.engine == "sglang":
        return [*flags, "--rollout-num-gpus", str(engines), "--rollout-gpu-ids", *[str(b.args.gpu + 1)] * engines]
    return [*flags, "--num-generation-workers", str(engines)]


async def exact(b: Any) -> None:
    """Differences of log-probs in a whole run of the mode that promises none."""
    flags = [*_apart(b), "--max-weight-staleness", "0", "--true-on-policy-mode"]
    b.save("exact", {"runs": await _runs(b, "exact", {"true-on-policy": flags})}, done=True)


async def repeat(b: Any) -> None:
    """The same run twice; `first_difference` names the step and the parts of it."""
    flags = ["--max-weight-staleness", "0", "--debug-determinism", "--update-weight-transport", "disk"]
    if b.args.engine == "sglang":  # room for two trainers and two engines on one GPU
        flags += ["--rollout-gpu-ids", str(b.args.gpu), "--rollout-num-gpus", "1", "--sglang-mem-fraction-static", "0.9"]
        flags += ["--sglang-max-total-tokens", "80000", "--sglang-cuda-graph-max-bs", "256", "--max-tokens-per-gpu", "16384"]
    found = b.found("repeat")
    model, prompts = await _given(b)
    for way, more in {"deterministic": ["--deterministic-mode"], "plain": []}.items():
        if way in found or (b.args.e2e_runs and way not in b.args.e2e_runs):
            continue
        names = [f"{way}-{n}" for n in range(2)]
        words = [[*_words(b, model, prompts, name, []), *flags, *more] for name in names]
        took = time.monotonic()
        # One after the other: two servers that boot on one GPU at a time disturb each other's estimate of its memory.
        runs = [await _run(b, w, f"e2e-{name}", 0) for w, name in zip(words, names, strict=True)]
        files = [b.scratch / "runs" / f"e2e-{name}" / "determinism.jsonl" for name in names]
        one, two = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
        apart = [{"step": x["step"], "parts": [k for k in x if x[k] != y[k]]} for x, y in zip(one, two, strict=True) if x != y]
        found[way] = {
            "steps": len(one), "steps_equal": len(one) - len(apart), "first_difference": apart[0] if apart else None,
            "took_s": round(time.monotonic() - took, 1), "step_s": [run["step_s"] for run in runs], "lines": [one[-1], two[-1]],
        }  # fmt: skip
        b.save("repeat", {"runs": found}, done=len(found) == 2)
    b.save("repeat", {"runs": found}, done=len(found) == 2)


async def lost(b: Any) -> None:
    """What a killed server costs a whole run."""
    half = ["--sglang-mem-fraction-static", "0.9", "--sglang-max-total-tokens", "160000"]
    two = [*_apart(b, 2, "disk"), *(half if b.args.engine == "sglang" else [])]
    found = await _runs(b, "lost", {"the-only-one": _apart(b), "one-of-two": two}, kill_after=WARM + 2)
    b.save("lost", {"runs": found}, done=len(found) == 2)


async def parallel(b: Any) -> None:
    """Sharded trainer, tensor-parallel engine; every version compared with its files inside the engine."""
    import torch

    checked = ["--actor-num-gpus-per-node", "2", "--check-weight-update-equal"]
    if b.args.engine == "sglang":
        pair = [*checked, "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"]
    else:
        pair = [*checked, "--num-generation-workers", "1", "--offload-train-target", "disk"]
    ways = {"taking-turns": [*pair, "--colocate"]}
    if b.args.engine == "embedded" or torch.cuda.device_count() >= b.args.gpu + 4:
        ways["apart"] = [*pair, "--update-weight-transport", "nccl", "--pause-generation-mode", "in_place"]
    found = await _runs(b, "parallel", ways)
    b.save("parallel", {"runs": found}, done=len(found) == len(ways))


RECIPES = {"qwen2.5-0.5b-gsm8k": "qwen2.5-0.5b", "qwen3-0.6b-gsm8k": "0.6b", "qwen3-4b-gsm8k": "4b"}


async def recipes(b: Any) -> None:
    """Whether each recipe trains: its own flags, but for what random weights and a tokenizer of digits cannot give."""
    found, failed = b.found("recipes"), []
    for name, shape in RECIPES.items():
        if name in found or (b.args.e2e_runs and name not in b.args.e2e_runs):
            continue
        model = await asyncio.to_thread(lambda shape=shape: with_tokenizer(parts.make_model(b.models, shape, 0)))
        data = b.out / "recipe-prompts.jsonl"
        rows = [{"question": f"{i}+{i % 97}=", "answer": f"#### {i + i % 97}"} for i in range(256)]
        data.write_text("\n".join(map(json.dumps, rows)) + "\n")
        words = [
            *(str(REPO / "configs" / f"{name}.toml"), "--hf-checkpoint", str(model), "--prompt-data", str(data)),
            *("--eval-prompt-data", "test", str(data), "--eval-max-response-len", "256"),
            *("--no-apply-chat-template", "--rollout-max-response-len", "256", "--rm-type", "deterministic_random"),
            *("--num-rollout", str(b.args.train_steps)),
            *("--no-save", "--console", "none", "--no-report", "--runs-dir", str(b.scratch / "runs")),
        ]
        try:
            found[name] = await _run(b, words, name, 0)
        except RuntimeError as error:
            failed.append(str(error))
        b.save("recipes", {"runs": found}, done=False)
    if failed:
        raise RuntimeError("; ".join(failed))
    b.save("recipes", {"runs": found}, done=len(found) == len(RECIPES))


async def colocate(b: Any) -> None:
    """Step times of the runs on one GPU, and what a turn costs."""
    shared = ["--colocate", *([] if b.args.engine == "sglang" else ["--offload-train-target", "disk"])]
    found = await _runs(
        b,
        "colocate",
        {
            "shared": shared,
            "shared-on-policy": [*shared, "--max-weight-staleness", "0"],
            "shared-by-disk": [*shared, "--update-weight-transport", "disk"],
        },
    )
    b.save("colocate", {"runs": found}, done=len(found) == 3)


async def _runs(b: Any, step: str, runs: dict[str, list[str]], kill_after: int = 0) -> dict[str, Any]:
    """Run name -> figures, of all runs or those of --e2e-runs, with those of an earlier call; saved after each.

    `kill_after`: steps, 0 = never.
    """
    found = b.found(step)
    model, prompts = await _given(b)
    for name, flags in runs.items():
        if name not in found and (not b.args.e2e_runs or name in b.args.e2e_runs):
            found[name] = await _run(b, _words(b, model, prompts, name, flags), f"e2e-{name}", kill_after)
            b.save(step, {"runs": found}, done=False)
    return found


async def _given(b: Any) -> tuple[Path, Path]:
    """Model and prompts of the runs."""
    model = await asyncio.to_thread(with_tokenizer, b.model())
    prompts = b.out / "e2e-prompts.jsonl"
    rows = [{"prompt": f"{i}+{i % 97}=", "label": str(i + i % 97)} for i in range(4096)]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return model, prompts


def with_tokenizer(model: Path) -> Path:
    from miles_async.quickstart.arithmetic import ARITHMETIC
    from miles_async.quickstart.tokenizer import save_tokenizer

    save_tokenizer(model, ARITHMETIC)
    return model


def _words(b: Any, model: Path, prompts: Path, name: str, flags: list[str]) -> list[str]:
    """Flags of one run: 256 samples a step, random rewards."""
    a = b.args
    gpu = a.engine == "sglang"
    words = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--input-key", "prompt"),
        *("--label-key", "label", "--rm-type", "deterministic_random", "--num-rollout", str(a.train_steps)),
        *("--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--max-weight-staleness", "2"),
        *("--rollout-max-response-len", str(a.new_tokens)),
        *("--use-tis", "--no-save", "--console", "none", "--no-report", "--runs-dir", str(b.scratch / "runs")),
        *("--name", f"e2e-{name}", "--engine", a.engine, "--sglang-server-concurrency", str(a.concurrent)),
        *("--update-weight-buffer-size", str(a.bucket_mib << 20), *flags),
    ]
    if gpu:
        words += ["--model-dtype", "bfloat16", "--max-tokens-per-gpu", "32768"]
        for flag, value in b.engine_args().items():
            words += [f"--sglang-{flag}", str(value)]
    elif "--num-generation-workers" not in flags:
        words += ["--num-generation-workers", "1"]
    return words + a.train_flags.split()


async def _run(b: Any, words: list[str], name: str, kill_after: int) -> dict[str, Any]:
    """One run to its end; seconds a step, and what it says of staleness, pauses, drops and a kill. `name`: of the run."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
    log = b.out / f"{name}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "miles_async", "train", *words), stdout=file, stderr=file, env=env
        )
        metrics = b.scratch / "runs" / name / "metrics.jsonl"
        killing = asyncio.create_task(_kill(process.pid, metrics, kill_after))
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
            never = not killing.done()
            killing.cancel()
            if metrics.exists():
                shutil.copyfile(metrics, b.out / f"{name}.metrics.jsonl")
    if code == 0 and kill_after and never:
        raise RuntimeError(f"run {name} ended before it had made {kill_after} steps, and nothing was killed")
    rows = rows_of(metrics) if code == 0 else []
    done = [row for row in rows if row["kind"] == "step"]
    steps, walls = [row["metrics"] for row in done], [row["wall"] for row in done]
    if code != 0 or len(steps) <= WARM:
        raise RuntimeError(f"run {name} ended with {code} after {len(steps)} steps: {log.read_text()[-1500:]}")
    late = steps[WARM:]

    def mean(name: str) -> float:
        return round(statistics.mean(m.get(f"perf/{name}", 0.0) for m in late), 4)

    dropped = [row for row in rows if row["kind"] == "drop"]
    active = [row for row in rows if row["kind"] == "activated"]
    return {
        "steps": len(late),
        "step_s": round((walls[-1] - walls[WARM - 1]) / len(late), 4),
        "median_step_s": round(statistics.median(b - a for a, b in itertools.pairwise(walls[WARM - 1 :])), 4),
        **{name: mean(name) for name in ("train_s", "wait_s", "turn_s", "wake_s", "sleep_s", "tokens_per_s")},
        "staleness": statistics.mean(m.get("train/staleness", 0.0) for m in late),
        "logprob_difference": max(m.get("train/train_rollout_logprob_abs_diff", 0.0) for m in late),
        "drops": len(dropped),
        "pause_s": [round(row["pause_s"], 4) for row in active][1:],
        "tensors_compared": sorted({row["compared"] for row in active}),
        "transports": sorted({row["transport"] for row in active}),
        **(_after(killing.result(), rows) if kill_after else {}),
    }


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


async def _kill(run: int, metrics: Path, after: int) -> float:
    """Kill the oldest server of a run once it has made `after` steps; when that was."""
    import psutil

    while after == 0 or sum(row["kind"] == "step" for row in rows_of(metrics)) < after:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    servers = [
        child
        for child in psutil.Process(run).children(recursive=True)
        if {"sglang.launch_server", "actors.generation.engines.embedded"} & set(child.cmdline())
    ]
    min(servers, key=lambda child: child.create_time()).kill()
    return time.time()


def _after(killed: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What followed a kill, in seconds after it."""
    steps = [row for row in rows if row["kind"] == "step"]
    waits = [(row["wall"], row["metrics"].get("perf/wait_s", 0.0)) for row in steps]
    usual = statistics.median(wait for wall, wait in waits[WARM:] if wall < killed)
    faults = [row for row in rows if row["kind"] == "fault" and row["wall"] > killed - 1]
    lost = {row["actor"] for row in faults if row["event"] == "engine stalled"}
    back = [row["wall"] - killed for row in rows if row["kind"] == "activated" and row["actor"] in lost]
    return {
        "killed_after_steps": sum(wall < killed for wall, _ in waits),
        "steps_in_all": len(steps),
        "groups_trained": sum(len(row["groups"]) for row in steps),
        "groups_trained_once": len({group for row in steps for group in row["groups"]}),
        "serving_again_s": round(min(s for s in back if s > 0), 2) if any(s > 0 for s in back) else None,
        "trainer_idle_s": round(sum(max(0.0, wait - usual) for wall, wait in waits if wall > killed), 2),
        "faults": [f"{row['wall'] - killed:.2f} s {row['actor']}: {row['event']}: {row['text'][:120]}" for row in faults],
    }
