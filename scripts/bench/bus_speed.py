"""How fast the bus is, beside hand-written pipelined redis-py and faststream, in one run on one private server.

publish -> consume -> acknowledge, every contender encodes and decodes the same msgspec messages. Contenders take turns
within each repetition, so a noisy machine hits all of them; the table shows medians. All but the hop latency runs in
one process on one event loop: what is compared is work per message, not cores.

    python -m scripts.bench bus_speed --out bench.json          (faststream is optional: pip install 'faststream[redis]')
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from bus import Bus, BusConfig, Commit, Out, Reader, Stream
from bus.client import connect
from bus.messages.base import Message
from bus.messages.samples import RolloutLost
from bus.server import EmbeddedRedis, find_server
from bus.topology import GROUPS, ROLLOUTS
from scripts.bench.contenders import (
    IN_FLIGHT,
    Load,
    Run,
    bus_batched,
    bus_one_by_one,
    control_message,
    faststream,
    group_message,
    hand_batched,
)

# -- hop latency -----------------------------------------------------------------------------------------------------


async def read_hops(url: str, run: str, n: int) -> None:
    """Child process: reads `n` entries as they come and prints the microseconds since each was appended."""
    taken: list[float] = []
    async with Bus(BusConfig(url=url, run=run)) as bus:
        reader = Reader(bus, [ROLLOUTS], "reward", "child")
        await reader.open()
        print("ready", flush=True)
        while len(taken) < n:
            entries = await reader.read(8, 1.0)
            messages: list[RolloutLost] = [await bus.message(entry) for entry in entries]
            now = time.monotonic_ns()
            taken += [(now - int(message.error.rstrip("."))) / 1000 for message in messages]
            if entries:
                await bus.commit(Commit(ack=entries))
                reader.forget(entries)
        await reader.close()
    print(json.dumps(taken), flush=True)


async def hops(url: str, n: int, pace_s: float) -> dict[str, float]:
    """Appends and PINGs in turn, one every `pace_s`, and the time from append to the other process holding the message."""
    run, pings = f"h-{uuid4().hex[:8]}", []
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scripts.bench.bus_speed",
        "--hop-reader",
        url,
        run,
        str(n),
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    async with Bus(BusConfig(url=url, run=run)) as bus, connect(url) as client:
        await client.ping()
        due = time.monotonic()
        for tick in range(2 * n):
            due = max(due + pace_s, time.monotonic())  # a stall is not made up for in a burst
            await asyncio.sleep(due - time.monotonic())
            sent = time.monotonic_ns()
            if tick % 2:
                await client.ping()
                pings.append((time.monotonic_ns() - sent) / 1000)
            else:
                await bus.append([Out(stream=ROLLOUTS, message=control_message(str(sent)))])
    taken = json.loads(await child.stdout.readline())
    await child.wait()
    return {
        "hop_p50_us": quantile(taken, 0.5), "hop_p99_us": quantile(taken, 0.99),
        "ping_p50_us": quantile(pings, 0.5), "ping_p99_us": quantile(pings, 0.99),
    }  # fmt: skip


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


# -- the run ---------------------------------------------------------------------------------------------------------


def cases(scale: float) -> list[tuple[str, Load, dict[str, Run]]]:
    """(name, load, contenders) of every throughput measurement."""
    batched: dict[str, Run] = {
        "bus": bus_batched(),
        "redis-py by hand": hand_batched,
        "faststream": faststream(batch=True),
    }
    single: dict[str, Run] = {"bus": bus_one_by_one, "faststream": faststream(batch=False)}
    bodies = batched | {"bus, bodies in Redis": bus_batched(files=False)}
    control, group, large = control_message(), group_message(2048), group_message(14_500)

    def load(message: Message, stream: Stream, n: int, batch: int) -> Load:
        return Load(message, stream, max(batch, int(n * scale)), batch=batch)

    return [
        ("control, batches", load(control, ROLLOUTS, 40_000, IN_FLIGHT), batched),
        ("control, one by one", load(control, ROLLOUTS, 10_000, 1), single),
        ("group of 8 x 2k (147 kB)", load(group, GROUPS, 2_000, IN_FLIGHT), bodies),
        ("large body (1 MB)", load(large, GROUPS, 300, IN_FLIGHT), bodies),
    ]


async def throughput(url: str, blobs: str, *, reps: int, scale: float, skip: set[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, load, contenders in cases(scale):
        seconds: dict[str, list[float]] = {who: [] for who in contenders if who not in skip}
        cpu: dict[str, list[float]] = {who: [] for who in seconds}
        for rep in range(reps + 1):
            for who in seconds:
                used = time.process_time()
                taken = await contenders[who](url, blobs, load)
                if rep:  # the first round warms caches and allocators
                    seconds[who].append(taken)
                    cpu[who].append(time.process_time() - used)
        for who, all_taken in seconds.items():
            rate = load.n / statistics.median(all_taken)
            rows.append({
                "case": name, "contender": who, "messages": load.n, "bytes": load.size, "batch": load.batch,
                "per_s": rate, "mb_per_s": rate * load.size / 1e6,
                "client_cpu_us": statistics.median(cpu[who]) / load.n * 1e6,
                "spread": [load.n / max(all_taken), load.n / min(all_taken)],
            })  # fmt: skip
            print(f"  {name}: {who} {rate:,.0f}/s", file=sys.stderr, flush=True)
    return rows


BARS = (
    ("control, batches", "redis-py by hand", 0.6),
    ("control, batches", "faststream", 1.0),
    ("control, one by one", "faststream", 5.0),
    ("group of 8 x 2k (147 kB)", "redis-py by hand", 0.8),
    ("large body (1 MB)", "redis-py by hand", 0.8),
)


def verdicts(rows: list[dict[str, Any]], latency: dict[str, float]) -> list[dict[str, Any]]:
    """Each bar with what was measured; `held` says whether it was reached."""
    rate = {(row["case"], row["contender"]): row["per_s"] for row in rows}
    found = [
        {"bar": f"{case}: bus / {other} >= {least:g}", "measured": ratio, "held": ratio >= least}
        for case, other, least in BARS
        if (case, other) in rate
        for ratio in [rate[case, "bus"] / rate[case, other]]
    ]
    if latency:
        ratio = latency["hop_p99_us"] / latency["ping_p99_us"]
        found.append({"bar": "hop p99 / PING p99 <= 2", "measured": ratio, "held": ratio <= 2})
    return found


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "| case | contender | messages/s | MB/s | slowest to fastest | client CPU, µs each |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["throughput"]:
        low, high = row["spread"]
        lines.append(
            f"| {row['case']}, {row['bytes']:,} B | {row['contender']} | {row['per_s']:,.0f} | {row['mb_per_s']:,.0f} "
            f"| {low:,.0f} to {high:,.0f} | {row['client_cpu_us']:,.1f} |"
        )
    lat = result["latency"]
    lines += ["", "| | p50 | p99 |", "|---|---|---|"]
    for who in ("hop", "ping") if lat else ():
        lines.append(f"| {who} | {lat[f'{who}_p50_us']:.0f} µs | {lat[f'{who}_p99_us']:.0f} µs |")
    lines += ["", "| bar | measured | held |", "|---|---|---|"]
    lines += [f"| {v['bar']} | {v['measured']:.2f} | {'yes' if v['held'] else 'no'} |" for v in result["bars"]]
    return "\n".join(lines)


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    skip = set() if installed("faststream") else {"faststream"}
    if skip:
        print("faststream is not installed, its rows are left out: pip install 'faststream[redis]'", file=sys.stderr)
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bench-") as home, tempfile.TemporaryDirectory(dir=shm) as blobs:
        server = EmbeddedRedis(Path(home))
        server.start()
        try:
            rows, runs = [], []
            if args.only != "latency":
                rows = await throughput(server.url, blobs, reps=args.reps, scale=args.scale, skip=skip)
            if args.only != "throughput":
                runs = [await hops(server.url, args.hops, args.pace_ms / 1000) for _ in range(args.reps)]
        finally:
            server.stop()
    latency = {name: statistics.median(run[name] for run in runs) for name in (runs[0] if runs else ())}
    return {
        "machine": {
            "python": platform.python_version(), "cores": os.cpu_count(), "server": str(find_server().path.name),
            "server_version": ".".join(map(str, find_server().version)), "redis-py": version("redis"),
            "faststream": version("faststream") if not skip else None, "load_at_start": args.load,
        },
        "settings": {"reps": args.reps, "in_flight": IN_FLIGHT, "hops": args.hops, "pace_ms": args.pace_ms},
        "throughput": rows, "latency": latency, "bars": verdicts(rows, latency),
    }  # fmt: skip


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def loop_runner() -> Callable[[Any], Any]:
    """uvloop's runner where there is one, as actors do."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run
    return asyncio.run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--reps", type=int, default=5, help="repetitions, of which medians are shown (default 5)")
    parser.add_argument("--only", choices=("throughput", "latency"), help="one of the two parts; both without it")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of messages (default 1)")
    parser.add_argument("--hops", type=int, default=1500, help="hops and PINGs per repetition (default 1500)")
    parser.add_argument("--pace-ms", type=float, default=1.0, help="time between hop and PING, milliseconds (default 1)")
    parser.add_argument("--hop-reader", nargs=3, metavar=("URL", "RUN", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    run = loop_runner()
    if args.hop_reader:
        url, name, n = args.hop_reader
        run(read_hops(url, name, int(n)))
        return
    args.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    logging.disable(logging.INFO)
    result = run(bench(args))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()
