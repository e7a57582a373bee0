"""Mixture of experts on one GPU: what replaying the engine's experts (R3) does to log-probs, and the speed of training.

    python -m scripts.bench gpu_moe --out DIR [--cases engine,replay-torch,...] [--budget-s 560]
    python -m scripts.bench gpu_moe --out DIR --cases speed-megatron --layers 4 --set moe_permute_fusion=true --profile

`engine` samples with SGLang from a small random Qwen3-MoE and keeps tokens, log-probs and experts in DIR/rollouts.npz; the replay
cases train on them; `resume` is that of gpu_megatron.py. Each case is a process of its own and writes DIR/CASE.json as soon as it
has a number; DIR/moe.json holds all that are there. Weights are random. Needs no network. `--rehearse`: everything tiny, with the
embedded engine; runs on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench import gpu_megatron as runs

CASES = ("engine", "replay-torch", "replay-megatron", "speed-torch", "speed-megatron")
DEADLINE_S = {"engine": 200, "speed-torch": 150, "speed-megatron": 150}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1,
       "mlp_only_layers": [], "tie_word_embeddings": False, "head_dim": 128}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "moe-small": {**MOE, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 256, "num_experts": 64,
                  "num_experts_per_tok": 8, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "vocab_size": 8192, "initializer_range": 0.05},
    "moe-tiny": {**MOE, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
                 "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 16, "vocab_size": 512, "initializer_range": 0.1, "torch_dtype": "float32",
                 "max_position_embeddings": 2048},
    **{f"moe-30b-a3b-{n}": {**MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                            "num_experts_per_tok": 8, "num_hidden_layers": n, "num_attention_heads": 32, "num_key_value_heads": 4,
                            "vocab_size": 151936} for n in (8, 6, 4)},
}  # fmt: skip
"""By name; the number behind 30b-a3b is that of its layers (the real one has 48)."""


def model_of(args: argparse.Namespace, shape: str) -> Path:
    from scripts.bench import gpu_parts as parts

    parts.SHAPES |= SHAPES
    return parts.make_model(args.models, shape, 0)


def small(args: argparse.Namespace) -> str:
    return "moe-tiny" if args.rehearse else "moe-small"


# -- the engine's log-probs and experts ------------------------------------------------------------------------------------


def engine(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """64 samples of 32 + 256 tokens, through the client of the generation room."""
    yield from asyncio.run(_sampled(args))


async def _sampled(args: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy as np
    from msgspec import UNSET

    from actors.generation.engine import GenerateRequest
    from actors.generation.engines.sglang.client import SGLangClient
    from actors.generation.routing import Rows
    from actors.runtime.prompts import routed_shape
    from scripts.bench import gpu_parts as parts

    model = model_of(args, small(args))
    vocab, samples, new = SHAPES[small(args)]["vocab_size"], 8 if args.rehearse else 64, 32 if args.rehearse else 256
    flags = {"attention-backend": "fa3", "sampling-backend": "pytorch", "mem-fraction-static": 0.4, "cuda-graph-max-bs": 64,
             "enable-return-routed-experts": True, "max-total-tokens": 131072}  # fmt: skip
    shape, found = routed_shape(str(model)), {}
    assert shape is not None
    kind = "embedded" if args.rehearse else "sglang"
    async with parts.server(kind, model, args.out / "engine", args=flags, max_running=samples) as (url, facts):
        client = SGLangClient(url, request_deadline_s=120, token_deadline_s=60, control_deadline_s=60)

        async def one(k: int, prompt: list[int]) -> None:
            tokens, logprobs, rows = [], [], Rows()
            for part in (new // 2, new // 2):  # as a sample that was interrupted: the second request reads all again
                request = GenerateRequest(
                    rid=f"s{k}-{len(tokens)}", input_ids=prompt + tokens, max_new_tokens=part, ignore_eos=True, vocabulary=vocab,
                    routed=shape, routed_from=rows.n,
                )  # fmt: skip
                async for chunk in client.generate(request):
                    tokens += chunk.token_ids
                    logprobs += chunk.logprobs
                    if chunk.experts is not None:
                        rows.add(chunk.experts, len(prompt) + len(tokens) - 1 - chunk.experts.n)
            table = rows.routed()
            known = b"" if table is UNSET else bytes(table.data)
            found[k] = prompt, tokens, logprobs, np.frombuffer(known, np.uint8).reshape(-1, shape.width)

        began = time.monotonic()
        await asyncio.gather(*(one(k, p) for k, p in enumerate(parts.prompts(samples, 32, vocab, 1))))
        seconds = time.monotonic() - began
        await client.close()
    arrays = {}
    for k, (prompt, tokens, logprobs, experts) in found.items():
        arrays |= {f"prompt{k}": np.array(prompt, np.int32), f"tokens{k}": np.array(tokens, np.int32),
                   f"logprobs{k}": np.array(logprobs, np.float32), f"experts{k}": experts}  # fmt: skip
    np.savez(args.out / "rollouts.npz", **arrays)
    read = sum(len(p) + len(t) - 1 for p, t, _, _ in found.values())
    tables = [experts for *_, experts in found.values()]
    return [{"boot_s": facts["boot_s"], "engine_tokens_per_s": samples * new / seconds, "tokens_read": read,
             "tokens_with_experts": sum(map(len, tables)), "experts_below": max(int(t.max(initial=0)) for t in tables) + 1,
             "bytes_a_token": shape.row_bytes}]  # fmt: skip


def recorded(args: argparse.Namespace, *, told: bool = True) -> Any:
    """The engine's samples as a step's batch."""
    import numpy as np

    from actors.trainer.backend import BatchSample, StepBatch
    from actors.trainer.objective import TrainSample

    arrays, made = np.load(args.out / "rollouts.npz"), []
    for k in range(len(arrays.files) // 4):
        prompt, tokens = arrays[f"prompt{k}"], arrays[f"tokens{k}"]
        train = TrainSample(sample_id=f"g{k // 4}/{k % 4}", group=f"g{k // 4}", response_length=len(tokens), reward=float(k % 2),
                            prompt_length=len(prompt), rollout_logp=arrays[f"logprobs{k}"], spans=[(0, len(tokens))])  # fmt: skip
        made.append(BatchSample(prompt, tokens, 1.0, train, arrays[f"experts{k}"] if told else None))
    return StepBatch(made, step=0, seed=0)


# -- log-probs with and without the engine's experts ------------------------------------------------------------------------


def replay(args: argparse.Namespace, *, megatron: bool) -> Iterator[dict[str, Any]]:
    """Mean, 99th percentile and largest |trainer - engine| log-prob of the sampled tokens; whether all tokens took the engine's
    experts; a training step."""
    import numpy as np

    from actors.trainer.training.step import _planned, train_batch

    engine_logp = np.concatenate([s.train.rollout_logp for s in recorded(args).samples])
    for told in (False, True):
        settings: dict[str, Any] = {"use_rollout_routing_replay": told, "lr": 1e-6}
        settings |= {"own": {"moe_expert_kernel": args.expert_kernel}} if megatron else {}
        core = runs.core_of(model_of(args, small(args)), megatron=megatron, **settings)
        batch = recorded(args, told=told)
        packed = core.pack(batch.samples)
        _, work = _planned(core, core.config, packed, [s.train.trajectory for s in batch.samples])
        calls = watched(core, megatron) if told else []
        ours = core.score("old_logp", packed, work).numpy()
        found: dict[str, Any] = {}
        if told:
            found |= compared(core, work, calls)
            found["routing"] = packed.routes.metrics(core.total)
        away = np.abs(ours - engine_logp)
        ratio = ours - engine_logp
        found |= {"mean": float(away.mean()), "p99": float(np.quantile(away, 0.99)), "max": float(away.max()),
                  "k3": float((np.exp(ratio) - 1 - ratio).mean()), "tokens": int(away.size)}  # fmt: skip
        metrics = train_batch(core, batch).metrics
        names = ("loss", "grad_norm", "train_rollout_logprob_abs_diff", "routing_mismatch", "routing_fallback_tokens")
        found["step"] = {n: metrics[f"train/{n}"] for n in names if f"train/{n}" in metrics}
        yield {"with_replay" if told else "without_replay": found}
        core.close()


def watched(core: Any, megatron: bool) -> list[Any]:
    """Experts that each layer computes with from now on, as a set for each token: bool [T, experts], layer after layer."""
    import torch

    calls: list[Any] = []
    if megatron:
        from megatron.core.transformer.moe.router import TopKRouter

        for chunk in core.model.bare:
            for module in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
                module.register_forward_hook(lambda _, args, out: calls.append(out[1].bool().detach()))
        return calls
    for block in core.policy.blocks:
        block.mlp.gate.register_forward_hook(
            lambda _, args, out: calls.append(torch.zeros_like(out[0], dtype=torch.bool).scatter(1, out[2], True))
        )
    return calls


def compared(core: Any, work: Any, calls: list[Any]) -> dict[str, Any]:
    """Shares of (token, layer) whose experts are those that were given, of those that were."""
    import torch

    equal = total = 0
    layers = core_shape(core).layers
    micros = [micro for mine in work for _, micro in mine]
    for k, micro in enumerate(micros):
        for n in range(layers):
            used = calls[k * layers + n]
            given = micro.routing.table[:, n].to(used.device).long()
            known = (given < used.shape[1]).all(-1)
            wanted = torch.zeros_like(used).scatter(1, given.clamp(max=used.shape[1] - 1), True)
            equal += int((wanted == used).all(-1)[known].sum())
            total += int(known.sum())
    return {"experts_equal": equal / max(1, total), "compared": total}


def core_shape(core: Any) -> Any:
    return core.replay.shape if hasattr(core, "replay") else core.schedule.replay.shape


# -- losses of the routers ------------------------------------------------------------------------------------------------


def balance(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two steps without the routers' losses, with them, and with megatron-core's fused router: what each adds to the gradient."""
    from actors.trainer.training.step import train_batch

    vocab, both = SHAPES[small(args)]["vocab_size"], {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    fused = {} if args.rehearse else {"both_fused": {**both, "moe_router_fusion": True}}
    for name, losses in {"none": {}, "both": both, **fused}.items():
        core = runs.core_of(model_of(args, small(args)), own={"megatron": losses, "moe_expert_kernel": args.expert_kernel})
        steps = [train_batch(core, runs.batch(k, vocab, samples=16, tokens=256)).metrics for k in range(2)]
        names = ("loss", "grad_norm", "load_balancing_loss", "router_z_loss")
        yield {name: [{n: m[f"train/{n}"] for n in names if f"train/{n}" in m} for m in steps]}
        core.close()


# -- speed ----------------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace, *, megatron: bool) -> Iterator[dict[str, Any]]:
    """Tokens/s, MFU and peak memory of a training step and of a log-prob pass."""
    import torch

    from actors.trainer.training.step import _planned, train_batch

    shape = small(args) if args.rehearse else f"moe-30b-a3b-{args.layers}"
    model = model_of(args, shape)
    given = runs.given(args) if megatron else {}
    core = runs.core_of(model, megatron=megatron, max_tokens_per_gpu=args.tokens, log_probs_max_tokens_per_gpu=args.tokens,
                        **({"own": {"megatron": given, "moe_expert_kernel": args.expert_kernel}} if megatron else {}))  # fmt: skip
    cuda = torch.cuda.is_available()
    one = runs.batch(0, SHAPES[shape]["vocab_size"], samples=8 if args.rehearse else 64, tokens=256 if args.rehearse else 512)
    lengths = [(len(s.prompt_tokens) + len(s.response_tokens), len(s.response_tokens)) for s in one.samples]
    tokens, work = sum(n for n, _ in lengths), sum(core.cost(n, r) for n, r in lengths)
    packed = core.pack(one.samples)
    _, planned = _planned(core, core.config, packed, [s.train.trajectory for s in one.samples])
    yield {"shape": shape, "tokens": tokens, "micro_batches": len(planned[0]), "max_tokens_per_gpu": args.tokens,
           "gpu": torch.cuda.get_device_name() if cuda else "cpu", "set": given, "expert_kernel": args.expert_kernel,
           "compiled": bool(getattr(core, "compiles", False))}  # fmt: skip

    def numbers(seconds: float, passes: int) -> dict[str, float]:
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        mfu = 2 * passes * work / seconds / runs.PEAK_FLOPS
        return {"seconds": seconds, "tokens_per_s": tokens / seconds, "mfu": mfu, "peak_gib": peak}

    phases: dict[str, float] = {}

    def step() -> None:
        phases.update({n: v for n, v in train_batch(core, one).metrics.items() if n.endswith("_s")})

    yield {"step": numbers(runs.timed(step, warm=2, times=3), 3), "phases": phases}
    yield {"forward": numbers(runs.timed(lambda: core.score("old_logp", packed, planned), warm=1, times=3), 1)}
    if args.profile:
        yield {"profile": profiled(step, args.out / f"{args.case}-profile.txt")}
    core.close()


def profiled(step: Callable[[], None], file: Path) -> str:
    """One more step: the kernels and the host's operations that it spent most time in, as two tables of text in `file`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as made:
        step()
        if cuda:
            torch.cuda.synchronize()
    every = made.key_averages()
    keys = (*(["self_cuda_time_total"] if cuda else []), "self_cpu_time_total")
    file.write_text("\n\n".join(every.table(sort_by=key, row_limit=40, max_name_column_width=90) for key in keys))
    return str(file)


# -- processes ------------------------------------------------------------------------------------------------------------


def one_case(args: argparse.Namespace, case: str) -> None:
    """In this process; what it has found is in its file after each number."""
    kind, _, rest = case.partition("-")
    run: dict[str, Callable[[], Iterator[dict[str, Any]]]]
    run = {"engine": lambda: engine(args), "replay": lambda: replay(args, megatron=rest == "megatron"),
           "balance": lambda: balance(args),
           "resume": lambda: runs.resume(args, model_of(args, small(args)), SHAPES[small(args)]["vocab_size"]),
           "speed": lambda: speed(args, megatron=rest == "megatron")}  # fmt: skip
    runs.keep(args.out / f"{case}.json", case, run[kind]())


def _too_large(file: Path) -> bool:
    return file.exists() and bool(json.loads(file.read_text()).get("too_large"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/moe-models"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", default="")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, for the speed cases")
    parser.add_argument("--layers", type=int, choices=(8, 6, 4), default=8, help="of the speed cases; fewer where they do not fit")
    parser.add_argument("--budget-s", type=float, default=560)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="of TransformerConfig, for speed-megatron")
    parser.add_argument("--expert-kernel", choices=("torch", "te"), default="torch", help="of Megatron")
    parser.add_argument("--profile", action="store_true", help="of a speed case: one step's kernels and host operations, as text")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.models.mkdir(parents=True, exist_ok=True)
    if args.case:
        one_case(args, args.case)
        return 0
    end, codes = time.monotonic() + args.budget_s, {}
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for case, layers in ((name, n) for name in args.cases.split(",") for n in ((8, 6, 4) if "speed" in name else (8,))):
        if layers > args.layers or (layers < args.layers and not _too_large(args.out / f"{case}.json")):
            continue
        left = end - time.monotonic()
        if left < 20:
            print(f"{case}: left out, {left:.0f} s of the budget are left", flush=True)
            continue
        command = [sys.executable, "-m", "scripts.bench.gpu_moe", "--case", case,
                   "--out", str(args.out), "--models", str(args.models),
                   "--tokens", str(args.tokens), "--layers", str(layers),
                   *(f"--set={pair}" for pair in args.set),
                   "--expert-kernel", args.expert_kernel,
                   *(f"--{name}" for name in ("profile", "rehearse") if getattr(args, name))]  # fmt: skip
        try:
            codes[case] = subprocess.run(command, timeout=min(left, DEADLINE_S.get(case, 100)), env=environment).returncode
        except subprocess.TimeoutExpired:
            codes[case] = "timeout"
        every = {name: json.loads(f.read_text()) for name in args.cases.split(",") if (f := args.out / f"{name}.json").exists()}
        (args.out / "moe.json").write_text(json.dumps({"exit": codes, **every}, indent=1))
    print(json.dumps(codes), flush=True)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
