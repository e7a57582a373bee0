"""Show a run in the browser: the flow, curves, engines, samples, knobs, dead letters, events. Of an ended run, what it left.

The page is served on loopback, to whoever opens the address that is printed. From another machine: ssh -L 8420:127.0.0.1:8420 HOST.
Ctrl-C ends the console, not the run.
"""

import argparse
import asyncio
import signal

from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.runs import RunRef


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, --port, --read-only and the shared options."""
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: 8420, or any where that is taken)")
    parser.add_argument("--read-only", action="store_true", help="nothing can be changed from the page")
    add_run_options(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """0 when the operator left."""
    asyncio.run(_console(chosen_run(args), args.port, args.read_only))
    return 0


async def _console(ref: RunRef, port: int, read_only: bool) -> None:
    from miles_async.console.attach import watched
    from miles_async.console.live import run_console
    from miles_async.console.web.app import serve

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    why = "this console is read-only" if read_only else ""
    async with watched(ref) as (bus, here, feed, kept, total):
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_console(bus, feed, mode="none", total_steps=total, stop=stop))
                await serve(bus, feed, here, total_steps=total, port=port, read_only=why, kept=kept, stop=stop, say=_say)
        finally:
            stop.set()
    print("left the console" + ("" if kept else "; the run goes on"))


def _say(line: str) -> None:
    print(f"{line}\nCtrl-C ends it", flush=True)
