"""Long-tailed answers on two GPUs, one training, one generating by SGLang: scheduling rules, bounds and slots side by side.

    python -m miles_async.quickstart.model .gpu/columns --task columns --seed 1     (for long: minutes on a CPU)
    python -m scripts.bench gpu_tails --task tails --out DIR    DIR/tails.json: random weights of a real shape, stop tokens such
                                                                that lengths are geometric, 32 groups of 8, 384 samples at once
    python -m scripts.bench gpu_tails --task long --out DIR     DIR/long.json: configs/long.toml to 85 % of the held-out problems

Variants of tails (--variants, run in the order given): b split, bound 4; c split, bound 2; e whole groups, bound 4; d split,
bound 2, slots found by themselves within 1.5 % masked; f, g as b, d with keys and values of 8 bits (a server of their own);
h, i as b, d with both GPUs doing both at once, without turns (two ranks train, each engine has half of the slots); j bound 4,
slots found within 2.5 % masked; k as j, with both GPUs doing both. Of long: bounds 0, 2, 4 by seed.
All runs but h, i and k share one server, whose boot would cost as much as a run (gpu_tails_run.py); long may have more
than one (--long-servers), whose schedulers are processes of their own. A run that fails gets the next one servers of its own.
The budget is divided among the runs; one that outlasts its part is ended and its steps so far count.
Files are written anew after every run. `--engine embedded --shape tiny --mean-tokens 40 --new-tokens 126 --slots 48` rehearses
tails without a GPU, `--task long --engine embedded` long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.runtime.staleness import Rule
from scripts.bench import REPO, gpu_e2e
from scripts.bench import gpu_parts as parts
from scripts.bench import gpu_tails_read as read
from scripts.bench.gpu_tails_bench import ENDING_S, Bench, Servers, run_all, tail_of

BATCH, GROUP = 32, 8
ALL_ADMITTED = ("--over-sampling-batch-size", "0")  # instead of what the file of long says
OWN_ENGINES = ("--engine", "sglang", "--sglang-mem-fraction-static", "0.5", "--sglang-attention-backend", "fa3",
               "--sglang-sampling-backend", "pytorch", "--sglang-cuda-graph-max-bs", "256")  # fmt: skip
DRAIN = 6  # last steps of a run, which no prompt follows: never counted (the highest bound and one, and one to spare)


@dataclass(frozen=True)
class Run:
    """One run: flags beside those of its task. `weight`: its part of the time, in which one with engines of its own boots them too
    (two minutes). For the model: rule, bound, groups in generation at most (0 = what the bound admits)."""

    flags: tuple[str, ...]
    weight: float = 1.0
    rule: Rule = "split"
    bound: int = 2
    cap: int = 0
    half: bool = False  # keys and values of 8 bits in the engine
    shared: bool = False  # trainer and engines on both GPUs, at once


def _tails(slots: int) -> dict[str, Run]:
    fixed = ("--sglang-server-concurrency", str(slots))
    found = ("--sglang-server-concurrency", "auto", "--sglang-concurrency-max", str(slots))
    auto, wide = (*found, "--max-masked-fraction", "0.015"), (*found, "--max-masked-fraction", "0.025")
    return {
        "b": Run((*fixed, "--max-weight-staleness", "4"), bound=4),
        "c": Run((*fixed, "--max-weight-staleness", "2"), 1.1),
        "e": Run((*fixed, "--max-weight-staleness", "4", "--staleness-policy", "whole"), rule="whole", bound=4),
        "d": Run((*auto, "--max-weight-staleness", "2"), 1.3),
        "f": Run((*fixed, "--max-weight-staleness", "4"), bound=4, half=True),
        "g": Run((*auto, "--max-weight-staleness", "2"), 1.3, half=True),
        "h": Run((*_halved(fixed), "--max-weight-staleness", "4"), 2.4, bound=4, shared=True),
        "j": Run((*wide, "--max-weight-staleness", "4"), 1.2, bound=4),
        "k": Run((*_halved(wide), "--max-weight-staleness", "4"), 2.4, bound=4, shared=True),
        "i": Run((*_halved(auto), "--max-weight-staleness", "2"), 2.6, shared=True),
    }


def _halved(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The slots of each of two engines."""
    return tuple(str(int(word) // 2) if word.isdigit() else word for word in flags)


def _long(seeds: int, steps: int) -> dict[str, Run]:
    """Seed by seed, so that whoever is cut off has whole comparisons."""
    return {
        f"bound-{bound}-seed-{seed}": Run(
            ("--max-weight-staleness", str(bound), *(ALL_ADMITTED if bound else ()),
             "--rollout-seed", str(seed), "--num-rollout", str(steps)),
            1.4 if bound == 0 else 1.0, rule="split" if bound else "whole", bound=bound,
        )
        for seed in range(1, seeds + 1)
        for bound in (0, 4, 2)
    }  # fmt: skip


async def tails(b: Bench) -> None:
    """The variants, one after the other; what is known so far is written after each."""
    a = b.args
    models = Path(a.models)
    models.mkdir(parents=True, exist_ok=True)
    model = await asyncio.to_thread(lambda: gpu_e2e.with_tokenizer(parts.make_model(models, a.shape, 0)))
    prompts = b.scratch / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i % 97}=", "label": "1"}) + "\n" for i in range(4096)))
    ids = read.stop_ids(a.mean_tokens, a.new_tokens, int((parts.QWEN3 | parts.SHAPES[a.shape])["vocab_size"]))
    words = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--input-key", "prompt", "--label-key", "label"),
        *("--rm-type", "deterministic_random", "--num-rollout", str(a.warm + a.steps + DRAIN), "--use-tis"),
        *("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", str(GROUP)),
        *("--rollout-max-response-len", str(a.new_tokens), "--rollout-stop-token-ids", *map(str, ids)),
        *("--update-weight-transport", "nccl", "--pause-generation-mode", "in_place"),
        *("--update-weight-buffer-size", str(2 << 30)),
    ]
    if a.engine == "sglang":
        words += ["--model-dtype", "bfloat16", "--max-tokens-per-gpu", "16384"]
    at_once = ["--colocate", "--no-offload", "--actor-num-gpus-per-node", "2", "--update-weight-transport", "ipc"]
    if a.engine == "sglang":  # activations of half as many tokens, and an engine, fit an 80 GB GPU
        at_once += ["--max-tokens-per-gpu", "8192", *OWN_ENGINES, *(["--sglang-fused-sampling"] if a.fused else [])]
    else:
        at_once += ["--num-generation-workers", "2"]
    chosen = {name: _tails(a.slots)[name] for name in a.variants}
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    seen: dict[str, Any] = {}
    known = {"slots": a.slots, "stop_ids": len(ids), "mean_asked": a.mean_tokens, "cut": a.new_tokens, "warm": a.warm}

    async def servers_of(run: Run) -> Servers:
        if run.shared:
            await b.stop()
            return []
        flags = {"mem-fraction-static": 0.8, "random-seed": 1} | ({"kv-cache-dtype": "fp8_e4m3"} if run.half else {})
        return await b.servers(model, a.slots, fused=a.fused, **flags)

    async def one(name: str, run: Run, share_s: float) -> None:
        servers = await servers_of(run)
        limit_s = min(share_s, b.left_s - ENDING_S)
        more = at_once if run.shared else []
        ended = await b.run(name, [*words, *more, *run.flags], servers, limit_s)
        found = read.figures(b.metrics(name), warm=a.warm, steps=a.steps)
        if not found:
            raise RuntimeError(f"variant {name}: {ended}: {tail_of(b.out / f'{name}.log')}")
        logs = [facts["log"] for _, facts in servers] or b.engine_logs(name)
        runs[name] = ended | found | {"running": read.running(logs, found["window"])}
        if not run.shared:  # an engine whose GPU trains as well tells another pace
            seen[name] = read.seen_by_model(b.metrics(name), slots=a.slots, warm=a.warm, steps=a.steps)

    def save() -> None:
        setups = {name: (run.rule, run.bound, run.cap) for name, run in chosen.items() if not run.shared}
        try:
            predicted = read.model({name: runs[name] for name in runs if name in setups}, seen, setups, a.slots, "b")
        except Exception as error:  # noqa: BLE001 - the measurements are dearer than what is made of them
            traceback.print_exc()
            predicted = {"failed": repr(error)}
        b.save({**known, "failed": failed, "model": predicted, "runs": runs})

    await run_all(b, chosen, one, failed, save)


