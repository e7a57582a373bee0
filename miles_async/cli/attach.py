"""Show a run as its launcher shows it: after a closed terminal, or from another one. Ctrl-C ends the view and leaves the run
alone; the end of the run ends the view."""

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus

LOOK_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, --console and the shared options."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="name of the run; as --run")
    parser.add_argument("--console", choices=("live", "plain"), default="live", help="view (default: %(default)s)")
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the run has ended or the operator left."""
    args.run = args.run or args.name
    ref = chosen_run(args)
    try:
        asyncio.run(_attach(ref, args.console))
    except KeyboardInterrupt:
        print("left the view; the run goes on")
    return 0


async def _attach(ref: RunRef, mode: str) -> None:
    from miles_async.console.attach import attached, open_here
    from miles_async.console.live import run_console

    async with attached(ref) as bus:
        here, feed = await open_here(bus, ref)
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_until_over(bus, stop))
                total = total_steps(here)
                tasks.create_task(run_console(bus, feed, mode=mode, total_steps=total, stop=stop))  # type: ignore[arg-type]
        finally:
            await feed.close()
    print(f"run {bus.config.run} has ended" + ("" if feed.history.finished else " before its last step"))


def total_steps(folder: Path | None) -> int:
    """Steps that a run's settings ask for; 0 = unknown."""
    from miles_async.console.report_data import read_settings

    return int(read_settings(folder).get("rollout", {}).get("num_rollout", 0)) if folder is not None else 0


async def _until_over(bus: "Bus", stop: asyncio.Event) -> None:
    """Waits until nobody of the run lives, or its bus is gone with it; asks once in LOOK_S."""
    from actors.runtime.snapshot import read_snapshot
    from bus.errors import BusUnreachable

    while True:
        try:
            actors = (await read_snapshot(bus)).actors
        except BusUnreachable:
            break
        if actors and not any(actor.life == "alive" for actor in actors):
            break
        await asyncio.sleep(LOOK_S)
    stop.set()
