"""What the web console costs, and how quick its page is.

    python -m scripts.bench console --workers 200 --seconds 30 --out console.json     # a fed bus
    python -m scripts.bench console --runs-dir runs --run quickstart --seconds 30      # beside a running run

Fed: so many workers beat every 2 s, 50 entries a second move over the streams, a step is done every second; `events_a_second`
says what came of it on a busy host. Measured: CPU seconds a second of the console's process, with one page watching and with
none, and of the recorder, which follows the same logs; states a second that a page gets; first paint in headless Chromium, if it
is there. Beside a run, in turns: the console's CPU as a share of that of the run (launcher, actors, engines, Redis) without
one, and the run's own CPU a step with a watched console over that without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil

from actors.recorder.actor import Recorder
from actors.runtime.snapshot import read_snapshot
from bus import Bus, BusConfig
from bus.server import EmbeddedRedis
from bus.topology import EVENTS, POLICY
from miles_async.settings.runs import find_run, write_run_file
from scripts.bench import REPO
from tests.miles_async.console_data import Story, step_done, vitals

RUN = "bench"
WARM_STEPS = 4
Steps = Callable[[], Awaitable[float]]


def feed(url: str, workers: int) -> None:
    """Until it is killed: heartbeats, entries that move, steps."""

    async def go() -> None:
        async with Bus(BusConfig(url=url, run=RUN)) as bus:
            story, n = Story(bus), 0
            await story.begin(workers=workers)
            while True:
                began = time.monotonic()
                beats = []
                for i in range(n % 20, workers, 20):  # a twentieth of them every tenth of a second
                    busy = {"in_flight": 40 + (i + n) % 24, "slots": 64, "counters": {"engine/kv_used": 0.5, "samples": n}}
                    beats.append(vitals(f"generation-{i}", "generation", host=f"host-{i // 8}", version=1, **busy))
                await asyncio.gather(*(bus.set_vitals(beat.actor, beat) for beat in beats))
                await story.say(EVENTS, *beats)
                await story.issue(f"g{n}", n_samples=5)
                await story.generate()
                await story.score()
                await story.judge(f"g{n}", "zero_std_0" if n % 3 else "")
                if n % 10 == 0:
                    await story.say(POLICY, step_done(n // 10 + 1, (f"g{n}",)))
                n += 1
                await asyncio.sleep(max(0.0, began + 0.1 - time.monotonic()))

    asyncio.run(go())


def record(url: str, run_dir: Path) -> None:
    """The recorder, in a process of its own."""

    async def go() -> None:
        async with Bus(BusConfig(url=url, run=RUN)) as bus:
            await Recorder(bus, run_dir).follow(asyncio.Event())

    asyncio.run(go())


def cpu_s(roots: list[int]) -> float:
    """CPU seconds, user and system, of these processes and all below them, those that have ended included."""
    total, seen = 0.0, set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(root)
            for process in (top, *top.children(recursive=True)):
                if process.pid not in seen:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        total += sum(process.cpu_times()[:4])  # of children that have ended too, which are in nobody's list
                        seen.add(process.pid)
    return total


@contextlib.asynccontextmanager
async def page(address: str) -> AsyncIterator[dict[str, Any]]:
    """One page that watches; counts what it gets."""
    got: dict[str, Any] = {"states": 0, "bytes": 0}

    async def watch() -> None:
        headers = {"Authorization": f"Bearer {address.partition('token=')[2]}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None), read_bufsize=1 << 24) as session:
            async with session.get(f"{address.partition('/?')[0]}/events") as answer:
                async for line in answer.content:
                    got["states"] += line.startswith(b"event: state")
                    got["bytes"] += len(line)

    watching = asyncio.create_task(watch())
    try:
        yield got
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def first_paint_ms(address: str) -> float | None:
    """Of the second visit, as a browser counts it from the click; None without Chromium."""
    binary = shutil.which("chromium")
    if not binary or not shutil.which("chromedriver"):
        return None
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,900"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        for _ in range(2):
            driver.get(address)
            time.sleep(3)
        return float(driver.execute_script(paint))
    finally:
        driver.quit()


async def measure(
    run: str, runs_dir: Path, seconds: float, rounds: int, others: dict[str, list[int]], steps: Steps
) -> dict[str, Any]:
    """`rounds` times: no console, a console that nobody watches, one page. `others`: whose CPU is counted beside the console's."""
    spent: dict[str, list[dict[str, float]]] = {"no_console": [], "nobody_watches": [], "one_page": []}
    rates: dict[str, float] = {}
    paint = None

    async def spend(case: str, watched: dict[str, list[int]]) -> None:
        before, began, at = {name: cpu_s(found) for name, found in watched.items()}, time.monotonic(), await steps()
        await asyncio.sleep(seconds)
        took, made = time.monotonic() - began, await steps() - at
        used = {name: (cpu_s(found) - before[name]) / took for name, found in watched.items()}
        spent[case].append(used | {"steps": made / took})

    for n in range(rounds):
        await spend("no_console", others)
        command = [sys.executable, "-m", "miles_async", "console", run, "--runs-dir", str(runs_dir), "--read-only"]
        console = await asyncio.to_thread(subprocess.Popen, command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        try:
            assert console.stdout is not None
            address = "http" + (await asyncio.to_thread(console.stdout.readline)).strip().partition(": http")[2]
            watched = {"console": [console.pid], **others}
            await asyncio.sleep(2)  # what it does at its start is no part of what it costs
            await spend("nobody_watches", watched)
            async with page(address) as got:
                await asyncio.sleep(3)
                got.update(states=0, bytes=0)
                began = time.monotonic()
                await spend("one_page", watched)
                rates = {name: round(count / (time.monotonic() - began), 1) for name, count in got.items()}
            if n == rounds - 1:
                paint = await asyncio.to_thread(first_paint_ms, address)
        finally:
            console.terminate()
            console.wait()
    means = {case: {name: round(statistics.mean(one[name] for one in rows), 4) for name in rows[0]} for case, rows in spent.items()}
    return {"cpu_and_steps_a_second": means, "a_second": rates, "first_paint_ms": paint}


async def fed(workers: int, seconds: float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder) / RUN)
        server.start()
        write_run_file(Path(folder) / RUN, run=RUN, bus_url=server.url)
        feeder = multiprocessing.Process(target=feed, args=(server.url, workers), daemon=True)
        recorder = multiprocessing.Process(target=record, args=(server.url, Path(folder) / RUN), daemon=True)
        for process in (feeder, recorder):
            process.start()
        try:
            await asyncio.sleep(5)
            began, before = time.monotonic(), await events(server.url)
            async with Bus(BusConfig(url=server.url, run=RUN)) as bus:

                async def steps() -> float:
                    return float((await read_snapshot(bus)).policy.step)

                assert recorder.pid is not None
                found = await measure(RUN, Path(folder), seconds, 1, {"recorder": [recorder.pid]}, steps)
            rate = (await events(server.url) - before) / (time.monotonic() - began)
        finally:
            for process in (feeder, recorder):
                process.kill()
                process.join()
            server.stop()
    return {"workers": workers, "events_a_second": round(rate, 1), **found}


