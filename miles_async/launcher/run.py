"""`miles-async train`: check, start the bus, start the actors, keep them, end with a summary and a report.

Shutdown, in order: 1 trainer and evaluator are done, or the operator asks · 2 SIGTERM to all actors, which drain ·
3 the console and the recorder stop · 4 the embedded Redis stops (its append-only file stays) · 5 report and summary.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from actors.runtime.loop import run_loop
from bus import Bus, Out, SystemClock
from bus.client import connect
from bus.messages.control import Event
from bus.messages.policy import Finished
from bus.server.checks import check_server
from bus.server.embedded import EmbeddedRedis
from bus.topology import EVENTS, POLICY
from miles_async.console.live import run_console
from miles_async.console.recorder import Recorder
from miles_async.console.watchdog import watch
from miles_async.launcher.hooks import PROBES
from miles_async.launcher.local import RunFailed, Supervisor
from miles_async.launcher.lock import only_launcher
from miles_async.launcher.plan import Place, actor_spec, bus_config, room_specs
from miles_async.launcher.prepare import place_of, prepare_bus, token_counter
from miles_async.settings.checks import check_prompt_lengths, preflight
from miles_async.settings.dump import dump_toml
from miles_async.settings.run import RunSettings
from miles_async.settings.runs import write_run_file


def train(settings: RunSettings) -> int:
    """Run to the end; exit status 0 done or drained, 1 failed, 2 when an actor refused what it was given."""
    found = preflight(settings, probes=PROBES)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    place = place_of(settings)
    counter = token_counter(Path(place.model_dir), apply_chat_template=settings.rollout.apply_chat_template)
    check_prompt_lengths(settings, found.prompts, counter, found.model_context)
    run_dir = Path(place.run_dir)
    with only_launcher(run_dir, settings.launch.name):
        (run_dir / "settings.toml").write_text(dump_toml(settings))
        return run_loop(_train(settings, place, run_dir))


async def _train(settings: RunSettings, place: Place, run_dir: Path) -> int:
    embedded: EmbeddedRedis | None = None
    ours = False  # whether what runs is ours to end: not a server and actors that an earlier launcher left alive
    url = settings.bus.bus_url
    if url is None:
        embedded = EmbeddedRedis(run_dir)
        await asyncio.to_thread(embedded.start)
        ours = embedded.started_here
        url = embedded.url
    try:
        client = connect(url)
        try:
            facts = await check_server(client, url=url)
        finally:
            await client.aclose()
        for warning in facts.warnings:
            print(f"note: {warning}", file=sys.stderr)
        write_run_file(run_dir, run=settings.launch.name, bus_url=url)
        async with Bus(bus_config(settings, url, place)) as bus:
            for note in await prepare_bus(bus, settings, place):
                print(f"note: {note}", file=sys.stderr)
            ours = True
            status = await _supervise(settings, place, bus, run_dir, embedded)
    finally:
        if ours:  # published copies; checkpoints lie elsewhere
            await asyncio.to_thread(shutil.rmtree, place.weights_dir, True)
        if ours and embedded is not None:
            await asyncio.to_thread(embedded.stop)
    if settings.launch.report:
        from miles_async.console.report import write_report  # matplotlib: only when there is something to draw

        report = await asyncio.to_thread(write_report, run_dir)
        print(f"report: {report}")
    return status


async def _supervise(
    settings: RunSettings, place: Place, bus: Bus, run_dir: Path, embedded: EmbeddedRedis | None
) -> int:
    recorder = Recorder(bus, run_dir)
    supervisor = Supervisor(
        run_dir,
        SystemClock(),
        budget=settings.launch.restart_budget,
        threads={"trainer": settings.perf.trainer_threads, "generation": settings.perf.engine_threads},
        furthest=lambda: recorder.history.furthest,
    )
    for name, role, room in room_specs(settings, place):
        supervisor.add(actor_spec(settings, place, bus.config, name, role, room))
    await supervisor.retire_others()
    (run_dir / "launcher.pid").write_text(f"{os.getpid()}\n")
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    stop = asyncio.Event()
    failure: RunFailed | None = None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(recorder.follow(stop))
        tasks.create_task(watch(bus, stop))
        tasks.create_task(
            run_console(bus, mode=settings.launch.console, total_steps=place.num_rollout, run_dir=run_dir, stop=stop)
        )
        tasks.create_task(_tell(bus, supervisor, stop))
        if embedded is not None:
            tasks.create_task(_keep_redis(embedded, stop))
        watches = {name: asyncio.create_task(supervisor.watch(c)) for name, c in supervisor.children.items()}
        try:
            failure = await _until_over(watches, asked)
        finally:
            late = await supervisor.drain(timeout_s=settings.launch.drain_timeout_s + 5.0)
            await asyncio.gather(*watches.values(), return_exceptions=True)
            stop.set()
    last = await bus.last(POLICY)
    finished = bool(last) and isinstance(await bus.message(last[0]), Finished)
    for name in late:
        print(f"note: {name} did not drain in time and was killed; its entries stay pending", file=sys.stderr)
    if failure:
        print(f"miles-async: run {settings.launch.name} ended: {failure}", file=sys.stderr)
        return failure.status
    if not finished:
        print(f"run {settings.launch.name} stopped; the same command goes on from its last checkpoint")
    return 0


async def _until_over(watches: dict[str, asyncio.Task[None]], asked: asyncio.Event) -> RunFailed | None:
    """Waits for trainer and evaluator to be done, for a failure (returned), or for the operator."""
    wanted = {name for name in watches if name in ("trainer", "evaluator")}
    asking = asyncio.create_task(asked.wait())
    try:
        while True:
            await asyncio.wait([asking, *watches.values()], return_when=asyncio.FIRST_COMPLETED)
            for name, task in list(watches.items()):
                if task.done():
                    error = task.exception()
                    if isinstance(error, RunFailed):
                        if not _peers(name, watches):
                            return error
                        print(f"note: {error}; the other engines go on", file=sys.stderr)
                        error = None
                    if error is not None:
                        raise error
                    wanted.discard(name)
                    del watches[name]
            if asked.is_set() or not wanted:
                return None
    finally:
        asking.cancel()


def _peers(name: str, watches: Collection[str]) -> list[str]:
    """Generation workers that can do the work of the one that gave up; nobody can stand in for other actors."""
    return [w for w in watches if w != name and name.startswith("generation-") and w.startswith("generation-")]


async def _tell(bus: Bus, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Put what the supervisor notes (restarts, adoptions) on the events stream; woken by time or the end."""
    told = 0
    while True:
        over = stop.is_set()
        for kind, text in supervisor.notes[told:]:
            level: Literal["info", "warning"] = "warning" if kind == "restart" else "info"
            event = Event(actor="launcher", kind=kind, text=text, wall=bus.clock.wall(), level=level)
            await bus.append([Out(EVENTS, event)], repeatable=True)
            told += 1
        if over:
            return
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue


async def _keep_redis(embedded: EmbeddedRedis, stop: asyncio.Event) -> None:
    """Start the embedded server again when it died; its append-only file brings the streams back."""
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), 0.2)
        except TimeoutError:
            if not await asyncio.to_thread(embedded.is_alive):
                await asyncio.to_thread(embedded.start)
