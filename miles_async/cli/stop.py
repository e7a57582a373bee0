"""Ask a run to stop: running samples are parked, a last checkpoint is written, actors end. The same train command
resumes it. Returns when it has stopped or when the time is up."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.runs import RunRef

POLL_S = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--wait and the shared options."""
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long to wait for the end (default: %(default)g)",
    )
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the run has stopped, 1 when it has not within --wait."""
    return asyncio.run(_stop(chosen_run(args), args.wait))


async def _stop(ref: RunRef, wait_s: float) -> int:
    from bus.errors import BusUnreachable

    pid = certain_launcher(ref)
    try:
        name = await _tell(ref)
    except BusUnreachable:
        if pid is None:
            raise
        name = ref.run or ""
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        print(f"{name}: launcher {pid} was asked to stop", file=sys.stderr)
    else:
        print(f"{name}: no launcher of it on this host; the wish lies on the bus for it", file=sys.stderr)
    return await _wait(ref, name, pid, wait_s)


async def _tell(ref: RunRef) -> str:
    """Leave the wish on the events stream; returns the run's name."""
    from bus import Out
    from bus.messages.control import Event
    from bus.topology import EVENTS
    from miles_async.console.attach import attached

    who = f"stop@{socket.gethostname()}:{os.getpid()}"
    async with attached(ref) as bus:
        event = Event(actor=who, kind="stop requested", text="miles-async stop", wall=bus.clock.wall())
        await bus.append([Out(EVENTS, event)], repeatable=True)
        return bus.config.run


async def _wait(ref: RunRef, name: str, pid: int | None, wait_s: float) -> int:
    """Until the launcher is gone, or without one until no actor lives."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    alive = ["its launcher"]
    while loop.time() < until:
        alive = [f"launcher {pid}"] if pid is not None and launcher_runs(pid) else []
        if pid is None:
            alive = await _living(ref)
        if not alive:
            print(f"{name} has stopped. The same miles-async train command resumes it.")
            return 0
        await asyncio.sleep(POLL_S)
    print(
        f"miles-async stop: {name} has not stopped within {wait_s:g} s; still there: {', '.join(alive[:6])}. "
        "Wait longer with --wait, or look with miles-async status.",
        file=sys.stderr,
    )
    return 1


async def _living(ref: RunRef) -> list[str]:
    from bus.errors import BusUnreachable
    from miles_async.console.attach import attached
    from miles_async.console.snapshot import read_snapshot

    try:
        async with attached(ref) as bus:
            snapshot = await read_snapshot(bus)
    except BusUnreachable:
        return []  # an embedded bus ends with its run
    return [actor.vitals.actor for actor in snapshot.actors if actor.life == "alive"]


def certain_launcher(ref: RunRef) -> int | None:
    """The launcher's process id, if it is certain that this process is it: an id may have been given to another process
    since, or belong to another host that shares the folder."""
    import psutil

    from miles_async.console.attach import PID_FILE, launcher_pid

    pid = launcher_pid(ref.run_dir)
    if ref.run_dir is None or not pid:
        return None
    try:
        process = psutil.Process(pid)
        written = (ref.run_dir / PID_FILE).stat().st_mtime
        # Clocks of process table and file system agree to a tick or two; a recycled id is younger by far more.
        ours = process.create_time() <= written + 1.0 and is_ours(process.cmdline())
    except (psutil.Error, OSError):
        return None
    return pid if ours else None


def is_ours(words: Sequence[str]) -> bool:
    """Whether a command line is a launcher's: this program, script or module, told to train. A path of that name proves
    nothing."""
    return any(Path(word).name in ("miles-async", "miles_async") and then == "train" for word, then in pairwise(words))


def launcher_runs(pid: int) -> bool:
    """Whether it is still there; a zombie that nobody has collected has ended."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
