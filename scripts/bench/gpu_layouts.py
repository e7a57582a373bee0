"""The Megatron backend over two GPUs: every layout's steps beside one rank's, checkpoints that cross layouts, exports of shards.

    python -m scripts.bench gpu_layouts --out DIR [--cases one,tp2_sp,...] [--shape 0.6b] [--models DIR] [--budget-s 400]

Each case is one trainer as a run has it: rank 0 through `RankedBackend`, rank 1 as `python -m actors.trainer.follower`. `tp2_sp`
writes a checkpoint after its steps, which `one_loads` and `pp2_loads` read; `dp2_resumes` and its kin write one of the distributed
optimizer, whose parts each rank writes and reads, and go on from it. Compared are losses, gradient norms and entropies of
two steps with two updates each, and a hash over all exported weights. `export_tp2` and `export_pp2` measure on both ranks what an
export adds to the GPU's memory. Without a GPU `--shape small` rehearses all but these two. Weights are random. Needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench import gpu_megatron as one_gpu

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {"megatron": {"use_distributed_optimizer": True}},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "dp2_aware": {"megatron": {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}},
    "dp2_offloaded": {"megatron": {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True,
                                   "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}},
}  # fmt: skip
CASES = ("one", "tp2_sp", "one_loads", "pp2_loads", "pp2", "cp2", "dp2", "export_tp2", "export_pp2", "pp2_vpp2",
         "dp2_resumes", "dp2_aware_resumes", "dp2_offloaded_resumes")  # fmt: skip
BUCKET = 512 << 20
NUMBERS = ("loss", "grad_norm", "entropy_loss")


def settings(case: str) -> dict[str, Any]:
    layout = {"export_tp2": "tp2_sp", "export_pp2": "pp2"}.get(case, case.removesuffix("_loads").removesuffix("_resumes"))
    # Two updates a batch and an entropy term: on-policy losses alone are sums of advantages, 0 whatever the model says.
    return {"num_steps_per_rollout": 2, "objective": {"entropy_coef": 0.01}, "own": LAYOUTS[layout]}


def exported(backend: Any) -> str:
    """A hash over names, shapes and bytes of all weights, in the order of their names."""
    import torch

    found = {}
    for bucket in backend.export(BUCKET):
        for name, tensor in bucket:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found[name] = hashlib.blake2b(flat.numpy().tobytes() + str(tuple(tensor.shape)).encode()).hexdigest()
    return hashlib.blake2b(json.dumps(sorted(found.items())).encode(), digest_size=16).hexdigest()


def save(backend: Any, checkpoint: Path) -> dict[str, Any]:
    """Seconds of the copy and of the writing, and what was written."""
    shutil.rmtree(checkpoint, ignore_errors=True)  # of an earlier case
    checkpoint.mkdir(parents=True)
    began = time.monotonic()
    saved = backend.save(checkpoint)
    copied = time.monotonic()
    saved.write()
    saved.finish()
    written = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return {"copy_s": copied - began, "write_s": time.monotonic() - copied, "bytes": written}


def trained(args: argparse.Namespace, case: str) -> Iterator[dict[str, Any]]:
    """A case that loads: its weights and a step. Others: two steps, the checkpoint of `tp2_sp`, a step's time."""
    from actors.trainer.training.ranked import RankedBackend

    model, backend = one_gpu.model_of(args.models, args.shape), RankedBackend("megatron")
    vocab = one_gpu.SMALL["vocab_size"] if args.shape == "small" else 151936

    def step(number: int) -> dict[str, float]:
        found = backend.train_step(one_gpu.batch(number, vocab, samples=16, tokens=512)).metrics
        return {name: found[f"train/{name}"] for name in NUMBERS}

    backend.setup(one_gpu.config(model, megatron=True, **settings(case)))
    checkpoint = args.models / ("checkpoint-dp2" if case.endswith("_resumes") else "checkpoint-tp2")
    if case.endswith("_loads"):
        began = time.monotonic()
        backend.load(checkpoint)
        wanted = json.loads((args.out / "tp2_sp.json").read_text())
        yield {"load_s": time.monotonic() - began, "same_weights_as_saved": exported(backend) == wanted["weights_saved"]}
        yield {"next_step": step(2), "of_the_saver": wanted["next_step"]}
        backend.close()
        return
    yield {"weights_before": exported(backend)}
    yield {"steps": [step(0), step(1)]}
    if case == "tp2_sp":
        yield save(backend, checkpoint) | {"weights_saved": exported(backend)}
        yield {"next_step": step(2)}
    if case.endswith("_resumes"):
        yield save(backend, checkpoint)
        yield {"next_step": step(2), "weights_after": exported(backend)}
        backend.setup(one_gpu.config(model, megatron=True, **settings(case)))
        began = time.monotonic()
        backend.load(checkpoint)
        yield {"load_s": time.monotonic() - began, "resumed_step": step(2), "weights_resumed": exported(backend)}
        backend.close()
        return
    large = one_gpu.batch(7, vocab, samples=8 if args.shape == "small" else 64, tokens=512)
    tokens = sum(len(s.prompt_tokens) + len(s.response_tokens) for s in large.samples)
    seconds = one_gpu.timed(lambda: backend.train_step(large), warm=2, times=3)
    yield {"step_s_of_two_updates": seconds, "tokens_per_s": tokens / seconds}
    backend.close()


