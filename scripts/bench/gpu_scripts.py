"""Launch scripts of Miles on GPUs, taken as they are: only paths and lengths are changed (weights are random).

    python -m scripts.bench gpu_scripts --out DIR [--scripts qwen3-0.6b-fsdp,qwen3-4b] [--steps 3] [--budget-s 500]

For each: a model of the script's shape, a chat tokenizer, prompts as chat messages, the torch_dist directory that the script
refers to (by `miles-async convert`), the script as run.sh; then `miles-async train --from-miles run.sh`. Rewards are drawn, since a
random model solves nothing. Writes the figures as JSON into DIR, and each run's log, metrics and script. qwen3-0.6b-fsdp wants one
GPU, qwen3-4b two and 256 GiB of host memory; on one GPU its optimizer and trainer stay there (see ON_ONE). Give each a call of its
own, since SGLang compiles for some minutes at the first start on a machine. `--rehearse`: a tiny model on the embedded engine and
a CPU, without the flags that say what the model is and where it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.bench import REPO
from scripts.bench import gpu_parts as parts
from scripts.bench.chat_tokenizer import make_chat
from scripts.bench.gpu_e2e import rows_of
from scripts.bench.launch_scripts import MODEL_4B, SCRIPTS

SHAPE = {"qwen3-0.6b-fsdp": "0.6b", "qwen3-4b": "4b"}
LEFT_OUT = ("--use-wandb --wandb-project p --wandb-group g --wandb-key KEY", "--model-name qwen3-4B", "--use-miles-dashboard")
"""What asks for a service or package that a machine without network lacks, and what Miles' Python recipe reads itself."""
ON_ONE = """--actor-num-gpus-per-node 1 --tensor-model-parallel-size 1 --rollout-num-gpus-per-engine 1 --no-optimizer-cpu-offload
--no-overlap-cpu-optimizer-d2h-h2d --no-offload-train --sglang-mem-fraction-static 0.35 --no-save-optim"""
"""What qwen3-4b needs on one GPU: the host of such a machine (128 GiB) has no room for the optimizer, the trainer's memory in the
engines' turn and a checkpoint's copy, which an H200 has beside smaller engines."""
ON_GPUS = ("--sglang-mem-fraction-static", "--sglang-cuda-graph-bs", "--sglang-attention-backend", "--sglang-chunked-prefill-size",
           "--sglang-decode-log-interval", "--rollout-num-gpus-per-engine", "--colocate", "--actor-num-gpus-per-node",
           "--attn-implementation", "--train-env-vars", "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d",
           "--use-precision-aware-optimizer", "--tensor-model-parallel-size", "--sequence-parallel",
           "--attention-backend")  # fmt: skip


def words_of(name: str, home: Path, *, rehearse: bool) -> list[str]:
    """The script's flags with our paths."""
    text = " ".join(SCRIPTS[name].split())
    for part in (*LEFT_OUT, *([" ".join(MODEL_4B.split())] if rehearse else [])):
        text = text.replace(part, "")
    paths = {"MODEL": "${MODELS}/model", "MODEL_torch_dist": "${MODELS}/torch_dist", "MODEL_miles": "${MODELS}/saved",
             "DATA": "${MODELS}/prompts.jsonl", "DETAILS": "${MODELS}/details",
             '{"PYTORCH_ALLOC_CONF":"x:1"}': '{"PYTORCH_CUDA_ALLOC_CONF":"expandable_segments:True"}'}  # fmt: skip
    words = [paths.get(word, word) for word in text.split()]
    return ["--hf-checkpoint", paths["MODEL"], *(_without(words, ON_GPUS) if rehearse else words)]


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word in flags
        if not skipping:
            kept.append(word)
    return kept


def write_script(file: Path, words: list[str], home: Path) -> None:
    """run.sh, with the flags in one array."""
    lines = [f"MODELS={home}", "ARGS=("]
    for word in words:
        if word.startswith("--"):
            lines.append(f"   {word}")
        else:
            lines[-1] += f" '{word}'" if word.startswith("{") else f" {word}"
    lines += [")", 'ray job submit --address="http://127.0.0.1:8265" -- python3 train.py "${ARGS[@]}"', ""]
    file.write_text("\n".join(lines))


