"""The console of a training run: a live screen, a line per step, or silence.

Reads  the feed of the run's logs, snapshots    Writes  the terminal    Owns  nothing: past steps come from metrics.jsonl
It never stands in the way of training: the launcher gives it a `stop` and waits for it only then.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Literal, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from actors.recorder.feed import Feed
from actors.recorder.history import History, Step
from actors.recorder.records import Record
from actors.runtime.snapshot import Snapshot, read_snapshot
from bus import Bus
from bus.errors import BusUnreachable, printable
from miles_async.console.text import duration, percent, shorten
from miles_async.console.view import screen, state_text, step_line, waits_text

Mode = Literal["live", "plain", "none"]
REFRESH_S = 0.5
SNAPSHOT_S = 1.0
WAIT_SAID_S = 15.0
FIRST_SAMPLES = 2  # shown in words at the start of a run; miles-async samples shows more


async def run_console(
    bus: Bus, feed: Feed, *, mode: Mode, total_steps: int, stop: asyncio.Event, out: TextIO | None = None
) -> None:
    """Follow the feed and show the run until `stop`. `live` needs a terminal and becomes `plain` without one. `total_steps`
    0 = unknown."""
    console = Console(file=out or sys.stdout, highlight=False)
    live = mode == "live" and console.is_terminal

    def say(line: str) -> None:
        if mode != "none" and not live:
            console.out(printable(line), highlight=False)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_follow(feed, stop, say, total_steps))
        if live:
            tasks.create_task(_Screen(bus, feed, console, total_steps).run(stop))
        elif mode != "none":
            tasks.create_task(_until_first_step(bus, feed, stop, say))


async def _follow(feed: Feed, stop: asyncio.Event, say: Callable[[str], None], total_steps: int) -> None:
    """A line for each step, evaluation, checkpoint, restore, knob and fault; woken by the blocking read. After `stop` what
    is on the logs already is shown too."""
    while True:
        over = stop.is_set()
        try:
            fresh, more = await feed.read(0.0 if over else REFRESH_S)
        except BusUnreachable as error:
            say(f"console: {error}")
            if over:
                return
            continue  # whoever runs the bus decides; a screen shows how long it has been silent
        for record in fresh:
            if line := plain_line(record, feed.history, total_steps=total_steps):
                say(line)
        if over and not more:
            return


async def _until_first_step(bus: Bus, feed: Feed, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Says every WAIT_SAID_S what is waited for, until there is a step."""
    began = bus.clock.monotonic()
    while not await _stopped(stop, WAIT_SAID_S) and not feed.history.steps:
        try:
            actors = [a for role in ("generation", "trainer") for a in (await read_snapshot(bus)).of_role(role)[:2]]
        except BusUnreachable:
            continue  # `_follow` says so
        said = [f"{a.vitals.actor} {state_text(a)} {waits_text(a)}".rstrip() for a in actors]
        say(f"no step yet after {duration(bus.clock.monotonic() - began)}: {'; '.join(said) or 'no actor has spoken yet'}")


class _Screen:
    def __init__(self, bus: Bus, feed: Feed, console: Console, total_steps: int) -> None:
        self._bus, self._feed, self._console, self._total = bus, feed, console, total_steps
        self._snapshot: Snapshot | None = None
        self._seen = bus.clock.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Snapshots and frames, the first at once; a bus that does not answer shows as such and is asked again."""
        with Live(console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look(stop))
                live.update(self._frame(), refresh=True)
                while not await _stopped(stop, REFRESH_S):
                    live.update(self._frame(), refresh=True)
            live.update(self._frame(), refresh=True)

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
            at = f" planned for step {record['at_step']}" if record.get("planned") else ""
            shown = ", ".join(f"{k}={v}" for k, v in (record.get("planned") or record["values"]).items())
            why = f" ({record['author']}: {record['reason']})" if record.get("reason") else ""
            return f"knob epoch {record['epoch']}{at}: {shown or 'nothing new'}{why}"
        case "fault":
            return f"{record['level']}: {record['actor']}: {record['event']}: {record['text']}"
        case "dead":
            return f"dead letter: {record['stream']} {record['sample']}: {record['error']}"
        case "sample" if len(history.samples) <= FIRST_SAMPLES or _asked_for(history):
            texts = f"{shorten(record['prompt'], 160)} -> {shorten(record['response'], 320)}"
            return f"sample {record['sample']}, reward {record['reward']:.4g}: {texts}"
        case "finished":
            return f"finished at step {record['step']}"
    return ""


def _asked_for(history: History) -> bool:
    """--debug-rollout-print-every: the first entry of the knobs has all settings."""
    return bool(history.knobs and history.knobs[0]["values"].get("debug_rollout_print_every"))


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `stop` that long."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
