"""The cockpit of a run in the terminal: alarms, flow, curves, engines, samples, knobs, dead letters, events, the doctor.

Come and go at will: q leaves it, the run goes on. Of a run that has ended it shows what its Redis kept. The last line
names the keys. With --plain, a line for each step and event until the run ends, for a pipe or a log; Ctrl-C leaves it.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.errors import SettingsError
from miles_async.settings.runs import RunRef

LOOK_S = 1.0  # a terminal is drawn anew at each look


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, --read-only and the shared options."""
    parser.add_argument("--read-only", action="store_true", help="nothing can be changed from here")
    parser.add_argument("--plain", action="store_true", help="lines instead of a screen")
    add_run_options(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """0 when the operator left, or the run has ended."""
    if not args.plain:
        _check_terminal()
    ref = chosen_run(args)
    if args.plain:
        try:
            asyncio.run(_lines(ref))
        except KeyboardInterrupt:
            print("left the view; the run goes on")
        return 0
    while asyncio.run(_top(ref, args.read_only)):
        continue
    return 0


def _check_terminal() -> None:
    term, remedy = os.environ.get("TERM", ""), "Use --plain, or miles-async status."
    streams = (sys.stdin, sys.stdout, sys.__stderr__)  # textual draws on the last
    if not all(stream is not None and stream.isatty() for stream in streams):
        raise SettingsError("top needs a terminal for its input, output and errors", remedy=remedy)
    if term in ("", "dumb", "unknown"):
        raise SettingsError("this terminal cannot place text on a screen", field="TERM", value=term, remedy=remedy)


def _ended(folder: Path | None) -> bool:
    """Whether the launcher has gone, with its own Redis, and left what that kept."""
    from actors.runtime.child import is_alive
    from miles_async.console.attach import launcher_pid

    pid = launcher_pid(folder)
    return bool(pid) and not is_alive(pid) and folder is not None and any((folder / "redis").glob("appendonly*"))


async def _lines(ref: RunRef) -> None:
    from miles_async.console.attach import until_over, watched
    from miles_async.console.live import run_console

    async with watched(ref, look=False) as (bus, _, feed, _, total):
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_console(bus, feed, mode="plain", total_steps=total, stop=stop))
            await until_over(bus)
            stop.set()
    print(f"run {bus.config.run} has ended" + ("" if feed.history.finished else " before its last step"))


async def _top(ref: RunRef, read_only: bool) -> bool:
    """Whether to attach again: the run has ended meanwhile."""
    from miles_async.console.attach import watched
    from miles_async.console.live import run_console
    from miles_async.console.top.app import AGAIN, Terminal, Top
    from miles_async.console.verbs import Verbs
    from miles_async.console.web.hub import Hub

    stop = asyncio.Event()
    async with watched(ref) as (bus, here, feed, kept, total):
        why = "this run has ended, this is what its Redis kept" if kept else "read-only" if read_only else ""
        hub = Hub(bus, feed, here, total_steps=total, kept=kept, refresh_s=LOOK_S)
        over = lambda: not kept and _ended(here)  # noqa: E731
        app = Top(hub, Verbs(bus, here, "top"), read_only=why, run_dir=here, driver=Terminal, over=over)
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, app.exit)
        async with asyncio.TaskGroup() as tasks:
            console = run_console(bus, feed, mode="none", total_steps=total, stop=stop)
            aside = [tasks.create_task(console), tasks.create_task(hub.run(stop))]
            await app.run_async()
            for task in aside:  # they only look: who leaves does not wait for a bus that does not answer
                task.cancel()
    if app.return_code == AGAIN:
        return True
    print("left the view" + ("" if kept else "; the run goes on"))
    return False
