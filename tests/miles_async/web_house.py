"""A run on a real Redis with its web console in front of it, as a browser meets it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from actors.recorder import samples
from actors.recorder.feed import Feed
from bus import Bus
from miles_async.console.live import run_console
from miles_async.console.web.app import serve
from miles_async.settings.runs import write_run_file
from tests.miles_async.console_data import ROOMS, Story, config, vitals

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> the answer is 4"


class Page:
    """`ask` and `tell` as the console's own page; `state` from the stream of events."""

    def __init__(self, session: aiohttp.ClientSession, address: str, story: Story) -> None:
        self.session, self.story = session, story
        self.address, self.url, self.token = address, address.partition("/?")[0], address.partition("token=")[2]
        self.state: dict[str, Any] = {}
        self.curves: dict[str, Any] = {}

    async def ask(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.json()

    async def tell(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        headers = {"Origin": self.url} | headers
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def until(self, holds: Any) -> None:
        """Follow a stream of events until `holds(self)`."""
        async with asyncio.timeout(20), self.session.get(f"{self.url}/events") as answer:
            assert answer.content_type == "text/event-stream"
            name = ""
            async for raw in answer.content:
                line = raw.decode().strip()
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    (self.curves if name == "curves" else self.state).update(json.loads(line[6:]))
                    if holds(self):
                        return


async def beat(bus: Bus, stop: asyncio.Event) -> None:
    """Every actor lives on, on a slow host too; woken by time or the end."""
    actors = [vitals(name) for name in ROOMS] + [vitals(f"generation-{i}", "generation", version=1) for i in range(2)]
    while not stop.is_set():
        for actor in actors:
            await bus.set_vitals(actor.actor, replace(actor, wall=bus.clock.wall()))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)


@asynccontextmanager
async def console(url: str, run: str, runs_dir: Path, *, read_only: str = "") -> AsyncIterator[Page]:
    """The console of a run on which the whole story has happened; logged in."""
    folder = runs_dir / run
    write_run_file(folder, run=run, bus_url=url)
    for step in (1, 4):
        kept = {"step": step, "group": "g1", "version": 1, "tokens": 4, "finish": "stop", "prompt": "2+2", "label": "4"}
        turns = [{"by": "model", "text": "call calc"}, {"by": "environment", "text": "4"}, {"by": "model", "text": HOSTILE}]
        worst = {**kept, "sample": "g1/0", "reward": 0.0, "response": HOSTILE, "turns": turns}
        samples.append(folder, [{**kept, "sample": "g1/1", "reward": 1.0, "response": "4"}, worst])
    stop, printed = asyncio.Event(), asyncio.Queue[str]()
    async with Bus(config(url, run)) as bus:
        await Story(bus).whole()
        feed = Feed(bus)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beat(bus, stop))
            tasks.create_task(run_console(bus, feed, mode="none", total_steps=3, stop=stop))
            tasks.create_task(
                serve(bus, feed, folder, total_steps=3, port=0, read_only=read_only, stop=stop, say=printed.put_nowait)
            )
            try:
                async with asyncio.timeout(20):
                    address = "http" + (await printed.get()).partition(": http")[2]
                async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                    async with session.get(address) as answer:
                        assert answer.status == 200 and str(answer.url) == address.partition("?")[0]
                    yield Page(session, address, Story(bus))
            finally:
                stop.set()
        await feed.close()
