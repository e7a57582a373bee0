"""What a lane for the tail costs and gains: real bus, workers and partial room; engines whose time per token rises with the batch.

    python -m scripts.bench tail --workers 4 --slots 48 --lengths heavy --tail-slots 12 --tail-after 2000 --seconds 60

A token of one request takes ALPHA_S + SHRUNK * BETA_S * running seconds: 48 slots here are 384 on an H200 with Qwen3-0.6B, to
which ALPHA_S and BETA_S were fitted (384 running: 45k tokens/s), and one process can play the engines. Prompts never run
out, or with --wave come so many at a time, every so many seconds: then what runs rises and falls. Prints one JSON object: tokens/s
of all engines, requests running on each, seconds from a sample's first request to its end, and how much one request more slows
the others, by what the samples tell and as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from actors.generation.actor import Worker
from actors.generation.engine import Chunk, EngineHealth, EngineLoad, GenerateRequest
from actors.generation.spec import GenerationSpec
from actors.partial.actor import PartialBuffer, PartialSpec
from actors.runtime.context import Context
from actors.trainer.spread import PACE, RUNNING, pace_of
from bus import Bus, BusConfig, Commit, Out, Reader
from bus.knobs.live import LiveKnobs, publish_initial
from bus.messages.active import Activate, PolicyActive
from bus.messages.base import pack_ints
from bus.messages.policy import WeightManifest
from bus.messages.samples import RolloutDone, SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.server import EmbeddedRedis
from bus.topology import ACTIVE, PROMPTS, ROLLOUTS
from tests.bus.suite.knobs import plain_kinds, plain_knobs
from tests.declared import actor_of

ALPHA_S, BETA_S, SHRUNK = 0.00287, 1.479e-5, 8
PREFILL_S = 5e-6 * SHRUNK  # of the whole engine, per prompt or prefix token
TICK_S, CHUNK, MEAN = 0.05, 64, 660
VERSION = PolicyVersion(id=1, step=1)


def length_of(kind: str, number: int) -> int:
    """Geometric with a mean of 660, cut at 2,048; or heavy: 2 % of them ten times as long, cut at 8,192."""
    draw = random.Random(f"length/{number}")
    length = 1 + int(draw.expovariate(1 / MEAN))
    if kind == "heavy":
        return min(8192, length * (10 if draw.random() < 0.02 else 1))
    return min(2048, length)


class Played:
    """One engine. All its requests take a step together."""

    counts_when_receiving = False

    def __init__(self) -> None:
        self.tokens = self.ticks = self.sum_running = 0.0
        self.first_s: dict[str, float] = {}
        self._running: dict[str, tuple[list[float], asyncio.Event]] = {}
        self._debt_s = 0.0

    async def play(self) -> None:
        """Until cancelled: every TICK_S each request gets the tokens of that time."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            spent = now - before
            before, paid = now, min(self._debt_s, spent)
            self._debt_s -= paid
            made = (spent - paid) / (ALPHA_S + SHRUNK * BETA_S * len(self._running))
            self.ticks += 1
            self.sum_running += len(self._running)
            for state, wake in self._running.values():
                step = min(made, state[1] - state[0])
                state[0] += step
                self.tokens += step
                if state[0] >= state[1] - 1e-6 or state[0] - state[2] >= CHUNK:
                    wake.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.first_s.setdefault(request.rid, time.monotonic())
        self._debt_s += PREFILL_S * len(request.input_ids)
        state, wake = [0.0, float(request.max_new_tokens), 0.0], asyncio.Event()
        self._running[request.rid] = (state, wake)
        try:
            while state[2] < request.max_new_tokens:
                await wake.wait()
                wake.clear()
                whole = state[0] >= state[1] - 1e-6
                new = int((state[1] if whole else state[0]) - state[2])
                state[2] += new
                yield Chunk([5] * new, [-0.5] * new, "1", "length" if whole else None)
        finally:
            del self._running[request.rid]

    async def health(self) -> EngineHealth:
        return EngineHealth("1", "played")

    async def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._running))

    async def info(self) -> dict[str, Any]:
        return {"version": "embedded"}

    async def abort(self, rid: str) -> None:
        if rid in self._running:
            state, wake = self._running[rid]
            state[1] = max(state[0], state[2])
            wake.set()

    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...
    async def end_running(self, patience_s: float) -> None: ...
    async def set_version(self, version: str) -> None: ...
    async def update_weights_from_disk(self, path: str, version: str) -> None: ...
    async def close(self) -> None: ...

    async def flush(self) -> bool:
        return True

    async def pause_counted(self, version: str) -> int | None:
        return None

    def count_as_older(self, version: str) -> bool:
        return False


