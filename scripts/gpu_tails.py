#!/usr/bin/env python3
"""Long-tailed answers on two GPUs, one training, one generating by SGLang: today's scheduling beside that of an older commit.

    git archive 6e384b8 actors bus miles_async scripts configs pyproject.toml | gzip -9 >.gpu/before.tar.gz     (for variant a)
    python -m miles_async.quickstart.model .gpu/columns --task columns --seed 1                     (for long: minutes on a CPU)
    python scripts/gpu_tails.py --task tails --out DIR      DIR/tails.json: random weights of a real shape, stop tokens such that
                                                            lengths are geometric, 32 groups of 8, 384 samples at once
    python scripts/gpu_tails.py --task long --out DIR       DIR/long.json: configs/long.toml to 85 % of the held-out problems

Variants of tails (--variants, run in the order given): a before (6e384b8, bound 2, its defaults); b split, bound 4; c split, bound
2; e whole groups, bound 4; d split, bound 2, slots found by themselves within 1.5 % masked; f, g as b, d with keys and values of 8
bits (a server of their own). Of long: bounds 0, 2, 4 by seed.
All runs share one server, whose boot would cost as much as a run (gpu_tails_run.py); a run that fails gets the next one a
server of its own. The budget is divided among the runs; one that outlasts its part is ended and its steps so far count.
Files are written anew after every run. `--engine embedded --shape tiny --mean-tokens 40 --new-tokens 126 --slots 48` rehearses
tails without a GPU, `--task long --engine embedded` long.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import signal
import sys
import tarfile
import time
import traceback
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gpu_bench
import gpu_e2e
import gpu_parts as parts
import gpu_tails_read as read
from gpu_decode import fuse
from gpu_tails_run import VARIABLE

from actors.generation.sglang_client import SGLangClient
from actors.runtime.staleness import Rule

BATCH, GROUP = 32, 8
ALL_ADMITTED = ("--over-sampling-batch-size", "0")  # instead of what the file of long says
DRAIN = 6  # last steps of a run, which no prompt follows: never counted (the highest bound and one, and one to spare)
ENDING_S = 12.0  # of a run that is told to end


@dataclass(frozen=True)
class Run:
    """One run: flags beside those of its task. `weight`: its part of the time. For the model: rule, bound, groups in generation
    at most (0 = what the bound admits)."""

    flags: tuple[str, ...]
    weight: float = 1.0
    before: bool = False
    rule: Rule = "split"
    bound: int = 2
    cap: int = 0
    half: bool = False  # keys and values of 8 bits in the engine


def _tails(slots: int) -> dict[str, Run]:
    fixed = ("--sglang-server-concurrency", str(slots))
    found = ("--sglang-server-concurrency", "auto", "--sglang-concurrency-max", str(slots))
    auto = (*found, "--max-masked-fraction", "0.015")
    return {
        "a": Run((*fixed, "--max-weight-staleness", "2"), 1.5, before=True, rule="whole", cap=BATCH),
        "b": Run((*fixed, "--max-weight-staleness", "4"), bound=4),
        "c": Run((*fixed, "--max-weight-staleness", "2"), 1.1),
        "e": Run((*fixed, "--max-weight-staleness", "4", "--staleness-policy", "whole"), rule="whole", bound=4),
        "d": Run((*auto, "--max-weight-staleness", "2"), 1.3),
        "f": Run((*fixed, "--max-weight-staleness", "4"), bound=4, half=True),
        "g": Run((*auto, "--max-weight-staleness", "2"), 1.3, half=True),
    }


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


class Bench:
    """One call. `server`: the one that all runs share, while it is well."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(mkdtemp(prefix="gpu-tails-"))
        self.end = time.monotonic() + args.budget_s
        self.boots: list[dict[str, Any]] = []
        self._server = AsyncExitStack()
        self._up: tuple[str, dict[str, Any]] | None = None
        self._args: dict[str, Any] = {}
        self._fused = False  # of the server that runs

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    async def server(self, model: Path, max_running: int, *, fused: bool = False, **flags: Any) -> tuple[str, dict[str, Any]]:
        """URL and facts of a server with these flags that is well and idle; boots one if need be. `fused`: it draws by ours."""
        gpu = self.args.engine == "sglang"
        args = gpu_bench.GPU_ARGS | flags | json.loads(self.args.server_args) if gpu else {}
        if self._up is not None and (self._args != args or (self._fused and not fused) or not await _idle(self._up[0])):
            await self.stop()
        if self._up is None:
            folder = self.scratch / f"server-{len(self.boots)}"
            made = parts.server(
                self.args.engine,
                model,
                folder,
                args=args,
                max_running=max_running,
                gpus=(1,) if gpu else (),  # the trainer takes the first
            )
            url, facts = await self._server.enter_async_context(made)
            self._up, self._args = (url, facts | {"log": next(iter(sorted(folder.rglob("log"))), None)}), args
            self.boots.append({"boot_s": facts["boot_s"], "note": facts["note"], "args": args})
        if fused and not self._fused:
            await fuse(self._up[0], self._up[1]["inside"])
            self._fused = True
        return self._up

    async def stop(self) -> None:
        self._up, self._fused = None, False
        await self._server.aclose()

    async def run(self, name: str, run: Run, words: list[str], facts: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """One run to its end or its limit: how it ended and its folder's name. What it says is read by others."""
        tree = self.before() if run.before else parts.REPO
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), _without_repo(os.environ.get("PYTHONPATH", ""))]),
            VARIABLE: facts["inside"],
        }
        began = time.monotonic()
        with (self.out / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(Path(__file__).with_name("gpu_tails_run.py")), "train", *words),
                *("--no-save", "--console", "none", "--no-report", "--runs-dir", str(self.scratch / "runs"), "--name", name),
                stdout=log, stderr=log, env=env, cwd=tree, start_new_session=True,
            )  # fmt: skip
            cut = False
            try:
                await asyncio.wait_for(process.wait(), limit_s)
            except TimeoutError:
                cut = True
            finally:
                await _end(process)
                if self.metrics(name).exists():
                    packed = self.out / f"{name}.metrics.jsonl.gz"
                    packed.write_bytes(gzip.compress(self.metrics(name).read_bytes()))
        return {"exit": process.returncode, "cut": cut, "seconds": round(time.monotonic() - began, 1)}

    def metrics(self, name: str) -> Path:
        return self.scratch / "runs" / name / "metrics.jsonl"

    def before(self) -> Path:
        """The older commit's code, unpacked."""
        tree, packed = self.scratch / "before", Path(self.args.before)
        if not tree.exists():
            if not packed.exists():
                raise FileNotFoundError(
                    f"{packed} is missing; the docstring of {Path(__file__).name} says how to make it"
                )
            with tarfile.open(packed) as archive:
                archive.extractall(tree, filter="data")
        return tree

    def save(self, values: dict[str, Any]) -> None:
        head = {"task": self.args.task, "command": " ".join(sys.argv), "engine": self.args.engine, "boots": self.boots}
        text = json.dumps(head | values | {"machine": parts.facts_of_machine()}, indent=1, default=str)
        (self.out / f"{self.args.task}.json").write_text(text)


