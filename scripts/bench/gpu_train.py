"""Tokens/s and MFU of the torch backend's train_step on one GPU, before and after, and how far its log-probs are from float32.

    python -m scripts.bench gpu_train --out DIR [--before DIR] [--budget-s 290] [--only NAME ...]
    python -m scripts.bench gpu_train --out DIR --shape tiny --device cpu        a rehearsal

Each case is a process of its own; DIR/train.json is written after each, with the error of one that failed. `--before`: a tree of an
earlier commit that has this script (`git archive COMMIT | tar -x -C DIR`): the cases named before* run its own.

FLOPs of a step over T tokens, N parameters (a tied embedding once), samples of L_i tokens, H heads of size D, l layers:
    6 N T + 6 l H D sum(L_i^2)            (causal attention: half of 12 l H D L^2)
With LoRA frozen parameters count 4 T (forward, and backward to activations).
`mfu` divides by 989 TFLOP/s (dense bf16 of an H100 or H200). `mfu_exact` counts the vocabulary matrix for response tokens only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from scripts.bench import REPO, gpu_numbers
from scripts.bench.gpu_train_parts import EQUAL, TOKENS, VARIED, backend_for, batch_of, clocked, planned

PEAK = 989e12


def cases(a: argparse.Namespace) -> list[dict[str, Any]]:
    """In the order of what matters most."""
    first, large = ("tiny", "") if a.shape == "tiny" else ("0.6b", "4b")
    found: list[dict[str, Any]] = [{"name": f"after-{first}", "shape": first, "lengths": [EQUAL, VARIED], "profile": True}]
    if large:
        few = {"gradient_checkpointing": True, "gradient_checkpointing_layers": 6}  # 140 GiB ask for as many, or more
        found.append({"name": f"after-{large}", "shape": large, "lengths": [EQUAL, VARIED], "profile": True, "settings": few,
                      "parts": 2, "steps": 3})  # fmt: skip
    found += [
        {"name": "logprobs", "kind": "logprobs", "shape": first},
        {"name": "attention", "kind": "attention", "shape": first},
        {"name": "head", "kind": "head", "shape": first},
    ]
    if a.before:
        found.append({"name": f"before-{first}", "shape": first, "lengths": [EQUAL, VARIED], "code": a.before, "profile": True})
    found += [
        {"name": "fa2", "shape": first, "lengths": [VARIED], "settings": {"attn_implementation": "flash_attention_2"}},
        {"name": "eager", "shape": first, "lengths": [EQUAL], "settings": {"compile": "off"}},
        {"name": "recomputed", "shape": first, "lengths": [VARIED], "settings": {"gradient_checkpointing": True}},
    ]
    lora = {"lora_rank": 32, "lora_alpha": 64, "target_modules": "all-linear"}
    for shape in filter(None, (first, large)):
        again = {"gradient_checkpointing": shape == "4b"}  # 80 GiB hold the 4b shape so alone, whoever computes it
        found += [
            {"name": f"lora-{shape}", "shape": shape, "lengths": [EQUAL], "settings": lora},
            {"name": f"class-{shape}", "shape": shape, "lengths": [EQUAL, VARIED], "parts": 2, "steps": 3,
             "settings": {"model_implementation": "transformers"} | again},
            {"name": f"own-{shape}", "shape": shape, "lengths": [EQUAL, VARIED], "parts": 2, "steps": 3,
             "settings": again},
        ]  # fmt: skip
    if large:
        found.append(
            {"name": "lora-8b", "shape": "8b", "lengths": [EQUAL], "tokens": 8192, "settings": lora, "parts": 2, "steps": 3}
        )
    if large and a.before:
        again = {"gradient_checkpointing": True}
        found.append({"name": f"before-{large}", "shape": large, "lengths": [EQUAL], "code": a.before, "settings": again})
    if a.device == "cuda" and a.ranks > 1:
        found.insert(2, {"name": "two-ranks", "shape": first, "lengths": [EQUAL, VARIED], "ranks": 2})
        for shared in ("all", "optimizer"):  # as launch scripts have it: many micro-batches, layers computed again
            settings = {"gradient_checkpointing": True, "fsdp_shard": shared}
            found.append({"name": f"two-ranks-{shared}", "shape": first, "lengths": [EQUAL], "ranks": 2, "parts": 16,
                          "settings": settings})  # fmt: skip
    found = [{"device": a.device, "tokens": a.tokens} | case for case in found]
    return [case for case in found if not a.only or case["name"] in a.only]


def main() -> None:
    """Run the cases, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", default="")
    parser.add_argument("--shape", default="0.6b", choices=("tiny", "0.6b"), help="0.6b: and 4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--ranks", type=int, default=1, help="2: FSDP2 over two GPUs too")
    parser.add_argument("--budget-s", type=float, default=290.0)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/gpu_train"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--case", help="one case, as JSON: what the script starts itself with")
    a = parser.parse_args()
    if a.case:
        print("RESULT " + json.dumps(run(json.loads(a.case))), flush=True)
        return
    began, results = time.monotonic(), {}
    a.out.mkdir(parents=True, exist_ok=True)
    a.models.mkdir(parents=True, exist_ok=True)
    wanted = cases(a)
    for case in wanted:
        left = a.budget_s - (time.monotonic() - began)
        results[case["name"]] = told(case, a, left) if left > 20 else {"error": "no time left"}
        results[case["name"]]["ended_at_s"] = round(time.monotonic() - began, 1)
        (a.out / "train.json").write_text(json.dumps(results, indent=1))
        brief = {n: results[case["name"]].get(n) for n in (EQUAL, VARIED, "error") if results[case["name"]].get(n)}
        print(case["name"], json.dumps(brief)[:900], flush=True)


