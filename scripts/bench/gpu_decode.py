"""Where the time of a decode step goes: tokens/s of a full SGLang engine at long-tailed lengths, and the kernels of a step.

    python -m scripts.bench gpu_decode --out DIR [--variants shipped interval-128] [--running 384 106] [--budget-s 270]

One GPU, random weights of a real shape. A variant with other flags than the one before is a server of its own. Requests are
streamed as a worker streams them, with stop tokens that make lengths geometric, and as many run at every moment; the first ones
begin with what they would have made so far, so that their ages are right from the first second. `fused` is what
--sglang-fused-sampling does, on the same server; with --fused all variants but `shipped` have it.
DIR/decode.json, written anew after each measurement: tokens/s in a steady window, then a profile of decode steps (SGLang's
/start_profile): milliseconds a step by kernel, what the GPU idles and how long the scheduler waits for it, both of steps without
a prefill (`--profiles cpu-gpu` adds the CPU's operators, which slow the steps that they measure); and log-probs beside a
teacher-forced pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from actors.generation.engines.sglang.calls import Calls
from actors.generation.engines.sglang.inside_client import Inside
from scripts.bench import gpu_parts as parts
from scripts.bench import gpu_tails_read as read
from scripts.bench.gpu_bench import GPU_ARGS
from scripts.bench.gpu_decode_load import Load, idle
from scripts.bench.gpu_decode_read import agreement, steps_of

ACTIVITIES = {"gpu": ["GPU"], "cpu-gpu": ["CPU", "GPU"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "fused": {},
    "interval-128": {"stream-interval": 128},
    "no-radix": {"disable-radix-cache": True},
    "page-64": {"page-size": 64},
    "page-128": {"page-size": 128},
    "kv-fp8": {"kv-cache-dtype": "fp8_e4m3"},
    "flashinfer": {"decode-attention-backend": "flashinfer"},
}


async def fuse(url: str, inside: str) -> None:
    """Have a server draw by our sampler."""
    calls = Calls(url, deadline_s=90)
    try:
        ours = Inside(Path(inside), calls.post)
        ours.hear(await calls.get("/server_info"))
        if not await ours.draw():
            raise RuntimeError("the server does not draw by our sampler; the line before says why")
    finally:
        await calls.close()


async def measure(a: argparse.Namespace, load: Load, found: dict[str, Any], name: str, left_s: float) -> None:
    """Tokens/s and profiles of one server under one load, into `found` as soon as they are known."""
    await load.full(left_s)
    await asyncio.sleep(a.warm_s)
    found |= await load.tokens_per_s(a.window_s)
    for kind in a.profiles:
        try:
            with TemporaryDirectory() as folder:
                found[kind] = steps_of(await load.profile(Path(folder), ACTIVITIES[kind]))
                for trace in Path(folder).glob("*.gz"):
                    shutil.copy(trace, Path(a.out) / f"{name}-{kind}.trace.json.gz")
        except Exception as error:  # noqa: BLE001 - the speed is measured, and the other profiles may succeed
            found[kind] = {"failed": f"{type(error).__name__}: {error}"[:500]}


class Bench:
    """One call: its results, the time that is left, the server that runs."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.end = a, time.monotonic() + a.budget_s
        self.out, self.scratch = Path(a.out), Path(mkdtemp(prefix="gpu-decode-"))
        for folder in (self.out, Path(a.models)):
            folder.mkdir(parents=True, exist_ok=True)
        self.vocab = int((parts.QWEN3 | parts.SHAPES[a.shape])["vocab_size"])
        self.stops = read.stop_ids(a.mean_tokens, a.new_tokens, self.vocab)
        self.rows: dict[str, dict[str, Any]] = {name: {} for name in a.variants}
        self._server = AsyncExitStack()
        self._fused = False  # the server that runs draws by our sampler
        self._up: tuple[dict[str, Any], str, dict[str, Any]] | None = None  # flags, URL, facts

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def save(self) -> None:
        done = not any("failed" in row for row in self.rows.values())
        result = {"complete": done, "command": sys.argv[1:], "shape": self.a.shape, "stop_ids": len(self.stops)}
        (self.out / "decode.json").write_text(json.dumps(result | {"variants": self.rows} | parts.facts_of_machine(), indent=1))
        for log in self.scratch.glob("*/boot.*/log"):
            (self.out / f"{log.parent.parent.name}.{log.parent.name}.log").write_text(log.read_text(errors="replace")[-200_000:])

    async def server(self, model: Path, name: str) -> tuple[str, dict[str, Any]]:
        """A server of a variant: the one that runs, if it has the same flags and nothing failed on it."""
        a, gpu = self.a, self.a.gpu >= 0
        flags = (GPU_ARGS | {"mem-fraction-static": 0.8} if gpu else {}) | json.loads(a.server_args) | VARIANTS[name]
        if self._up is None or self._up[0] != flags or (self._fused and name == "shipped"):
            await self.stop()
            if self.left_s < a.boot_s + a.warm_s + a.window_s + 10:
                raise TimeoutError(f"not begun: {self.left_s:.0f} s left")
            made = parts.server(a.engine, model, self.scratch / name, args=flags if a.engine == "sglang" else {},
                                max_running=max(a.running), gpus=(a.gpu,) if gpu else ())  # fmt: skip
            async with asyncio.timeout(self.left_s):
                self._up = (flags, *await self._server.enter_async_context(made))
        return self._up[1:]

    async def stop(self) -> None:
        self._up, self._fused = None, False
        await self._server.aclose()

    async def variant(self, model: Path, name: str) -> None:
        a, row = self.a, self.rows[name]
        url, facts = await self.server(model, name)
        row |= {key: facts[key] for key in ("args", "boot_s", "note", "events")}
        if name == "fused" or (a.fused and name != "shipped"):
            await fuse(url, facts["inside"])
            self._fused = True
        for running in a.running if name in (a.variants[0], "fused") else a.running[:1]:
            if self.left_s < a.warm_s + a.window_s + 5:
                raise TimeoutError(f"{running} running not begun: {self.left_s:.0f} s left")
            sizes = {"prompt_tokens": a.prompt_tokens, "new_tokens": a.new_tokens}
            row[f"running {running}"] = found = dict[str, Any]()
            async with asyncio.timeout(self.left_s), Load(url, running, self.vocab, self.stops, **sizes) as load:
                await measure(a, load, found, f"{name}-{running}", self.left_s)
            await idle(url)
            self.save()
            print(name, running, json.dumps(found)[:2000], flush=True)
        prompts = parts.prompts(min(32, max(a.running)), a.prompt_tokens, self.vocab, 7)
        row["logprobs"] = await agreement(url, prompts, min(256, a.new_tokens // 2))


async def run(a: argparse.Namespace) -> int:
    b = Bench(a)
    model = await asyncio.to_thread(parts.make_model, Path(a.models), a.shape, 0)
    try:
        for name, row in b.rows.items():
            try:
                await b.variant(model, name)
            except Exception as error:  # noqa: BLE001 - whatever it was, the other variants go on
                traceback.print_exc()
                row["failed"] = f"{type(error).__name__}: {error}"[:1500]
                await b.stop()
            b.save()
    finally:
        await b.stop()
    return 1 if any("failed" in row for row in b.rows.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--models", default="/dev/shm/gpu-bench-models", help="folder for random weights (default %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["shipped"])
    parser.add_argument(
        "--running",
        nargs="+",
        type=int,
        default=[384, 106],
        help="requests at once; the first variant runs under each, others under the first",
    )
    parser.add_argument("--fused", action="store_true", help="next tokens are drawn by our sampler")
    parser.add_argument("--profiles", nargs="*", choices=list(ACTIVITIES), default=["gpu"])
    parser.add_argument("--shape", choices=sorted(parts.SHAPES), default="0.6b")
    parser.add_argument("--mean-tokens", type=float, default=667.0)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--warm-s", type=float, default=4.0)
    parser.add_argument("--window-s", type=float, default=10.0)
    parser.add_argument(
        "--boot-s", type=float, default=45.0, help="what a boot may take, for the choice whether to begin a variant"
    )
    parser.add_argument("--budget-s", type=float, default=270.0)
    parser.add_argument("--gpu", type=int, default=0, help="-1: none, for a rehearsal")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--server-args", default="{}", help="further SGLang flags as JSON, names without dashes in front")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