def _without_repo(path: str) -> str:
    return os.pathsep.join(word for word in path.split(os.pathsep) if word and Path(word).resolve() != parts.REPO)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Politely, then with every process of its session."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), ENDING_S)
        except TimeoutError:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    await process.wait()


async def _idle(url: str) -> bool:
    """Whether a server answers, after everything that a run left there was ended and its pause lifted."""
    client = SGLangClient(url, request_deadline_s=20, token_deadline_s=20, control_deadline_s=20)
    try:
        await client.abort_all()
        await client.resume()
        await client.health()
    except Exception as error:  # noqa: BLE001 - whatever it is: the next run gets a server of its own
        print(f"the server is not well: {error}", flush=True)
        return False
    finally:
        await client.close()
    return True


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
    chosen = {name: _tails(a.slots)[name] for name in a.variants}
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    seen: dict[str, Any] = {}
    known = {"slots": a.slots, "stop_ids": len(ids), "mean_asked": a.mean_tokens, "cut": a.new_tokens, "warm": a.warm}

    async def one(name: str, run: Run, share_s: float) -> None:
        flags = {"mem-fraction-static": 0.8, "random-seed": 1} | ({"kv-cache-dtype": "fp8_e4m3"} if run.half else {})
        url, facts = await b.server(model, a.slots, fused=a.fused and not run.before, **flags)
        limit_s = min(share_s, b.left_s - ENDING_S)
        ended = await b.run(name, run, [*words, *_external(url), *run.flags], facts, limit_s)
        found = read.figures(b.metrics(name), warm=a.warm, steps=a.steps)
        if not found:
            raise RuntimeError(f"variant {name}: {ended}: {_tail(b.out / f'{name}.log')}")
        runs[name] = ended | found | {"running": read.running(facts["log"], found["window"])}
        seen[name] = read.seen_by_model(b.metrics(name), slots=a.slots, warm=a.warm, steps=a.steps)

    def save() -> None:
        setups = {name: (run.rule, run.bound, run.cap) for name, run in chosen.items()}
        try:
            predicted = read.model(runs, seen, setups, a.slots, "b")
        except Exception as error:  # noqa: BLE001 - the measurements are dearer than what is made of them
            traceback.print_exc()
            predicted = {"failed": repr(error)}
        speed = (
            {name: round(runs["a"]["step_s"] / run["step_s"], 3) for name, run in runs.items()} if "a" in runs else {}
        )
        b.save({**known, "times_as_fast_as_a": speed, "failed": failed, "model": predicted, "runs": runs})

    await _all(b, chosen, one, failed, save)


