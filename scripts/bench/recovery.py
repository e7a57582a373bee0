"""What a kill -9 costs on the quickstart: of a worker, of the trainer, of Redis.

    python -m scripts.bench recovery --out recovery.json

One run, `--times` kills of each kind, with the leases and intervals of the shipped settings. Worker: seconds until every
sample it held is leased by another one or done, tokens of them that were saved. Trainer: seconds until the next step is done,
steps trained again, tokens generated meanwhile. Redis: seconds until the next commit, and what the accounts lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

from actors.generation.sample import PrefixChunk
from bus import Bus, BusConfig, Entry, ledger
from bus.messages.policy import Restored, StepDone
from bus.topology import POLICY, PREFIXES, PROMPTS
from scripts.bench import REPO
from scripts.soak import share_models, tables_of
from tests.crash.house import Run, merged, until

DEADLINE_S = 60.0
POLL_S = 0.05


async def poll(what: str, seen: Any) -> float:
    """Seconds until the async `seen` says yes."""
    began = time.monotonic()
    while not await seen():
        if time.monotonic() - began > DEADLINE_S:
            raise TimeoutError(f"{what}: not within {DEADLINE_S:g} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began


async def newest(bus: Bus, kind: type) -> Any:
    """The last message of a type on policy."""
    for entry in await bus.last(POLICY, 200):
        message = await bus.message(entry)
        if isinstance(message, kind):
            return message
    return None


async def generated(bus: Bus) -> int:
    """Tokens in the accounts."""
    return (await ledger.read_accounts(bus)).tokens_generated


async def held_by(bus: Bus, worker: str) -> dict[str, tuple[str, str]]:
    """Samples that a worker holds: sample id -> (stream key, entry id)."""
    held: dict[str, tuple[str, str]] = {}
    for stream in (PREFIXES, PROMPTS):
        key = bus.keys.stream(stream.name)
        ids = {row[0].decode() for row in await bus.link.run("XPENDING", key, "generation", "-", "+", 5000, worker)}
        entries: list[Entry] = await bus.scan_all(stream)
        held |= {e.fields["id"]: (key, e.id) for e in entries if e.id in ids}
    return held


async def saved_tokens(bus: Bus, sample_id: str) -> int:
    """Response tokens of a sample under way that are on the bus."""
    chunks = [msgspec.msgpack.decode(raw, type=PrefixChunk) for raw in await bus.load_prefix(sample_id)]
    return sum(len(chunk.tokens) // 4 for chunk in chunks)


async def kill_worker(run: Run, bus: Bus) -> dict[str, float]:
    """One of the two workers; the launcher starts another of its name, which may take the samples back."""
    os.kill(run.pid("generation-1"), signal.SIGKILL)
    began = time.monotonic()
    held = await held_by(bus, "generation-1")
    saved = sum([await saved_tokens(bus, sample_id) for sample_id in held])
    deliveries = {s: await _deliveries(bus, key, entry) for s, (key, entry) in held.items()}

    async def elsewhere() -> bool:
        for sample_id, (key, entry) in list(held.items()):
            now = await _deliveries(bus, key, entry)
            if now == 0 or now > deliveries[sample_id]:
                del held[sample_id]
        return not held

    n_held = len(held)
    await poll("samples of the dead worker to run elsewhere", elsewhere)
    return {"seconds": time.monotonic() - began, "samples": n_held, "saved_tokens": saved}


async def _deliveries(bus: Bus, key: str, entry_id: str) -> int:
    rows = await bus.link.run("XPENDING", key, "generation", entry_id, entry_id, 1)
    return int(rows[0][3]) if rows else 0


async def kill_trainer(run: Run, bus: Bus) -> dict[str, float]:
    """Training goes on from the last checkpoint."""
    last: StepDone = await newest(bus, StepDone)
    saved = run.saved()
    tokens = await generated(bus)
    os.kill(run.pid("trainer"), signal.SIGKILL)
    began, wall = time.monotonic(), time.time()
    restored_s = 0.0

    async def goes_on() -> bool:
        nonlocal restored_s
        message = await newest(bus, Restored)
        if not restored_s and message is not None and message.version.id > last.version.id:
            restored_s = time.monotonic() - began
        step = await newest(bus, StepDone)
        return bool(step.wall > wall)

    await poll("the next step", goes_on)
    return {
        "seconds": time.monotonic() - began,
        "restored_s": restored_s,
        "steps_again": last.step - saved,
        "tokens_generated_meanwhile": await generated(bus) - tokens,
    }


async def kill_redis(run: Run, bus: Bus) -> dict[str, float]:
    """Everything reconnects; the accounts must not have fallen."""
    before = await ledger.read_accounts(bus)
    os.kill(run.redis_pid(), signal.SIGKILL)
    began = time.monotonic()
    after = await ledger.read_accounts(bus)
    answered = time.monotonic() - began
    lost = max(0, before.issued - after.issued) + max(0, before.tokens_generated - after.tokens_generated)

    async def moves() -> bool:
        return await generated(bus) > after.tokens_generated

    await poll("the next commit of a worker", moves)
    return {"seconds": time.monotonic() - began, "answered_s": answered, "lost": lost}


async def measure(run: Run, times: int) -> dict[str, list[dict[str, float]]]:
    """All kills in turn, each after some quiet steps."""
    run.start()
    await asyncio.to_thread(until, "the first checkpoint", lambda: run.saved() >= 1, seconds=240)
    reference = msgspec.json.decode((run.dir / "run.json").read_bytes())
    config = BusConfig(url=reference["bus_url"], run=reference["run"], blob_dir=str(run.dir / "blobs"))
    figures: dict[str, list[dict[str, float]]] = {"worker": [], "trainer": [], "redis": []}
    async with Bus(config) as bus:
        for _ in range(times):
            for name, kill in (("worker", kill_worker), ("trainer", kill_trainer), ("redis", kill_redis)):
                step = (await newest(bus, StepDone)).step
                target = step + 3

                async def quiet(target: int = target) -> bool:
                    done = await newest(bus, StepDone)
                    return bool(done.step >= target)

                await poll("three quiet steps", quiet)
                figures[name].append(await kill(run, bus))
                print(name, json.dumps(figures[name][-1]), flush=True)
        found = await ledger.check(bus)
        print(found.text())
        assert found.closes
    assert run.launcher is not None
    run.launcher.send_signal(signal.SIGTERM)
    run.finish()
    return figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--config", type=Path, default=REPO / "configs" / "quickstart.toml")
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--partial-save-tokens", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    home = Path(mkdtemp(prefix="ma-recovery-"))
    share_models(home)
    more = {
        "bus": {"lease_s": 6.0},
        "ckpt": {"save_interval": args.save_interval},
        "rollout": {"partial_save_tokens": args.partial_save_tokens},
    }
    run = Run(home, merged(tables_of(args.config), more))
    try:
        figures = asyncio.run(measure(run, args.times))
    finally:
        run.clean()
    print("\n| kill -9 of | times | seconds, median | seconds, worst | bar |\n|---|---|---|---|---|")
    for name, rows in figures.items():
        seconds = [row["seconds"] for row in rows]
        bar = {"worker": "10 s", "trainer": "20 s", "redis": ""}[name]
        print(f"| {name} | {len(rows)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {bar} |")
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
