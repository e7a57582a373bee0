"""CPU of a generation worker per sample beside a hand-written asyncio loop that streams from the same engine.

    python -m scripts.bench worker --out worker.json

The engine is a stand-in in a process of its own: it speaks SGLang's HTTP with chunks made beforehand, and gives each of its
requests the next chunk at every tick (`--tick-ms 0`: as fast as the sockets take them; then a client that falls behind gets
several chunks at once). The hand-written loop is the least that anyone would write: aiohttp, `json.loads`, two lists, no bus.
The worker is the real room on a real redis-server. Both run on uvloop, with as many samples at once, in turn within each
repetition; what counts is the CPU time of the measured process, after a warm-up, so a shared machine changes it little.
Measured processes run on the first core, engine and Redis on the others.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import os
import platform
import pstats
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from actors.generation.actor import run as run_worker
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from actors.runtime.loop import run_loop
from actors.runtime.run import EXIT_DONE, run_actor
from bus import Bus, BusConfig, Out
from bus.knobs.live import publish_initial
from bus.messages.active import Activate
from bus.messages.base import pack_ints
from bus.messages.policy import WeightManifest
from bus.messages.samples import SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.server import EmbeddedRedis, find_server
from bus.topology import ACTIVE, PROMPTS
from scripts.bench.worker_engine import CHUNK, PROMPT_TOKENS, serve
from tests.bus.suite.knobs import plain_kinds, plain_knobs
from tests.declared import actor_of

WARM = 0.25  # of the samples, before the clock starts
BAR = 0.8
SAVE_TOKENS = 512  # --partial-save-tokens as it is by default

# -- the measured processes ------------------------------------------------------------------------------------------


async def gauge(done: Callable[[], float], n: int) -> dict[str, float]:
    """CPU microseconds per sample between a warm-up and the last sample but those that run out alone."""
    while done() < WARM * n:  # noqa: ASYNC110 - it looks on from outside
        await asyncio.sleep(0.01)
    cpu, wall, first = time.process_time(), time.monotonic(), done()
    while done() < 0.95 * n:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    made = done() - first
    return {
        "cpu_us": (time.process_time() - cpu) / made * 1e6,
        "samples_per_s": made / (time.monotonic() - wall),
    }


async def by_hand(url: str, n: int, tokens: int, at_once: int) -> dict[str, float]:
    """The hand-written loop."""
    finished = 0

    async def one(session: aiohttp.ClientSession, rid: int) -> None:
        nonlocal finished
        body = {
            "rid": str(rid), "input_ids": list(range(PROMPT_TOKENS)), "return_logprob": True, "stream": True,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens},
        }  # fmt: skip
        ids: list[int] = []
        logprobs: list[float] = []
        async with session.post(f"{url}/generate", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data:") or line == b"data: [DONE]\n":
                    continue
                meta = json.loads(line[5:])["meta_info"]
                for logprob, token, _ in meta["output_token_logprobs"]:
                    ids.append(token)
                    logprobs.append(logprob)
        assert len(ids) == len(logprobs) == tokens
        finished += 1

    async def slot(session: aiohttp.ClientSession, numbers: Any) -> None:
        for rid in numbers:
            await one(session, rid)

    numbers = iter(range(n))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20) as session:
        slots = [asyncio.create_task(slot(session, numbers)) for _ in range(at_once)]
        found = await gauge(lambda: finished, n)
        await asyncio.gather(*slots)
    return found


async def worker(url: str, bus_url: str, run: str, name: str, n: int) -> dict[str, float]:
    """The real room, as its process runs it, until `n` samples are committed here."""
    found: dict[str, float] = {}

    async def body(context: Context, spec: GenerationSpec) -> None:
        async with asyncio.TaskGroup() as tasks:
            room = tasks.create_task(run_worker(context, spec))
            found.update(await gauge(lambda: context.counters.get("samples", 0), n))
            context.draining.set()
            await room

    spec = GenerationSpec(engine="external", engine_url=url)
    actor = actor_of(name=name, role="generation", bus=BusConfig(url=bus_url, run=run))
    if await run_actor(actor, spec, body) != EXIT_DONE:
        raise RuntimeError("the worker did not end well")
    return found


# -- the run ---------------------------------------------------------------------------------------------------------


async def fill(bus_url: str, run: str, n: int, tokens: int, at_once: int) -> None:
    """A run with `n` samples to generate and a version to serve."""
    knobs = plain_knobs(sglang_server_concurrency=at_once, partial_rollout=True, partial_save_tokens=SAVE_TOKENS)
    async with Bus(BusConfig(url=bus_url, run=run)) as bus:
        await bus.make_readers()
        await publish_initial(bus, knobs, plain_kinds())
        prompt = pack_ints(range(PROMPT_TOKENS))
        tasks = [
            SampleTask(
                sample_id=f"g{i // 8:07d}/{i % 8}", group_id=f"g{i // 8:07d}", index=i % 8, n_samples=8, prompt_id=f"p{i}",
                prompt_tokens=prompt, label="42", sampling=Sampling(max_new_tokens=tokens, seed=i),
            )
            for i in range(n)
        ]  # fmt: skip
        await bus.append([Out(PROMPTS, task) for task in tasks])


async def order(bus_url: str, run: str, workers: int) -> None:
    """Version 1 for the workers, once all are there."""
    async with Bus(BusConfig(url=bus_url, run=run)) as bus:
        async with asyncio.timeout(60):
            while len(await bus.hash_of(bus.keys.vitals)) < workers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        activate = Activate(version=PolicyVersion(id=1, step=0), manifest=WeightManifest(path="/nowhere"), mode="in_place")
        await bus.append([Out(ACTIVE, activate)])


async def forget(bus_url: str, run: str) -> None:
    async with Bus(BusConfig(url=bus_url, run=run)) as bus:
        await bus.forget_run()


def pinned(first: bool) -> Callable[[], None]:
    """For the child: on the first core, or on all others."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[:1] if first or len(cores) == 1 else cores[1:]
    return lambda: os.sched_setaffinity(0, chosen)


