"""How fast the bus is, beside hand-written pipelined redis-py and faststream, in one run on one private server.

publish -> consume -> acknowledge, every contender encodes and decodes the same msgspec messages. Contenders take turns
within each repetition, so a noisy machine hits all of them; the table shows medians. All but the hop latency runs in
one process on one event loop: what is compared is work per message, not cores.

    python scripts/bench_bus.py --out bench.json          (faststream is optional: pip install 'faststream[redis]')
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
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bus import Bus, BusConfig, Commit, Entry, Out, Reader, Stream
from bus.messages.base import Message
from bus.messages.codec import Decoder, encode
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, RolloutDone, RolloutLost, SampleTask, Scored
from bus.messages.versions import VersionSpan
from bus.server import EmbeddedRedis, connect, find_server
from bus.topology import GROUPS, ROLLOUTS

IN_FLIGHT = 64  # calls under way at once in the one-by-one mode, and entries per pipeline in the batched one
PIPELINE_BYTES = 4 << 20
WINDOW_BYTES = 128 << 20  # a producer is never further ahead than this
DEADLINE_S = 120.0  # of one measurement
READERS = {"rollouts": "reward", "groups": "trainer"}


# -- messages --------------------------------------------------------------------------------------------------------


def control_message(text: str = "") -> RolloutLost:
    """About 200 bytes encoded."""
    return RolloutLost(
        sample_id="g0001234/5",
        group_id="g0001234",
        n_samples=8,
        reason="evicted",
        error=text.ljust(58, "."),
        prompt_id="p1234",
    )


def group_message(tokens: int, n_samples: int = 8) -> GroupKept:
    """A kept group of `n_samples` responses of `tokens` tokens each, 9 bytes a token."""
    response = Response(
        tokens=memoryview(os.urandom(4 * tokens)),
        logprobs=memoryview(os.urandom(4 * tokens)),
        loss_mask=memoryview(b"\x01" * tokens),
        spans=(VersionSpan(3, 3, tokens),),
    )
    samples = []
    for index in range(n_samples):
        task = SampleTask(
            sample_id=f"g0001234/{index}",
            group_id="g0001234",
            index=index,
            n_samples=n_samples,
            prompt_id="p1234",
            prompt_tokens=memoryview(os.urandom(256)),
            label="42",
        )
        samples.append(Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=1.0))
    return GroupKept(group_id="g0001234", prompt_id="p1234", samples=tuple(samples))


class Window:
    """Keeps the producer at most `limit` messages ahead of the consumer."""

    def __init__(self, limit: int) -> None:
        self._limit, self._ahead, self._moved = limit, 0, asyncio.Event()

    async def take(self, n: int) -> None:
        while self._ahead and self._ahead + n > self._limit:
            self._moved.clear()
            await self._moved.wait()
        self._ahead += n

    def give(self, n: int) -> None:
        self._ahead -= n
        self._moved.set()


class Load:
    """`n` times one message on one stream, moved `batch` at a time."""

    def __init__(self, message: Message, stream: Stream, n: int, *, batch: int) -> None:
        self.message, self.stream, self.n = message, stream, n
        self.size = len(encode(message))
        self.batch = max(1, min(batch, PIPELINE_BYTES // self.size))
        self.ahead = max(4 * self.batch, min(8192, WINDOW_BYTES // self.size))

    @property
    def readers(self) -> str:
        return READERS[self.stream.name]

    def chunks(self) -> Iterator[int]:
        for start in range(0, self.n, self.batch):
            yield min(self.batch, self.n - start)


# -- contenders ------------------------------------------------------------------------------------------------------


async def bus_batched(url: str, blobs: str, load: Load) -> float:
    """Our bus: append and commit many entries at a time."""
    async with Bus(BusConfig(url=url, run=f"b-{uuid4().hex[:8]}", blob_dir=blobs)) as bus:
        reader = Reader(bus, [load.stream], load.readers, "me")
        await reader.open()
        window = Window(load.ahead)

        async def produce() -> None:
            for n in load.chunks():
                await window.take(n)
                await bus.append([Out(stream=load.stream, message=load.message)] * n)

        async def consume() -> None:
            left = load.n
            while left:
                entries = await reader.read(load.batch, 1.0)
                for entry in entries:
                    await bus.message(entry)
                if entries:
                    await bus.commit(Commit(ack=entries))
                    reader.forget(entries)
                    window.give(len(entries))
                    left -= len(entries)

        seconds = await timed(produce, consume)
        await reader.close()
        return seconds


async def bus_one_by_one(url: str, blobs: str, load: Load) -> float:
    """Our bus as actors use it: a call per message to append, a handler and a commit per entry."""
    async with Bus(BusConfig(url=url, run=f"b-{uuid4().hex[:8]}", blob_dir=blobs)) as bus:
        reader = Reader(bus, [load.stream], load.readers, "me")
        await reader.open()
        window = Window(load.ahead)

        async def publish(_: int) -> None:
            await bus.append([Out(stream=load.stream, message=load.message)])

        async def handle(entry: Entry) -> None:
            await bus.message(entry)
            await bus.commit(Commit(ack=(entry,)))
            reader.forget((entry,))

        async def consume() -> None:
            left = load.n
            while left:
                entries = await reader.read(IN_FLIGHT, 1.0)
                await asyncio.gather(*map(handle, entries))
                window.give(len(entries))
                left -= len(entries)

        seconds = await timed(lambda: each(load, window, publish), consume)
        await reader.close()
        return seconds


async def hand_batched(url: str, blobs: str, load: Load) -> float:
    """The same work written out in redis-py: pipelined XADD, XREADGROUP, decode, XACK and XDEL in one pipeline."""
    key, group = f"b:{uuid4().hex}", "readers"
    decoder: Decoder[Any] = Decoder(load.stream.union, load.stream.name)
    async with connect(url) as writer, connect(url) as blocking, connect(url) as acker:
        await writer.xgroup_create(key, group, "0", mkstream=True)
        window = Window(load.ahead)

        async def produce() -> None:
            for n in load.chunks():
                await window.take(n)
                pipe = writer.pipeline(transaction=False)
                for _ in range(n):
                    pipe.xadd(key, {"body": encode(load.message)})
                await pipe.execute()

        async def consume() -> None:
            left = load.n
            while left:
                for _, entries in await blocking.xreadgroup(group, "me", {key: ">"}, count=load.batch, block=1000):
                    for _, fields in entries:
                        decoder.decode(fields[b"body"])
                    ids = [entry_id for entry_id, _ in entries]
                    pipe = acker.pipeline(transaction=False)
                    pipe.xack(key, group, *ids)
                    pipe.xdel(key, *ids)
                    await pipe.execute()
                    window.give(len(ids))
                    left -= len(ids)

        seconds = await timed(produce, consume)
        await writer.delete(key)
        return seconds


def faststream(*, batch: bool) -> Callable[[str, str, Load], Awaitable[float]]:
    """faststream's Redis streams with a consumer group; publishing through its pipeline in batches, else call by call."""

    async def run(url: str, blobs: str, load: Load) -> float:
        from faststream.redis import BinaryMessageFormatV1, RedisBroker, StreamSub

        key, decoder = f"b:{uuid4().hex}", Decoder[Any](load.stream.union, load.stream.name)
        broker = RedisBroker(url, logger=None, apply_types=False)
        window, finished, left = Window(load.ahead), asyncio.Event(), load.n
        max_records = load.batch if batch else IN_FLIGHT

        def count(n: int) -> None:
            nonlocal left
            left -= n
            window.give(n)
            if not left:
                finished.set()

        async def parse(message: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
            if not batch:
                return await original(message)
            parsed = await original({**message, "data": []})  # its own batch parser only takes JSON bodies
            parsed.raw_message = message
            parsed.body = [BinaryMessageFormatV1.parse(fields[b"__data__"])[0] for fields in message["data"]]
            return parsed

        async def as_it_is(message: Any) -> Any:
            return message.body

        async def handle(body: Any) -> None:
            for one in body if batch else (body,):
                decoder.decode(one)
            count(len(body) if batch else 1)

        sub = StreamSub(key, group="readers", consumer="me", batch=batch, max_records=max_records, polling_interval=1000)
        broker.subscriber(stream=sub, parser=parse, decoder=as_it_is)(handle)

        async with connect(url) as client:
            await client.xgroup_create(key, "readers", "0", mkstream=True)
            async with broker:
                await broker.start()

                async def publish_many() -> None:
                    for n in load.chunks():
                        await window.take(n)
                        pipe = client.pipeline(transaction=False)
                        for _ in range(n):
                            await broker.publish(encode(load.message), stream=key, pipeline=pipe)
                        await pipe.execute()

                async def publish_one(_: int) -> None:
                    await broker.publish(encode(load.message), stream=key)

                seconds = await timed(publish_many if batch else lambda: each(load, window, publish_one), finished.wait)
            await client.delete(key)
        return seconds

    return run


async def each(load: Load, window: Window, publish: Callable[[int], Awaitable[None]]) -> None:
    """`publish` for every message, IN_FLIGHT of them under way."""
    for start in range(0, load.n, IN_FLIGHT):
        n = min(IN_FLIGHT, load.n - start)
        await window.take(n)
        await asyncio.gather(*map(publish, range(n)))


async def timed(produce: Callable[[], Awaitable[Any]], consume: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(produce(), consume())
    return time.perf_counter() - start


# -- hop latency -----------------------------------------------------------------------------------------------------


async def read_hops(url: str, run: str, n: int) -> None:
    """Child process: reads `n` entries as they come and prints the microseconds since each was appended."""
    taken: list[float] = []
    async with Bus(BusConfig(url=url, run=run)) as bus:
        reader = Reader(bus, [ROLLOUTS], "reward", "child")
        await reader.open()
        print("ready", flush=True)
        while len(taken) < n:
            for entry in await reader.read(8, 1.0):
                message: RolloutLost = await bus.message(entry)
                taken.append((time.monotonic_ns() - int(message.error.rstrip("."))) / 1000)
                await bus.commit(Commit(ack=(entry,)))
                reader.forget((entry,))
        await reader.close()
    print(json.dumps(taken), flush=True)


async def hops(url: str, n: int, pace_s: float) -> dict[str, float]:
    """Appends and PINGs in turn, one every `pace_s`, and the time from append to the other process holding the message."""
    run, pings = f"h-{uuid4().hex[:8]}", []
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--hop-reader", url, run, str(n), stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    async with Bus(BusConfig(url=url, run=run)) as bus, connect(url) as client:
        await client.ping()
        due = time.monotonic()
        for tick in range(2 * n):
            due += pace_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
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


def cases(scale: float) -> list[tuple[str, Load, dict[str, Callable[[str, str, Load], Awaitable[float]]]]]:
    """(name, load, contenders) of every throughput measurement."""
    batched = {"bus": bus_batched, "redis-py by hand": hand_batched, "faststream": faststream(batch=True)}
    single = {"bus": bus_one_by_one, "faststream": faststream(batch=False)}
    control, group, large = control_message(), group_message(2048), group_message(14_500)

    def load(message: Message, stream: Stream, n: int, batch: int) -> Load:
        return Load(message, stream, max(batch, int(n * scale)), batch=batch)

    return [
        ("control, batches", load(control, ROLLOUTS, 40_000, IN_FLIGHT), batched),
        ("control, one by one", load(control, ROLLOUTS, 10_000, 1), single),
        ("group of 8 x 2k (147 kB)", load(group, GROUPS, 2_000, IN_FLIGHT), batched),
        ("large body (1 MB)", load(large, GROUPS, 300, IN_FLIGHT), batched),
    ]


async def throughput(url: str, blobs: str, *, reps: int, scale: float, skip: set[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, load, contenders in cases(scale):
        seconds: dict[str, list[float]] = {who: [] for who in contenders if who not in skip}
        for rep in range(reps + 1):
            for who in seconds:
                taken = await contenders[who](url, blobs, load)
                if rep:  # the first round warms caches and allocators
                    seconds[who].append(taken)
        for who, all_taken in seconds.items():
            rate = load.n / statistics.median(all_taken)
            rows.append({
                "case": name, "contender": who, "messages": load.n, "bytes": load.size, "batch": load.batch,
                "per_s": rate, "mb_per_s": rate * load.size / 1e6,
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
    ratio = latency["hop_p99_us"] / latency["ping_p99_us"]
    return [*found, {"bar": "hop p99 / PING p99 <= 2", "measured": ratio, "held": ratio <= 2}]


def markdown(result: dict[str, Any]) -> str:
    lines = ["| case | contender | messages/s | MB/s | slowest to fastest |", "|---|---|---|---|---|"]
    for row in result["throughput"]:
        low, high = row["spread"]
        lines.append(
            f"| {row['case']}, {row['bytes']:,} B | {row['contender']} | {row['per_s']:,.0f} | {row['mb_per_s']:,.0f} "
            f"| {low:,.0f} to {high:,.0f} |"
        )
    lat = result["latency"]
    lines += ["", "| | p50 | p99 |", "|---|---|---|"]
    lines += [f"| {who} | {lat[f'{who}_p50_us']:.0f} µs | {lat[f'{who}_p99_us']:.0f} µs |" for who in ("hop", "ping")]
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
            rows = await throughput(server.url, blobs, reps=args.reps, scale=args.scale, skip=skip)
            runs = [await hops(server.url, args.hops, args.pace_ms / 1000) for _ in range(args.reps)]
        finally:
            server.stop()
    latency = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
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
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of messages (default 1)")
    parser.add_argument("--hops", type=int, default=1500, help="hops and PINGs per repetition (default 1500)")
    parser.add_argument(
        "--pace-ms", type=float, default=1.0, help="time between hop and PING, milliseconds (default 1)"
    )
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
