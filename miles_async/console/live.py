"""The console that follows a run: a picture on one screen, or a line for each thing worth a line.

Reads  the run's logs through a feed; for the picture also the hub    Writes  nothing    Owns  the history for the picture
Always true: it only looks. The recorder (actors/recorder) keeps the record; this shows what it would write down.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live

from actors.recorder.feed import Feed
from actors.runtime.deadline import within
from actors.runtime.snapshot import read_snapshot
from bus import Bus
from bus.errors import BusUnreachable, printable
from bus.messages.waits import Wait
from miles_async.console.lines import plain_line, state_text, waits_text
from miles_async.console.text import duration
from miles_async.console.top.page import Page
from miles_async.console.web.hub import Hub

Mode = Literal["live", "plain", "none"]
REFRESH_S = 0.5
LOOK_S = 1.0  # of the picture
WAIT_SAID_S = 15.0


async def run_console(
    bus: Bus,
    feed: Feed,
    *,
    mode: Mode,
    total_steps: int,
    stop: asyncio.Event,
    folder: Path | None = None,
    out: TextIO | None = None,
) -> None:
    """Follow the feed and show the run until `stop`. `live`, the first page of `miles-async top`, needs a terminal and becomes
    `plain` without one. `total_steps` 0 = unknown. `folder`: of the run, where it is here."""
    console = Console(file=out or sys.stdout, highlight=False)
    live = mode == "live" and console.is_terminal
    lines = mode != "none" and not live

    def say(line: str) -> None:
        if lines:
            console.out(printable(line), highlight=False)

    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(_follow(feed, stop, say, total_steps, 0.0 if lines else REFRESH_S))
        if live:
            hub = Hub(bus, feed, folder, total_steps=total_steps, refresh_s=LOOK_S)
            tasks.create_task(hub.run(stop))
            tasks.create_task(_picture(Page(hub, seen_in=folder), console, following))
        elif mode != "none":
            tasks.create_task(_until_first_step(bus, feed, stop, say))


async def _follow(feed: Feed, stop: asyncio.Event, say: Callable[[str], None], total_steps: int, pause_s: float) -> None:
    """A line for each step, evaluation, checkpoint, restore, knob and fault; woken by the blocking read. With a pause between
    reads, where no line is waited for, many workers' beats do not wake it one by one. After `stop` what is on the logs already is
    shown too."""
    while True:
        over = stop.is_set()
        try:
            fresh, more = await feed.read(0.0 if over or pause_s else REFRESH_S)
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
        if pause_s and not more:
            await within(pause_s, stop)


async def _until_first_step(bus: Bus, feed: Feed, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """Says every WAIT_SAID_S what is waited for, until there is a step."""
    began = bus.clock.monotonic()
    while not await within(WAIT_SAID_S, stop) and not feed.history.steps:
        try:
            snapshot = await read_snapshot(bus)
        except BusUnreachable:
            continue  # `_follow` says so
        if feed.history.steps:  # it came meanwhile
            return
        actors = [a for a in snapshot.of_role("sampler") if a.vitals.wait is Wait.READING]
        actors += [a for role in ("generation", "trainer") for a in snapshot.of_role(role)[:2]]
        said = [f"{a.vitals.actor} {state_text(a)} {waits_text(a)}".rstrip() for a in actors]
        if not snapshot.living("generation"):
            said.append("no rollout worker is there yet")
        say(f"no step yet after {duration(bus.clock.monotonic() - began)}: {'; '.join(said)}")


async def _picture(page: Page, console: Console, following: asyncio.Task[None]) -> None:
    """Drawn anew at each look of the hub, the first at once, the last when all of the logs was followed; a bus that does not
    answer shows as such."""
    with Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop") as live, page:
        live.update(page.whole(*console.size), refresh=True)
        while not following.done():
            await page.follow(LOOK_S)
            live.update(page.whole(*console.size), refresh=True)
        await page.hub.look()
        await page.follow(0.0)
        live.update(page.whole(*console.size), refresh=True)
