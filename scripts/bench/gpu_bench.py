"""Measures engine, bus, router, weight updates and recovery on real GPUs, with random weights of real shapes.

    python -m scripts.bench gpu_bench STEP [STEP ...] --out DIR [--shape 0.6b] [--budget-s 560] [--again]

Steps: throughput disk ipc boundary kill logprobs deterministic tuning memory conformance fp8 colocate repeat; those that need two
GPUs (the trainer on --gpu, the engine on the next): nccl e2e exact lost recipes parallel. Each writes DIR/STEP.json as soon as it
has a number, is left out when that file is complete, and does not begin when the budget is short: run the command again until
it says that all is there. `--engine embedded --shape tiny` rehearses everything without a GPU. Needs no network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from scripts.bench import command, gpu_e2e, gpu_exact, gpu_memory, gpu_publish, gpu_speed
from scripts.bench import gpu_parts as parts

GPU_ARGS: dict[str, Any] = {
    "attention-backend": "fa3",
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.5,
    "cuda-graph-max-bs": 512,
}


class Bench:
    """One call: what was asked, where results go, how much time is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(mkdtemp(prefix="gpu-bench-"))
        self.models = Path(args.models)
        self.models.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + args.budget_s
        self._servers = AsyncExitStack()
        self._wanted: tuple[Path, tuple[int, ...], str] | None = None
        self._running: tuple[str, dict[str, Any]] = ("", {})
        self.vocab = int((parts.QWEN3 | parts.SHAPES[args.shape])["vocab_size"])

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def model(self, seed: int = 0) -> Path:
        return parts.make_model(self.models, self.args.shape, seed)

    def engine_args(self, **changes: Any) -> dict[str, Any]:
        base = {} if self.args.engine == "embedded" else dict(GPU_ARGS)
        return base | json.loads(self.args.server_args) | {k.replace("_", "-"): v for k, v in changes.items()}

    @asynccontextmanager
    async def server(
        self, model: Path, name: str, gpus: tuple[int, ...] | None = None, **changes: Any
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """A server of this bench's kind on `gpus` (default: --gpu). It outlives the step if that went well, for a next one
        that asks for the same; its weights are then those of the last update."""
        if gpus is None:
            gpus = () if self.args.engine == "embedded" else (self.args.gpu,)
        wanted = (model, gpus, json.dumps(self.engine_args(**changes), default=str))
        if self._wanted != wanted:
            await self.stop_server()
            made = parts.server(
                self.args.engine, model, self.scratch / name, args=self.engine_args(**changes),
                max_running=self.args.max_running, gpus=gpus,
            )  # fmt: skip
            self._running = await self._servers.enter_async_context(made)
            self._wanted = wanted
            while self.args.hold and not self.args.hold.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        try:
            yield self._running
        except BaseException:
            await self.stop_server()
            raise

    async def stop_server(self) -> None:
        """End the server that runs, if any."""
        self._wanted = None
        await self._servers.aclose()

    def save(self, step: str, values: dict[str, Any], *, done: bool) -> None:
        """Write what is known of a step."""
        file = self.out / f"{step}.json"
        head = {
            "step": step,
            "complete": done,
            "command": command(),
            "shape": self.args.shape,
            "engine": self.args.engine,
        }
        file.write_text(json.dumps(head | values | {"machine": parts.facts_of_machine()}, indent=2, default=str))
        print(f"[{step}] {json.dumps(values, default=str)[:1500]}", flush=True)

    def found(self, step: str) -> dict[str, Any]:
        """The runs of a step that an earlier call has finished: name -> figures; none with --again."""
        try:
            return {} if self.args.again else dict(json.loads((self.out / f"{step}.json").read_text())["runs"])
        except (OSError, ValueError, KeyError):
            return {}

    def save_logs(self) -> None:
        """The ends of all logs, for whoever asks why a step failed or was slow."""
        with (self.out / "logs.txt").open("w") as out:
            for file in sorted([*self.scratch.rglob("log"), *self.scratch.rglob("*.log")]):
                lines = [line for line in file.read_text(errors="replace").splitlines(True) if '"POST /' not in line]
                out.write(f"\n===== {file.relative_to(self.scratch)}\n{''.join(lines)[-100_000:]}")


async def kill(b: Bench) -> None:
    """kill -9 of the server in mid-run: every sample still ends once; how long until tokens are made again."""
    from actors.partial.actor import PartialSpec

    a = b.args
    n = 2 * a.concurrent
    model = b.model()
    await b.stop_server()
    async with parts.house(b.scratch / "kill", concurrent=a.concurrent, partial_save_tokens=64) as house:
        await house.actor("partial", "partial", PartialSpec())
        await house.worker(
            "generation-0", engine=a.engine, model_path=str(model), server_args=b.engine_args(), max_running=a.max_running,
            gpus=() if a.engine == "embedded" else (a.gpu,),
        )  # fmt: skip
        await house.wait_for("joined", 1, 400)
        await house.order(1, model)
        await house.wait_for("activated", 1, 60)
        await house.feed("kill", parts.prompts(n, a.prompt_tokens, b.vocab, 9), a.new_tokens)
        await asyncio.sleep(a.settle_s)
        pid = _server_pid(house.children["generation-0"].pid)
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        collecting = asyncio.create_task(house.collect(n, 420))
        joined = (await house.wait_for("joined", 2, 400))[-1].wall
        await house.order(1, model)
        active = (await house.wait_for("activated", 2, 120))[-1].wall
        stalled = (await house.events("engine stalled"))[-1].wall
        rollouts = [rollout for _, rollout in await collecting]
        names = [rollout.task.sample_id for rollout in rollouts]
        b.save(
            "kill",
            {"samples": n, "finished": len(names), "finished_once": len(set(names)), "noticed_s": round(stalled - killed, 3),
             "server_back_s": round(joined - killed, 2), "serving_again_s": round(active - killed, 2),
             "samples_resumed_from_a_prefix": sum(r.resumed_tokens > 0 for r in rollouts),
             "tokens_kept": sum(r.resumed_tokens for r in rollouts)},
            done=True,
        )  # fmt: skip


def _server_pid(worker: int) -> int:
    """The worker's child: its engine's server."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    return int(children[0])


# step -> what runs it, seconds it needs at least
STEPS: dict[str, tuple[Callable[[Bench], Awaitable[None]], float]] = {
    "throughput": (gpu_speed.throughput, 90.0),
    "disk": (gpu_publish.disk, 60.0),
    "ipc": (gpu_publish.ipc, 60.0),
    "boundary": (gpu_exact.boundary, 170.0),
    "kill": (kill, 160.0),
    "logprobs": (gpu_exact.logprobs, 170.0),
    "deterministic": (gpu_exact.deterministic, 130.0),
    "tuning": (gpu_speed.tuning, 150.0),
    "memory": (gpu_memory.memory, 40.0),
    "conformance": (gpu_memory.conformance, 90.0),
    "fp8": (gpu_memory.fp8, 120.0),
    "nccl": (gpu_publish.nccl, 200.0),
    "e2e": (gpu_e2e.e2e, 300.0),
    "colocate": (gpu_e2e.colocate, 240.0),
    "exact": (gpu_e2e.exact, 200.0),
    "repeat": (gpu_e2e.repeat, 100.0),
    "lost": (gpu_e2e.lost, 200.0),
    "recipes": (gpu_e2e.recipes, 300.0),
    "parallel": (gpu_e2e.parallel, 150.0),
}
TWO_GPUS = ("nccl", "e2e", "exact", "lost", "recipes", "parallel")
ONE_GPU = [step for step in STEPS if step not in TWO_GPUS]


def complete(out: Path, step: str) -> bool:
    """Whether a step's result is there and whole."""
    try:
        return bool(json.loads((out / f"{step}.json").read_text())["complete"])
    except (OSError, ValueError, KeyError):
        return False


async def run(b: Bench, steps: list[str]) -> int:
    failed = 0
    for step in steps:
        body, needs_s = STEPS[step]
        if complete(b.out, step) and not b.args.again:
            print(f"[{step}] is there already")
            continue
        if b.args.e2e_runs:
            needs_s = min(needs_s, 90.0 * len(b.args.e2e_runs))
        if b.left_s < (needs_s if b.args.engine == "sglang" else 0):
            print(f"[{step}] not begun: {b.left_s:.0f} s left, it needs {needs_s:.0f} s; run the same command again")
            continue
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(1.0, b.left_s)):
                await body(b)
        except Exception as error:  # noqa: BLE001 - the other steps go on; this one's file says why it is missing
            failed += 1
            runs = b.found(step)
            b.save(step, {**({"runs": runs} if runs else {}), "failed": f"{type(error).__name__}: {error}"[:2000]}, done=False)
            traceback.print_exc()
        print(f"[{step}] took {time.monotonic() - began:.1f} s", flush=True)
    await b.stop_server()
    b.save_logs()
    missing = [step for step in steps if not complete(b.out, step)]
    print(f"missing: {', '.join(missing)}" if missing else "all there", flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps",
        nargs="*",
        default=ONE_GPU,
        metavar="STEP",
        help=f"of {', '.join(STEPS)} (default: all that need one GPU)",
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--models", default="/dev/shm/gpu-bench-models", help="folder for random weights (default %(default)s)")
    parser.add_argument("--shape", choices=sorted(parts.SHAPES), default="0.6b")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--server-args", default="{}", help="further SGLang flags as JSON, names without dashes in front")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=5)
    loads = ("idle", "loaded", "in_place")
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads, help="what engines do meanwhile (in_place: as loaded)")
    parser.add_argument("--bucket-mib", type=int, default=2048, help="largest bucket of ipc and nccl")
    parser.add_argument("--e2e-runs", nargs="*", help="only these runs of e2e (default: all, with the ratios)")
    parser.add_argument("--train-steps", type=int, default=10, help="training steps of each run of e2e")
    parser.add_argument("--train-flags", default="", help="of train, in one word: what every run of e2e is given besides")
    parser.add_argument("--kinds", nargs="+", choices=gpu_speed.KINDS, default=gpu_speed.KINDS, help="what throughput compares")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=sorted(gpu_speed.VARIANTS),
        default=list(gpu_speed.VARIANTS),
        help="what tuning compares",
    )
    parser.add_argument("--hold", type=Path, help="once the first server is up, wait for this file: boots of benches may overlap")
    parser.add_argument("--settle-s", type=float, default=0.8, help="time before something happens in mid-sample")
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--again", action="store_true", help="measure what is there already")
    args = parser.parse_args()
    unknown = [step for step in args.steps if step not in STEPS]
    if unknown:
        parser.error(f"no step {unknown[0]!r}; steps are {', '.join(STEPS)}")
    return asyncio.run(run(Bench(args), args.steps))


if __name__ == "__main__":
    sys.exit(main())
