"""What one Redis carries: its CPU time per sample, hop by hop, for the commits that the rooms make.

    python -m scripts.bench redis_load --out redis.json

Every hop of a run is played on a private redis-server with the messages, accounts and guards of the real rooms: issued,
generated, scored, judged, trained. The server is one thread, so a second divided by its CPU time per sample is the most it can
carry, whatever else this machine does; more rooms and hosts do not raise it. Groups of 8, 64 calls under way per room.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from actors.runtime.loop import run_loop
from bus import Bus, BusConfig, Commit, Entry, Guard, Out, Reader, Stream, ledger
from bus.client import connect
from bus.messages.base import pack_ints
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import VersionSpan
from bus.server import EmbeddedRedis, find_server
from bus.topology import GROUPS, PREFIXES, PROMPTS, ROLLOUTS, SCORED, VERDICTS

GROUP, AT_ONCE, BATCH = 8, 64, 256


class Chain:
    """One run's samples on their way. Each hop is a coroutine that moves all of them one room on."""

    def __init__(self, bus: Bus, n: int, tokens: int) -> None:
        self.bus, self.n, self.tokens = bus, n - n % GROUP, tokens
        self.open: list[str] = []

    async def issued(self) -> None:
        """As the sampler: a few groups a commit, with cursor, registry and account."""
        prompt, before = pack_ints(range(64)), ""
        for first in range(0, self.n // GROUP, 4):
            groups = [f"g{at:07d}" for at in range(first, min(first + 4, self.n // GROUP))]
            tasks = [
                SampleTask(
                    sample_id=f"{g}/{i}", group_id=g, index=i, n_samples=GROUP, prompt_id=g, prompt_tokens=prompt, label="42"
                )
                for g in groups
                for i in range(GROUP)
            ]
            opened = {
                g: msgspec.msgpack.encode(OpenGroup(group_id=g, prompt_id=g, n_samples=GROUP, source_index=first)) for g in groups
            }
            after = f"0:{first}:{groups[-1]}"
            await self.bus.commit(
                Commit(
                    append=[Out(PROMPTS, task) for task in tasks], open_groups=opened, ledger={"issued": len(tasks)},
                    guard=Guard("sampler", before, after), bounded=True,
                )
            )  # fmt: skip
            before = after

    async def generated(self) -> None:
        tokens = memoryview(os.urandom(4 * self.tokens))
        response = Response(
            tokens=tokens, logprobs=tokens, loss_mask=memoryview(b"\x01" * self.tokens), spans=(VersionSpan(1, 0, self.tokens),)
        )
        moves = ledger.generated("generation-0", response.spans)

        async def one(entry: Entry, task: SampleTask) -> Commit:
            out = RolloutDone(task=task, response=response, finish="stop", worker="generation-0")
            saved = (task.sample_id,) if self.tokens > 512 else ()  # --partial-save-tokens
            return Commit(ack=(entry,), append=(Out(ROLLOUTS, out),), ledger=moves, delete_prefixes=saved, bounded=True)

        await self._each(PROMPTS, "generation", one)

    async def scored(self) -> None:
        async def one(entry: Entry, rollout: RolloutDone) -> Commit:
            return Commit(ack=(entry,), append=(Out(SCORED, Scored(rollout=rollout, reward=1.0, scorer="math")),))

        await self._each(ROLLOUTS, "reward", one)

    async def judged(self) -> None:
        held: dict[str, list[tuple[Entry, Scored]]] = {}

        async def one(entry: Entry, scored: Scored) -> Commit | None:
            group = scored.rollout.task.group_id
            members = held.setdefault(group, [])
            members.append((entry, scored))
            if len(members) < GROUP:
                return None
            del held[group]
            kept = GroupKept(group_id=group, prompt_id=group, samples=tuple(s for _, s in members))
            verdict = GroupVerdict(group_id=group, prompt_id=group, kept=True, n_samples=GROUP)
            return Commit(ack=[e for e, _ in members], append=(Out(GROUPS, kept), Out(VERDICTS, verdict)), bounded=True)

        await self._each(SCORED, "filter", one)

    async def trained(self) -> None:
        """As after a checkpoint: groups of many steps in one commit."""
        reader = Reader(self.bus, [GROUPS], "trainer", "trainer")
        await reader.open()
        left = self.n // GROUP
        while left:
            entries = await reader.read(32, 1.0)
            for entry in entries:
                await self.bus.message(entry)
            n = GROUP * len(entries)
            moves = ledger.trained(n, (VersionSpan(1, 0, n * self.tokens),))
            closed = [entry.fields["group"] for entry in entries]
            await self.bus.commit(Commit(ack=entries, ledger=moves, close_groups=closed))
            reader.forget(entries)
            left -= len(entries)
        await reader.close()

    async def _each(self, stream: Stream, readers: str, hop: Callable[[Entry, Any], Awaitable[Commit | None]]) -> None:
        """Every entry of a stream to its commit, AT_ONCE at a time, read as the rooms do."""
        streams = [PREFIXES, stream] if stream is PROMPTS else [stream]
        reader = Reader(self.bus, streams, readers, "me")
        await reader.open()
        slots, left = asyncio.Semaphore(AT_ONCE), self.n

        async def one(entry: Entry) -> None:
            try:
                commit = await hop(entry, await self.bus.message(entry))
                if commit is not None:
                    await self.bus.commit(commit)
                    reader.forget(commit.ack)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            while left:
                entries = await reader.read(min(left, 64), 1.0)
                for entry in entries:
                    await slots.acquire()
                    tasks.create_task(one(entry))
                left -= len(entries)
        await reader.close()


HOPS = ("issued", "generated", "scored", "judged", "trained")


async def used_s(client: Any) -> float:
    """CPU seconds of the server's main thread so far."""
    found = await client.info("cpu")
    for name in ("used_cpu_{}_main_thread", "used_cpu_{}"):
        if name.format("user") in found:
            return float(found[name.format("user")]) + float(found[name.format("sys")])
    raise RuntimeError("this server does not tell its CPU time")


async def measure(url: str, blobs: str, n: int, tokens: int) -> dict[str, float]:
    """Microseconds of the server per sample, by hop."""
    found = {}
    async with Bus(BusConfig(url=url, run=f"r-{uuid4().hex[:8]}", blob_dir=blobs)) as bus, connect(url) as client:
        await bus.make_readers()
        chain = Chain(bus, n, tokens)
        for name in HOPS:
            before = await used_s(client)
            await getattr(chain, name)()
            found[name] = (await used_s(client) - before) / chain.n * 1e6
        accounts = await ledger.read_accounts(bus)
        if (accounts.issued, accounts.trained, accounts.pending) != (chain.n, chain.n, 0):
            raise RuntimeError(f"the ledger does not close: {accounts}")
        await bus.forget_run()
    return found


def bench(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bench-") as home, tempfile.TemporaryDirectory(dir=shm) as blobs:
        server = EmbeddedRedis(Path(home))
        server.start()
        try:
            for tokens in args.lengths:
                each = [run_loop(measure(server.url, blobs, args.samples, tokens)) for _ in range(args.reps + 1)][1:]
                totals = [sum(one.values()) for one in each]
                rows.append({
                    "tokens": tokens, "samples": args.samples, "hops_us": {h: statistics.median(o[h] for o in each) for h in HOPS},
                    "cpu_us": statistics.median(totals), "spread_us": [min(totals), max(totals)],
                    "samples_per_s": 1e6 / statistics.median(totals),
                })  # fmt: skip
        finally:
            server.stop()
    return {
        "date": date.today().isoformat(), "python": platform.python_version(), "cores": os.cpu_count(),
        "server": ".".join(map(str, find_server().version)), "redis-py": version("redis"), "reps": args.reps, "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--reps", type=int, default=3, help="repetitions after a warm-up, of which medians are shown (default 3)")
    parser.add_argument("--samples", type=int, default=8000, help="samples a repetition (default 8000)")
    parser.add_argument("--lengths", default="64,512", help="tokens a sample (default 64,512)")
    args = parser.parse_args()
    args.lengths = [int(word) for word in args.lengths.split(",")]
    logging.disable(logging.INFO)
    result = bench(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"| tokens a sample | {' | '.join(HOPS)} | all, us of the server | samples/s |\n|{'---|' * (len(HOPS) + 3)}")
    for row in result["rows"]:
        hops = " | ".join(f"{row['hops_us'][hop]:.1f}" for hop in HOPS)
        low, high = row["spread_us"]
        print(f"| {row['tokens']} | {hops} | {row['cpu_us']:.1f} ({low:.1f} to {high:.1f}) | {row['samples_per_s']:,.0f} |")


if __name__ == "__main__":
    main()