async def long(b: Bench) -> None:
    """Learning curves of configs/long.toml, one run after the other."""
    a = b.args
    model = Path(a.columns)
    if not model.exists():
        raise FileNotFoundError(f"{model} is missing; the docstring of {Path(__file__).name} says how to make it")
    words = [
        *(str(parts.REPO / "configs" / "long.toml"), "--hf-checkpoint", str(model)),
        *("--pause-generation-mode", "in_place", "--eval-interval", "2", *json.loads(a.long_flags)),
    ]
    chosen = {name: run for name, run in _long(a.seeds, a.long_steps).items() if not a.only or name in a.only}
    runs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    # The tiny model's heads are too small for most attention kernels; Triton's take any size.
    flags = {"attention-backend": "triton", "mem-fraction-static": 0.3, "cuda-graph-max-bs": 256, "dtype": "bfloat16"}

    async def one(name: str, run: Run, share_s: float) -> None:
        url, facts = await b.server(model, a.long_slots, **flags)
        at_once = ("--sglang-server-concurrency", str(a.long_slots))
        limit_s = min(share_s, b.left_s - ENDING_S)
        ended = await b.run(name, run, [*words, *_external(url), *at_once, *run.flags], facts, limit_s)
        found = read.held_out(b.metrics(name), 0.85)
        if not found.get("curve"):
            raise RuntimeError(f"run {name}: {ended}: {_tail(b.out / f'{name}.log')}")
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

    await _all(b, chosen, one, failed, save)


async def _all(b: Bench, chosen: dict[str, Run], one: Any, failed: dict[str, str], save: Any) -> None:
    """Each run with its share of the time that is left. One that fails is told, and the server with it given up."""
    waiting = dict(chosen)
    for name, run in chosen.items():
        share_s = b.left_s * run.weight / sum(r.weight for r in waiting.values())
        del waiting[name]
        if b.left_s < 20 + ENDING_S:
            failed[name] = "not begun: no time left"
            continue
        began = time.monotonic()
        try:
            await one(name, run, share_s)
        except Exception as error:  # noqa: BLE001 - the other runs go on
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
            await b.stop()
        save()
        print(f"[{name}] {time.monotonic() - began:.1f} s of {share_s:.0f}; {b.left_s:.0f} left", flush=True)
    await b.stop()


def _external(url: str) -> list[str]:
    return [
        "--engine",
        "external",
        "--rollout-external-engine-addrs",
        url.removeprefix("http://"),
        "--num-generation-workers",
        "1",
    ]


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("tails", "long"), default="tails")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument(
        "--models", default="/dev/shm/gpu-bench-models", help="folder for weights (default %(default)s)"
    )
    parser.add_argument("--before", default=str(parts.REPO / ".gpu" / "before.tar.gz"), help="the older commit's code")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument(
        "--server-args", default="{}", help="further SGLang flags as JSON, names without dashes in front"
    )
    parser.add_argument("--budget-s", type=float, default=530.0)
    parser.add_argument("--shape", choices=sorted(parts.SHAPES), default="0.6b")
    parser.add_argument("--variants", nargs="+", choices=list("abcedfg"), default=list("abced"))
    parser.add_argument("--steps", type=int, default=14, help="training steps that count")
    parser.add_argument("--warm", type=int, default=4, help="training steps before them")
    parser.add_argument("--slots", type=int, default=384, help="samples at once, at most")
    parser.add_argument("--mean-tokens", type=float, default=650.0)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument(
        "--columns", default=str(parts.REPO / ".gpu" / "columns"), help="model of long (default %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of long")
    parser.add_argument("--long-steps", type=int, default=40)
    parser.add_argument("--long-slots", type=int, default=128)
    parser.add_argument("--long-flags", default="[]", help="further flags of miles-async train, as a JSON list")
    parser.add_argument("--only", nargs="*", help="only these runs of long")
    parser.add_argument("--fused", action="store_true", help="tails: all but a draw by our sampler")
    args = parser.parse_args()
    b = Bench(args)
    asyncio.run((tails if args.task == "tails" else long)(b))
    result = json.loads((b.out / f"{args.task}.json").read_text())
    brief = {
        name: {k: v for k, v in run.items() if isinstance(v, int | float | str)} for name, run in result["runs"].items()
    }
    print(
        json.dumps({**{k: v for k, v in result.items() if k not in ("runs", "machine")}, "runs": brief}, indent=1)[
            -10_000:
        ]
    )
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