def told(case: dict[str, Any], a: argparse.Namespace, left: float) -> dict[str, Any]:
    """What a case's process found, or its error."""
    code = Path(case.get("code") or REPO).resolve()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")])}
    case["model"] = str(a.models / case["shape"])
    if not (a.models / case["shape"] / "made").exists():
        shape, models = case["shape"], str(a.models)
        make = (
            "from pathlib import Path; from scripts.bench.gpu_parts import make_model; "
            f"print(make_model(Path({models!r}), {shape!r}, 0))"
        )
        words, limit_s = [sys.executable, "-c", make], max(20, left)
        done = subprocess.run(words, env=env, cwd=code, capture_output=True, text=True, timeout=limit_s)
        if done.returncode:
            return {"error": done.stderr[-1500:]}
        (a.models / case["shape"]).mkdir(exist_ok=True)
        for file in Path(done.stdout.strip().splitlines()[-1]).iterdir():
            file.rename(a.models / case["shape"] / file.name)
        (a.models / case["shape"] / "made").touch()
    command = [sys.executable, "-m", "scripts.bench.gpu_train", "--case", json.dumps(case)]
    followers = []
    if case.get("ranks"):
        env |= {"WORLD_SIZE": str(case["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
        for rank in range(1, case["ranks"]):
            at = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            followers.append(subprocess.Popen([sys.executable, "-m", "actors.trainer.follower"], env=at, cwd=code))
        env |= {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        done = subprocess.run(command, env=env, cwd=code, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired as error:
        text = error.stderr or b""
        return {"error": f"no end after {left:.0f} s", "log": text[-1500:].decode() if isinstance(text, bytes) else text[-1500:]}
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:]) | {"log": done.stderr[-1500:]}
    return {"error": f"exit {done.returncode}", "log": done.stderr[-3000:]}


# -- inside a case's process ---------------------------------------------------------------------------------------------


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case; what was found before an error is kept."""
    found: dict[str, Any] = {"case": case}
    try:
        import torch

        if case["device"] == "cuda":
            found["gpu"] = torch.cuda.get_device_name()
        if "kind" in case:
            getattr(gpu_numbers, case["kind"])(case, found)
        else:
            train(case, found)
    except Exception as error:  # noqa: BLE001 - the result says why it is missing
        found["error"] = f"{type(error).__name__}: {error}"[:1500]
        found["where"] = traceback.format_exc()[-2500:]
    return found


def train(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Steps of some micro-batches by `train_step`, and the forward pass alone by `score`."""
    import torch

    began = time.monotonic()
    backend = backend_for(case)
    core, cuda = backend.core, case["device"] == "cuda"
    found["setup_s"] = round(time.monotonic() - began, 2)
    config = core.policy.hf.config
    for kind in case["lengths"]:
        parts, count = case.get("parts", 4), case.get("steps", 4)
        steps = [batch_of(case, kind, 100 + i, config.vocab_size, parts) for i in range(count)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        rows = []
        for batch in steps:
            start = clocked(case["device"])
            metrics = stepped(backend, batch, found)
            seconds = clocked(case["device"]) - start
            work = flops(config, core, batch)
            rows.append(
                {
                    "step_s": round(seconds, 4),
                    "tokens": int(metrics["train/tokens"]),
                    "tokens_per_s": round(metrics["train/tokens"] / seconds),
                    "mfu": round(work[0] / seconds / PEAK / case.get("ranks", 1), 4),
                    "mfu_exact": round(work[1] / seconds / PEAK / case.get("ranks", 1), 4),
                    "micro_batches": metrics["train/micro_batches"],
                    "phases_s": {
                        n[6:]: round(v, 4)
                        for n, v in metrics.items()
                        if n.endswith("_s") and n[6:] not in ("step_s", "tokens_per_s")
                    },
                }
            )
        timed = sorted(rows[1:], key=lambda row: row["tokens_per_s"])
        found[kind] = {**timed[len(timed) // 2], "first_step_s": rows[0]["step_s"], "steps": rows}
        if cuda:
            found[kind]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if case.get("ranks"):
            continue
        score(case, core, steps[:2], found[kind])
    if case.get("profile") and cuda:
        profile(backend, batch_of(case, case["lengths"][-1], 200, config.vocab_size, parts), found)
    backend.close()


def stepped(backend: Any, batch: Any, found: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step; where memory is short, more layers compute again, until it fits."""
    import torch

    core = backend.core
    own = getattr(core.config, "own", None)
    first = getattr(own, "gradient_checkpointing_layers", 0)
    for layers in (0, first + 6, first + 12) if first else (0,):
        if layers:
            from actors.trainer.torch_backend.compiled import compile_layers

            found["recomputed_layers"] = layers
            core.weights.clear()
            gc.collect()
            torch.cuda.empty_cache()
            for block in core.policy.blocks[:layers]:
                block.gradient_checkpointing = True
            compile_layers(core.policy.blocks)
        try:
            return backend.train_step(batch).metrics
        except Exception as error:
            if type(error).__name__ != "NoRoom" or not first or layers == first + 12:
                raise
            print(error, file=sys.stderr, flush=True)
    raise AssertionError


def flops(config: Any, core: Any, batch: Any) -> tuple[float, float]:
    """Of a step: (6 N T + attention, the same with the vocabulary matrix for response tokens only)."""
    lengths = [len(s.prompt_tokens) + len(s.response_tokens) for s in batch.samples]
    trained = sum(p.numel() for p in core.weights.params.values())
    frozen = sum(p.numel() for p in core.policy.parameters() if not p.requires_grad)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    squares = 6 * config.num_hidden_layers * config.num_attention_heads * size * sum(x * x for x in lengths)
    times = 4 if frozen else 6
    head = times * config.vocab_size * config.hidden_size * sum(len(s.prompt_tokens) for s in batch.samples)
    plain = (6 * trained + 4 * frozen) * sum(lengths) + squares
    return plain, plain - head


def score(case: dict[str, Any], core: Any, batches: list[Any], into: dict[str, Any]) -> None:
    """Tokens/s of a pass without gradient, on the second batch."""
    for batch in batches:
        packed, work = planned(core, batch)
        start = clocked(case["device"])
        core.score("old_logp", packed, [work])
        into["score_tokens_per_s"] = round(int(packed.total.sum()) / (clocked(case["device"]) - start))


def profile(backend: Any, batch: Any, found: dict[str, Any]) -> None:
    """Milliseconds of one step by GPU kernel, and what the host takes beside them."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        start = clocked("cuda")
        backend.train_step(batch)
        seconds = clocked("cuda") - start
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels.setdefault(event.name[:90], [0.0, 0])
            entry[0] += event.device_time / 1000
            entry[1] += 1
    busy = sum(ms for ms, _ in kernels.values())
    top = sorted(kernels.items(), key=lambda item: -item[1][0])[:40]
    found["profile"] = {
        "step_ms": round(seconds * 1000, 1),
        "gpu_ms": round(busy, 1),
        "kernels": [[name, round(ms, 2), n] for name, (ms, n) in top],
    }


if __name__ == "__main__":
    main()
