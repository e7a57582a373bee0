"""The console of a training run: a live screen, a line per step, or silence.

Reads  the streams of RECORDED and snapshots    Writes  the terminal    Owns  nothing: past steps come from metrics.jsonl
It never stands in the way of training: the launcher gives it a `stop` and waits for it only then.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from bus import Bus, Tail
from bus.errors import BadMessage, BusUnreachable
from miles_async.console.history import History, Step
from miles_async.console.metrics_file import positions_of, read_records
from miles_async.console.records import RECORDED, Record, records_of
from miles_async.console.snapshot import Snapshot, read_snapshot
from miles_async.console.text import duration, percent
from miles_async.console.view import screen, step_line

Mode = Literal["live", "plain", "none"]
REFRESH_S = 0.5
SNAPSHOT_S = 1.0


async def run_console(
    bus: Bus, *, mode: Mode, total_steps: int, run_dir: Path, stop: asyncio.Event, out: TextIO | None = None
) -> None:
    """Show the run until `stop`. `live` needs a terminal and becomes `plain` without one. `total_steps` 0 = unknown."""
    if mode == "none":
        await stop.wait()
        return
    console = Console(file=out or sys.stdout, highlight=False)
    feed = Feed(bus, run_dir)
    if mode == "live" and console.is_terminal:
        await _Screen(bus, feed, console, total_steps).run(stop)
    else:
        await _Lines(feed, console, total_steps).run(stop)


class Feed:
    """The run's past and what is added to it."""

    def __init__(self, bus: Bus, run_dir: Path) -> None:
        self._bus = bus
        self._run_dir = run_dir
        self._tail = Tail(bus, RECORDED)
        self.history = History()

    async def open(self) -> None:
        """Fold what metrics.jsonl has, so that a resumed run shows its whole curve."""
        past = await asyncio.to_thread(read_records, self._run_dir)
        for record in past:
            self.history.fold(record)
        known = positions_of(past)
        self._tail.positions = {stream.name: known.get(stream.name, "0") for stream in RECORDED}

    async def close(self) -> None:
        """Close the connection."""
        await self._tail.close()

    async def read(self, block_s: float) -> list[Record]:
        """New records, folded already; empty after `block_s` without any."""
        fresh: list[Record] = []
        for entry in await self._tail.read(block_s):
            try:
                message = await self._bus.message(entry)
            except BadMessage:
                continue  # the recorder reports it
            for record in records_of(entry, message):
                self.history.fold(record)
                fresh.append(record)
        return fresh


class _Screen:
    def __init__(self, bus: Bus, feed: Feed, console: Console, total_steps: int) -> None:
        self._bus, self._feed, self._console, self._total = bus, feed, console, total_steps
        self._snapshot: Snapshot | None = None
        self._seen = bus.clock.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Three loops: news, snapshots, frames; a bus that does not answer shows as such and is asked again."""
        await self._feed.open()
        try:
            with Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow(stop))
                    tasks.create_task(self._look(stop))
                    while not await _stopped(stop, REFRESH_S):
                        live.update(self._frame(), refresh=True)
                live.update(self._frame(), refresh=True)
        finally:
            await self._feed.close()

    async def _follow(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self._feed.read(REFRESH_S)
            except BusUnreachable:
                continue  # the frame shows how long it has been silent; whoever runs the bus decides

    async def _look(self, stop: asyncio.Event) -> None:
        while True:
            try:
                self._snapshot = await read_snapshot(self._bus)
                self._seen = self._bus.clock.monotonic()
            except BusUnreachable:
                pass  # the frame shows for how long
            if await _stopped(stop, SNAPSHOT_S):
                return

    def _frame(self) -> RenderableType:
        if self._snapshot is None:
            return Text("waiting for the bus", style="dim")
        size = self._console.size
        return screen(
            self._snapshot,
            self._feed.history,
            total_steps=self._total,
            width=size.width,
            height=size.height,
            silent_s=max(0.0, self._bus.clock.monotonic() - self._seen - SNAPSHOT_S),
        )


class _Lines:
    def __init__(self, feed: Feed, console: Console, total_steps: int) -> None:
        self._feed, self._console, self._total = feed, console, total_steps

    async def run(self, stop: asyncio.Event) -> None:
        """A line for each step, evaluation, checkpoint, restore, knob and fault; woken by the blocking read."""
        await self._feed.open()
        try:
            while not stop.is_set():
                await self._more(REFRESH_S)
            while await self._more(0.0):
                continue
        finally:
            await self._feed.close()

    async def _more(self, block_s: float) -> bool:
        try:
            fresh = await self._feed.read(block_s)
        except BusUnreachable as error:
            self._say(f"console: {error}")
            return False
        for record in fresh:
            if line := plain_line(record, self._feed.history, total_steps=self._total):
                self._say(line)
        return bool(fresh)

    def _say(self, line: str) -> None:
        self._console.out(line, highlight=False)


def eval_line(record: Record) -> str:
    """What an evaluation found, which versions made its tokens where several did, and what was lost (pure)."""
    name, error, versions = record["name"], record.get("error", ""), record.get("versions", {})
    head, score = f"eval {name} at step {record['step']}", record["metrics"].get(f"eval/{name}")
    if score is None:
        return f"{head} failed: {error or 'nothing was measured'}"
    line = f"{head}: {percent(score)} of {record['n_samples']} samples"
    if len(versions) > 1:
        share = record["metrics"][f"eval/{name}/version_share"]
        first, last = min(versions, key=int), max(versions, key=int)
        line += f", {percent(share)} of their tokens by it, the others by versions {first} to {last}"
    return line + (f"; {error}" if error else "")


def plain_line(record: Record, history: History, *, total_steps: int) -> str:
    """The line for one record, empty for what plain output leaves out (pure)."""
    match record["kind"]:
        case "step":
            step = next((s for s in reversed(history.steps) if s.step == record["step"]), None)
            return step_line(step, history, total_steps=total_steps) if isinstance(step, Step) else ""
        case "eval":
            return eval_line(record)
        case "checkpoint":
            return f"checkpoint at step {record['step']} in {duration(record['save_s'])}: {record['path']}"
        case "restored" if record["step"] > 0 or record["checkpoint"]:
            return f"restored to step {record['step']} from {record['checkpoint'] or 'the beginning'}"
        case "knob" if record["epoch"] > 0:
            return f"knob epoch {record['epoch']}: {', '.join(f'{k}={v}' for k, v in record['values'].items())}"
        case "fault":
            return f"{record['level']}: {record['actor']}: {record['event']}: {record['text']}"
        case "dead":
            return f"dead letter: {record['stream']} {record['sample']}: {record['error']}"
        case "finished":
            return f"finished at step {record['step']}"
    return ""


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `stop` that long."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True


__all__ = ("Feed", "Mode", "plain_line", "run_console")