def export(args: argparse.Namespace, case: str, rank: int) -> Iterator[dict[str, Any]]:
    """On each rank: the most that sending all weights adds to its memory, beside its shard and one bucket."""
    import torch

    from actors.trainer.training.export import gathered
    from actors.trainer.training.ranked import core_of
    from actors.trainer.training.ranks import Ranks

    ranks = Ranks.from_environment()
    ranks.connect()
    core = core_of("megatron")(one_gpu.config(one_gpu.model_of(args.models, args.shape), megatron=True, **settings(case)), ranks)
    shard = sum(p.numel() * p.element_size() for chunk in core.model.chunks for p in chunk.parameters())
    for turn in ("first", "second"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for bucket in gathered(core, ranks, BUCKET):
            bucket.clear()
        torch.cuda.synchronize()
        added = torch.cuda.max_memory_allocated() - before
        yield {turn: {"rank": rank, "shard_bytes": shard, "bucket_bytes": BUCKET, "added_bytes": added,
                      "of_shard_and_bucket": (shard + added) / (shard + BUCKET)}}  # fmt: skip
    core.close()
    ranks.close()


def rank_main(args: argparse.Namespace, rank: int) -> int:
    """One rank of a case, in this process."""
    if args.case.startswith("export_"):
        name = f"{args.case}-{rank}" if rank else args.case
        one_gpu.keep(args.out / f"{name}.json", name, export(args, args.case, rank))
    elif rank:
        from actors.trainer.follower import main as follow

        return follow()
    else:
        one_gpu.keep(args.out / f"{args.case}.json", args.case, trained(args, args.case))
    return 0


def run(args: argparse.Namespace, case: str, deadline_s: float) -> int | str:
    """All ranks of a case to their end; the first exit status that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = 1 if case.startswith("one") else 2
    folders = ["--out", str(args.out), "--models", str(args.models)]
    command = [sys.executable, "-m", "scripts.bench.gpu_layouts", "--case", case, "--shape", args.shape, *folders]
    processes = []
    for rank in range(size):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        processes.append(subprocess.Popen(command, env=environment))
    end = time.monotonic() + deadline_s
    try:
        codes = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        for process in processes:
            process.kill()
    return next((code for code in codes if code), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/megatron-models"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", default="")
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--budget-s", type=float, default=400)
    parser.add_argument("--case-s", type=float, default=100, help="a case may take")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    args.models.mkdir(parents=True, exist_ok=True)
    if args.case:
        return rank_main(args, int(os.environ["RANK"]))
    one_gpu.model_of(args.models, args.shape)  # once, not by each rank
    end, codes = time.monotonic() + args.budget_s, {}
    for case in args.cases.split(","):
        left = end - time.monotonic()
        codes[case] = run(args, case, min(left, args.case_s)) if left > 15 else "left out"
        found = {file.stem: json.loads(file.read_text()) for file in sorted(args.out.glob("*.json")) if file.stem != "layouts"}
        (args.out / "layouts.json").write_text(json.dumps({"exit": codes, **found}, indent=1))
    print(json.dumps(codes), flush=True)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