async def long(b: Bench) -> None:
    """Learning curves of configs/long.toml, one run after the other."""
    a = b.args
    model = Path(a.columns)
    if not model.exists():
        raise FileNotFoundError(f"{model} is missing; the docstring of {Path(__file__).name} says how to make it")
    words = [
        *(str(REPO / "configs" / "long.toml"), "--hf-checkpoint", str(model)),
        *("--pause-generation-mode", "in_place", "--eval-interval", "2", *json.loads(a.long_flags)),
    ]
    chosen = {name: run for name, run in _long(a.seeds, a.long_steps).items() if not a.only or name in a.only}
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    # The tiny model's heads are too small for most attention kernels; Triton's take any size.
    memory = 0.3 / a.long_servers
    flags = {"attention-backend": "triton", "mem-fraction-static": memory, "cuda-graph-max-bs": 256, "dtype": "bfloat16"}

    async def one(name: str, run: Run, share_s: float) -> None:
        each = a.long_slots // a.long_servers
        servers = await b.servers(model, each, n=a.long_servers, fused=a.fused, **flags)
        at_once = ("--sglang-server-concurrency", str(each))
        limit_s = min(share_s, b.left_s - ENDING_S)
        ended = await b.run(name, [*words, *at_once, *run.flags], servers, limit_s)
        found = read.held_out(b.metrics(name), 0.85)
        if not found.get("curve"):
            raise RuntimeError(f"run {name}: {ended}: {tail_of(b.out / f'{name}.log')}")
        runs[name] = ended | found

    def save() -> None:
        times: dict[str, list[float]] = {}
        for name, run in runs.items():
            if run["reached_s"]:
                times.setdefault(name.rpartition("-seed")[0], []).append(run["reached_s"])
        means = {name: round(sum(found) / len(found), 2) for name, found in times.items()}
        strict = means.get("bound-0")
        b.save({
            "seconds_to_85_percent": means,
            "of_on_policy": {name: round(s / strict, 3) for name, s in means.items()} if strict else {},
            "failed": failed, "runs": runs,
        })  # fmt: skip

    await run_all(b, chosen, one, failed, save)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("tails", "long"), default="tails")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--models", default="/dev/shm/gpu-bench-models", help="folder for weights (default %(default)s)")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--server-args", default="{}", help="further SGLang flags as JSON, names without dashes in front")
    parser.add_argument("--budget-s", type=float, default=530.0)
    parser.add_argument("--shape", choices=sorted(parts.SHAPES), default="0.6b")
    parser.add_argument("--variants", nargs="+", choices=list("bcedfghijk"), default=list("bced"))
    parser.add_argument("--steps", type=int, default=14, help="training steps that count")
    parser.add_argument("--warm", type=int, default=4, help="training steps before them")
    parser.add_argument("--slots", type=int, default=384, help="samples at once, at most")
    parser.add_argument("--mean-tokens", type=float, default=650.0)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--columns", default=str(REPO / ".gpu" / "columns"), help="model of long (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of long")
    parser.add_argument("--long-steps", type=int, default=40)
    parser.add_argument("--long-slots", type=int, default=128, help="of all servers together")
    parser.add_argument("--long-servers", type=int, default=1, help="on the engines' GPU")
    parser.add_argument("--long-flags", default="[]", help="further flags of miles-async train, as a JSON list")
    parser.add_argument("--only", nargs="*", help="only these runs of long")
    parser.add_argument("--fused", action="store_true", help="tails draw by our sampler")
    args = parser.parse_args()
    b = Bench(args)
    asyncio.run((tails if args.task == "tails" else long)(b))
    result = json.loads((b.out / f"{args.task}.json").read_text())
    brief = {name: {k: v for k, v in run.items() if isinstance(v, int | float | str)} for name, run in result["runs"].items()}
    print(json.dumps({**{k: v for k, v in result.items() if k not in ("runs", "machine")}, "runs": brief}, indent=1)[-10_000:])
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