async def events(url: str) -> int:
    """Events ever appended."""
    async with Bus(BusConfig(url=url, run=RUN)) as bus:
        return (await read_snapshot(bus)).streams["events"].added


async def beside(runs_dir: Path, run: str, seconds: float, rounds: int) -> dict[str, Any]:
    """The run's processes are its launcher, all below it, and its Redis. The first steps, with their start, do not count."""
    ref = find_run(run=run, runs_dir=runs_dir, bus_url=None)
    async with Bus(BusConfig(url=ref.bus_url, run=run)) as bus:

        async def steps() -> float:
            return float((await read_snapshot(bus)).policy.step)

        async with asyncio.timeout(120):
            while await steps() < WARM_STEPS:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        of_run = [a.vitals.pid for a in (await read_snapshot(bus)).actors if a.life == "alive"]
        of_run.append(int((await bus.server_info())["process_id"]))
        found = await measure(run, runs_dir, seconds, rounds, {"run": of_run}, steps)
    means = found["cpu_and_steps_a_second"]
    alone, busy = means["no_console"], means["one_page"]
    found["console_share_of_run"] = round(busy["console"] / alone["run"], 4)
    found["run_cpu_a_step_over_without"] = round(busy["run"] / busy["steps"] / (alone["run"] / alone["steps"]), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3, help="turns beside a run (default %(default)s)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--run", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = beside(args.runs_dir, args.run, args.seconds, args.rounds) if args.run else fed(args.workers, args.seconds)
    text = json.dumps(asyncio.run(work), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