async def bench(args: argparse.Namespace, url: str, home: Path) -> dict[str, Any]:
    knobs = plain_knobs(
        rollout_max_response_len=8193, partial_rollout=True, partial_save_tokens=1 << 30, sglang_server_concurrency=args.slots,
        tail_slots=args.tail_slots, tail_after_tokens=args.tail_after,
    )  # fmt: skip
    engines = {f"w{i}": Played() for i in range(args.workers)}
    contexts: dict[str, Context] = {}
    async with AsyncExitStack() as stack:
        config = BusConfig(url=url, run="tail", blob_dir=str(home / "blobs"), lease_s=60.0)
        bus = await stack.enter_async_context(Bus(config))
        await bus.make_readers()
        await publish_initial(bus, knobs, plain_kinds())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        async def start(name: str, role: str) -> Context:
            live = LiveKnobs(bus)
            await live.open()
            return Context(actor_of(name=name, role=role, bus=config, drain_timeout_s=5.0), bus, live)

        background = [tasks.create_task(engine.play()) for engine in engines.values()]
        for name, engine in engines.items():
            contexts[name] = await start(name, "generation")
            spec = GenerationSpec(engine="external", engine_url="played", max_running=args.slots, verify_checksum=False)
            worker = Worker(contexts[name], spec)
            worker._link._connect = lambda url, inside, engine=engine: engine  # type: ignore[misc]
            background.append(tasks.create_task(worker.run()))
            while worker._link.engine is None:  # noqa: ASYNC110 - a person would look again too
                await asyncio.sleep(0.05)
        background.append(tasks.create_task(PartialBuffer(await start("partial", "partial"), PartialSpec()).run()))
        await bus.append([Out(ACTIVE, Activate(version=VERSION, manifest=WeightManifest(path=str(home))))])
        while any(context.version != 1 for context in contexts.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await bus.append([Out(ACTIVE, PolicyActive(version=VERSION, serving=dict.fromkeys(engines, 1)))])
        result = await measure(args, bus, engines)
        result["parked"] = sum(c.counters.get("parked/tail", 0) for c in contexts.values())
        result["taken elsewhere"] = sum(c.counters.get("tail/elsewhere", 0) for c in contexts.values())
        for task in background:
            task.cancel()
    return result


async def measure(args: argparse.Namespace, bus: Bus, engines: dict[str, Played]) -> dict[str, Any]:
    """Feed, take what is done, and count from the end of the warm-up on."""
    reader = Reader(bus, [ROLLOUTS], "reward", "bench")
    await reader.open()
    issued = 0
    lives: list[tuple[int, float]] = []
    told: list[RolloutDone] = []
    next_wave = 0.0
    begin = time.monotonic() + args.warm
    end = begin + args.seconds
    started = False
    while time.monotonic() < end:
        if not started and time.monotonic() > begin:
            started, lives = True, []
            for engine in engines.values():
                engine.tokens = engine.ticks = engine.sum_running = 0.0
        if time.monotonic() > next_wave if args.wave else await bus.length(PROMPTS) < 2 * args.slots * args.workers:
            n, next_wave = args.wave or 256, time.monotonic() + args.every
            await bus.append([Out(PROMPTS, task_of(args.lengths, issued + i)) for i in range(n)])
            issued += n
        for entry in await reader.read(256, TICK_S):
            message = await bus.message(entry)
            if isinstance(message, RolloutDone):
                told.append(message)
                rid = message.task.sample_id
                first = min(e.first_s[rid] for e in engines.values() if rid in e.first_s)
                lives.append((message.response.n_tokens, time.monotonic() - first))
            await bus.commit(Commit(ack=(entry,)))
            reader.forget([entry])
    await reader.close()
    seconds = sorted(s for _, s in lives)
    pace = pace_of(told)
    slope = pace.get(f"{PACE}/per_running", 0.0)
    alone = pace.get(f"{PACE}/mean", 0.0) - slope * pace.get(f"{RUNNING}/mean", 0.0)
    longest = sorted(s for n, s in lives if n >= max(n for n, _ in lives) * 0.9)
    return {
        "tokens_per_s": round(sum(e.tokens for e in engines.values()) / args.seconds),
        "running": [round(e.sum_running / e.ticks) for e in engines.values()],
        "samples": len(lives),
        "slowdown a request, told and true": [round(slope / alone, 4) if alone else None, round(SHRUNK * BETA_S / ALPHA_S, 4)],
        "seconds p50 p99 most": [round(seconds[int(q * (len(seconds) - 1))], 1) for q in (0.5, 0.99, 1.0)],
        "longest 10 % of the length: seconds, mean": round(sum(longest) / len(longest), 1),
    }


def task_of(kind: str, number: int) -> SampleTask:
    """One sample, with its length as its limit."""
    sampling = Sampling(max_new_tokens=length_of(kind, number), seed=number)
    return SampleTask(
        sample_id=f"g{number}/0", group_id=f"g{number}", index=0, n_samples=1, prompt_id=f"p{number}",
        prompt_tokens=pack_ints(range(64)), sampling=sampling, step=1,
    )  # fmt: skip


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=48, help="of a worker")
    parser.add_argument("--lengths", choices=("geometric", "heavy"), default="heavy")
    parser.add_argument("--tail-slots", type=int, default=0)
    parser.add_argument("--tail-after", type=int, default=0)
    parser.add_argument("--wave", type=int, default=0, help="prompts at a time; 0: they never run out")
    parser.add_argument("--every", type=float, default=9.0, help="seconds from one wave to the next")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds before that")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        server = EmbeddedRedis(Path(home))
        server.start()
        try:
            print(json.dumps({**vars(args), **asyncio.run(bench(args, server.url, Path(home)))}))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