def prepare(name: str, home: Path, *, rehearse: bool) -> Path:
    """Model, tokenizer, prompts, torch_dist and run.sh in `home`; the script."""
    home.mkdir(parents=True, exist_ok=True)
    made = parts.make_model(home, "tiny" if rehearse else SHAPE[name], 0)
    make_chat(made)
    if not (home / "model").exists():
        (home / "model").symlink_to(made.name)
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} + {i % 97}?"}], "label": str(i + i % 97)} for i in range(256)]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = words_of(name, home, rehearse=rehearse)
    if "${MODELS}/torch_dist" in words and not (home / "torch_dist").exists():
        command = [sys.executable, "-m", "miles_async", "convert", "hf-to-megatron", str(home / "model"), str(home / "torch_dist")]
        subprocess.run(command, check=True, env=environment(), cwd=home)
    script = home / "run.sh"
    write_script(script, words, home)
    return script


def environment() -> dict[str, str]:
    found = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(REPO), found))), "HF_HUB_OFFLINE": "1"}


def run(name: str, args: argparse.Namespace, deadline_s: float) -> dict[str, Any]:
    """One script to its last step; its figures."""
    import torch

    home = args.models / name
    began = time.monotonic()
    script = prepare(name, home, rehearse=args.rehearse)
    shutil.copyfile(script, args.out / f"{name}.sh")
    prepared_s = time.monotonic() - began
    words = ["--num-rollout", str(args.steps), "--rollout-max-response-len", "64" if args.rehearse else "1024",
             "--eval-max-response-len", "64" if args.rehearse else "256", "--n-samples-per-eval-prompt", "1",
             "--rm-type", "deterministic_random", "--name", name, "--runs-dir", str(home / "runs"),
             "--console", "plain", "--no-report"]  # fmt: skip
    one = not args.rehearse and name == "qwen3-4b" and torch.cuda.device_count() == 1
    flags = f"{ON_ONE if one else ''} {args.flags}".split()
    words += ["--engine", "embedded"] if args.rehearse else flags
    log, metrics = args.out / f"{name}.log", home / "runs" / name / "metrics.jsonl"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "miles_async", "train", "--from-miles", str(script), *words]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment(), cwd=home)
        try:
            code: int | str = process.wait(max(1.0, deadline_s - prepared_s))
        except subprocess.TimeoutExpired:
            end(process)
            code = "out of time"
    if metrics.exists():
        shutil.copyfile(metrics, args.out / f"{name}.metrics.jsonl")
    done = [row for row in rows_of(metrics) if row["kind"] == "step"]
    names = ("perf/step_s", "perf/train_s", "train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff")
    steps = [{key: row["metrics"].get(key) for key in names} for row in done]
    shutil.rmtree(home / "saved", ignore_errors=True)
    return {"flags": " ".join(flags), "exit": code, "prepared_s": round(prepared_s, 1), "s": round(time.monotonic() - began, 1),
            "steps": steps, "said": log.read_text(errors="replace")[-600:] if code else ""}  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask twice: the first lets engines, ranks and what is being saved end, the second waits for no step and no checkpoint."""
    for patience_s in (120, 60):
        process.terminate()
        try:
            process.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/miles-scripts"))
    parser.add_argument("--scripts", default=",".join(SHAPE))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=500)
    parser.add_argument("--flags", default="", help="of train, in one word: what is to differ from the script")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end, found = time.monotonic() + args.budget_s, {}
    for name in args.scripts.split(","):
        found[name] = run(name, args, end - time.monotonic())
        (args.out / f"scripts-{args.scripts}.json").write_text(json.dumps(found, indent=1))
        print(name, json.dumps(found[name]), flush=True)
    return int(any(one["exit"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
