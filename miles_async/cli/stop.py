"""Ask a run to stop: running samples are parked, a last checkpoint is written, actors end, with or without a launcher, from
any host that reaches its bus. The same train command resumes it by its name. Returns when it has stopped or when the time is up."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bus.messages.events import EventKind
from miles_async.cli.options import add_run_options, chosen_run
from miles_async.settings.runs import RunRef

POLL_S = 0.25
STARTS = ("train", "quickstart")  # commands whose process is a launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--wait and the shared options."""
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long to wait for the end (default: %(default)g)",
    )
    add_run_options(parser, positional=True)


def run(args: argparse.Namespace) -> int:
    """0 when the run has stopped, 1 when it has not within --wait."""
    return asyncio.run(stop(chosen_run(args), args.wait))


async def stop(ref: RunRef, wait_s: float) -> int:
    """Ask it, and wait for its end for at most `wait_s` seconds; 0 when it has ended, else 1. Says so, too."""
    from bus.errors import BusFull, BusUnreachable

    pid = certain_launcher(ref)
    try:
        name = await _wish(ref)
    except (BusUnreachable, BusFull):  # with its disk full, that run above all is to be stopped: its launcher hears a signal
        if pid is None and not living_actors(ref):
            raise
        name = ref.run or ""
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        print(f"{name}: launcher {pid} was asked to stop", file=sys.stderr)
    else:
        seen = "no launcher of it on this host; its actors were" if ref.run_dir is not None else "its launcher and actors were"
        print(f"{name}: {seen} asked to stop", file=sys.stderr)
    return await _wait(ref, name, pid, wait_s)


async def _wish(ref: RunRef) -> str:
    """Lay the wish on the bus, where a launcher and, without one, each actor hears it within a heartbeat; the run's name."""
    from actors.runtime.context import STOP_WISH
    from bus import Commit, Out
    from bus.messages.control import Event
    from bus.topology import EVENTS
    from miles_async.console.attach import attached

    who = f"stop@{socket.gethostname()}:{os.getpid()}"
    async with attached(ref) as bus:
        event = Event(actor=who, kind=EventKind.STOP_REQUESTED, text="miles-async stop", wall=bus.clock.wall())
        await bus.commit(Commit(state={STOP_WISH: who}, append=(Out(EVENTS, event),)))
        return bus.config.run


async def _wait(ref: RunRef, name: str, pid: int | None, wait_s: float) -> int:
    """Until the launcher is gone, or without one until no actor lives; then the bus that was the run's own is ended too."""
    from actors.runtime.child import is_alive

    loop = asyncio.get_running_loop()
    until, signalled = loop.time() + wait_s, False
    while True:
        alive = [f"launcher {pid}"] if pid is not None and is_alive(pid) else []
        heard = True
        if pid is None:
            heard, alive = await _living(ref)
            alive = alive or [f"{actor} (pid {number})" for actor, number in living_actors(ref).items()]
            if not heard and not signalled:  # nobody can hear the wish
                signalled = True
                for actor in living_actors(ref).values():
                    os.kill(actor, signal.SIGTERM)
        if not alive and (heard or ref.run_dir is not None):
            await asyncio.to_thread(_clear, ref)
            print(f"{name} has stopped. The same miles-async train command with --name {name} resumes it.")
            return 0
        if loop.time() > until:
            break
        await asyncio.sleep(POLL_S)
    unknown = "its bus does not answer, so nothing is known of its actors"
    left = f"still there: {', '.join(alive[:9])}" if alive else unknown
    said = f"{name} has not stopped within {wait_s:g} s; {left}"
    print(f"miles-async stop: {said}. Wait longer with --wait, or look with miles-async status.", file=sys.stderr)
    return 1


async def _living(ref: RunRef) -> tuple[bool, list[str]]:
    """Whether the bus answered, and who lives as far as it knows."""
    from actors.runtime.snapshot import read_snapshot
    from bus.errors import BusUnreachable
    from miles_async.console.attach import attached

    try:
        async with attached(ref) as bus:
            snapshot = await read_snapshot(bus)
    except BusUnreachable:
        return False, []
    return True, [actor.vitals.actor for actor in snapshot.living()]


def living_actors(ref: RunRef) -> dict[str, int]:
    """Pids by name of the actors of the run that are processes of this host."""
    from miles_async.launcher.local import running

    return {name: found[0][0] for name, found in running(ref.run_dir).items()} if ref.run_dir is not None else {}


def _clear(ref: RunRef) -> None:
    """What a launcher does last, where none is left to do it: the run's own Redis ends, its published weights leave memory."""
    from bus.server import EmbeddedRedis
    from miles_async.launcher.prepare import free_weights, shared_memory

    if ref.run_dir is None or certain_launcher(ref) is not None:
        return
    free_weights(shared_memory(ref.run_dir))
    server = EmbeddedRedis(ref.run_dir)
    if ref.bus_url.startswith("unix://") and (ref.run_dir / "redis" / "lock").exists() and server.adopt():
        server.stop()


def certain_launcher(ref: RunRef) -> int | None:
    """The launcher's process id, if it is certain that this process is it: an id may have been given to another process
    since, or belong to another host that shares the folder."""
    import psutil

    from miles_async.console.attach import PID_FILE, launcher_pid
    from miles_async.launcher.lock import is_kept

    pid = launcher_pid(ref.run_dir)
    if ref.run_dir is None or not pid:
        return None
    try:
        process = psutil.Process(pid)
        written = (ref.run_dir / PID_FILE).stat().st_mtime
        # Clocks of process table and file system agree to a tick or two; a recycled id is younger by far more.
        ours = process.create_time() <= written + 1.0 and is_ours(process.cmdline()) and is_kept(ref.run_dir)
    except (psutil.Error, OSError):
        return None
    return pid if ours else None


def is_ours(words: Sequence[str]) -> bool:
    """Whether a command line is a launcher's: this program, script or module, told to train. A path of that name proves
    nothing."""
    return any(Path(word).name in ("miles-async", "miles_async") and then in STARTS for word, then in pairwise(words))