def child(*words: str, measured: bool) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "scripts.bench.worker", *words]
    return subprocess.Popen(argv, preexec_fn=pinned(measured), stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"a measured process ended with {process.returncode}")
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def measure(kind: str, url: str, bus_url: str, n: int, tokens: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """One figure per measured process: "hand", "worker", or "workers" (two of them, which share 2 n samples)."""
    profile = ["--profile"] if args.profile else []
    common = ("--url", url, "--tokens", str(tokens), "--at-once", str(args.at_once), *profile)
    if kind == "hand":
        return [result_of(child("hand", *common, "--samples", str(n), measured=True))]
    run, workers = f"w-{uuid4().hex[:8]}", 2 if kind == "workers" else 1
    asyncio.run(fill(bus_url, run, int(workers * n * 1.25), tokens, args.at_once))
    children = [
        child("worker", *common, "--samples", str(n), "--bus", bus_url, run, f"generation-{i}", measured=True)
        for i in range(workers)
    ]
    try:
        asyncio.run(order(bus_url, run, workers))
        return [result_of(process) for process in children]
    finally:
        for process in children:
            process.kill()
        asyncio.run(forget(bus_url, run))


def bench(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    lengths = ",".join(map(str, args.lengths))
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        server = EmbeddedRedis(Path(home))
        server.start()
        engine = child("engine", "--url", str(port), "--tick-ms", str(args.tick_ms), "--lengths", lengths, measured=False)
        pin_server(Path(home))
        try:
            time.sleep(1.0)
            for tokens in args.lengths:
                n = max(400, int(args.samples * args.lengths[0] / tokens))
                runs: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in args.kinds}
                for rep in range(args.reps):
                    for kind in args.kinds:
                        runs[kind].append(measure(kind, url, server.url, n, tokens, args))
                        mean = statistics.mean(one["cpu_us"] for one in runs[kind][-1])
                        print(f"  {tokens} tokens, {rep}: {kind} {mean:,.0f} us a sample", file=sys.stderr, flush=True)
                rows.append(row_of(tokens, n, runs))
        finally:
            engine.kill()
            engine.wait()
            server.stop()
    return {
        "date": date.today().isoformat(), "python": platform.python_version(), "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("aiohttp", "msgspec", "redis", "hiredis", "uvloop")},
        "server": ".".join(map(str, find_server().version)), "chunk_tokens": CHUNK, "prompt_tokens": PROMPT_TOKENS,
        "at_once": args.at_once, "tick_ms": args.tick_ms, "reps": args.reps, "rows": rows,
    }  # fmt: skip


def pin_server(home: Path) -> None:
    """Redis off the measured core."""
    with suppress(OSError, ValueError):
        pid = int((home / "redis" / "redis.pid").read_text())
        os.sched_setaffinity(pid, sorted(os.sched_getaffinity(0))[1:] or [0])


def row_of(tokens: int, n: int, runs: dict[str, list[list[dict[str, float]]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "samples": n}
    for kind, found in runs.items():
        each = [one["cpu_us"] for rep in found for one in rep]
        row[kind] = {
            "cpu_us": statistics.median(each), "spread_us": [min(each), max(each)],
            "wall_samples_per_s": statistics.median(sum(one["samples_per_s"] for one in rep) for rep in found),
        }  # fmt: skip
    if "hand" in runs and "worker" in runs:
        ratios = [a[0]["cpu_us"] / b[0]["cpu_us"] for a, b in zip(runs["hand"], runs["worker"], strict=True)]
        row |= {"hand_to_worker": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}
        row["held"] = row["hand_to_worker"] >= BAR
    if "worker" in runs and "workers" in runs:
        pairs = zip(runs["worker"], runs["workers"], strict=True)
        row["two_to_one"] = statistics.median(sum(1 / each["cpu_us"] for each in two) * one[0]["cpu_us"] for one, two in pairs)
    return row


def markdown(result: dict[str, Any]) -> str:
    lines = ["| tokens a sample | by hand, us | worker, us | by hand / worker | two workers / one |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        cell = ["", ""]
        for at, kind in enumerate(("hand", "worker")):
            if kind in row:
                low, high = row[kind]["spread_us"]
                cell[at] = f"{row[kind]['cpu_us']:,.0f} ({low:,.0f} to {high:,.0f})"
        ratio = f"{row['hand_to_worker']:.2f} ({row['ratios'][0]:.2f} to {row['ratios'][1]:.2f})" if "held" in row else ""
        two = f"{row['two_to_one']:.2f}" if "two_to_one" in row else ""
        lines.append(f"| {row['tokens']} | {cell[0]} | {cell[1]} | {ratio} | {two} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("engine", "hand", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--reps", type=int, default=5, help="repetitions, of which medians are shown (default 5)")
    parser.add_argument("--samples", type=int, default=4000, help="samples of the first length (default 4000)")
    parser.add_argument("--lengths", default="64,512", help="tokens a sample (default 64,512)")
    parser.add_argument("--at-once", type=int, default=64, help="samples in flight (default 64)")
    parser.add_argument("--tick-ms", type=float, default=0.0, help="time between two chunks of a request (default 0)")
    parser.add_argument("--kinds", default="hand,worker,workers", help="what to measure (default hand,worker,workers)")
    parser.add_argument("--profile", action="store_true", help="print where the measured processes spend their time")
    for name in ("--url", "--tokens"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--bus", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.lengths, args.kinds = [int(word) for word in args.lengths.split(",")], args.kinds.split(",")
    logging.disable(logging.INFO)
    if args.part == "engine":
        run_loop(serve(int(args.url), args.tick_ms / 1000, args.lengths))
    elif args.part:
        profiler = cProfile.Profile()
        if args.profile:
            profiler.enable()
        if args.part == "hand":
            found = run_loop(by_hand(args.url, args.samples, int(args.tokens), args.at_once))
        else:
            found = run_loop(worker(args.url, *args.bus, args.samples))
        if args.profile:
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)
        print(json.dumps(found), flush=True)
    else:
        result = bench(args)
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(markdown(result))


if __name__ == "__main__":
    main()
