"""One process, one actor, one task group: if any task dies, the process stops before it serves another entry.

Shutdown, in order: 1 SIGTERM, SIGINT or a request on the bus sets `draining` (a second signal ends at once) · 2 the room
finishes or parks what it holds, within drain_timeout_s (drain.py) · 3 heartbeat and knob follower stop, within LAST_S · 4 last
vitals · 5 connections close · 6 what code of the user's started and left ends (leftovers.py).

Exit codes: 10 work done (not 0, which any `sys.exit()` of code that it runs would say) · 11 asked to end, and drained (restart,
unless the run ends) · 2 refused at start (never restarted) · 65 the run ends with its cause (never restarted) · 70 crashed · 75 the
bus went away (restart) · 76 the bus came back without this run (the launcher gives it the checkpoint's state and starts all of them
again) · 77 another process has this actor's name (the launcher looks for that one, and else waits for its end).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.runtime.contained import contained, lose_prints
from actors.runtime.context import STOP_WISH, ActorSpec, Context
from actors.runtime.deadline import within
from actors.runtime.drain import drain_watch
from actors.runtime.holding import take_name
from actors.runtime.leftovers import ends_with_us
from actors.runtime.loop import run_loop
from actors.runtime.loopwatch import watched
from actors.runtime.priority import ACTOR_NICE, lower_to
from actors.runtime.refusals import Refused as Refused
from actors.runtime.refusals import RunEnds as RunEnds
from actors.runtime.usage import tell_usage
from bus import Bus
from bus.errors import BusRefused, BusUnreachable, BusWentBack, Garbage, MilesAsyncError, NameTaken, printable
from bus.knobs.live import LiveKnobs

R = TypeVar("R")
EXIT_DONE, EXIT_DRAINED, EXIT_REFUSED, EXIT_RUN_ENDS = 10, 11, 2, 65
EXIT_CRASHED, EXIT_BUS_GONE, EXIT_BUS_BACK, EXIT_NAME_TAKEN = 70, 75, 76, 77
LAST_S = 5.0  # for what goes on beside the room, after its end: a bus that is away keeps nobody then
END_AGAIN_S = 30.0  # for what was cancelled to end; engines and processes are ended meanwhile


def main(room_type: type[R], body: Callable[[Context, R], Awaitable[None]]) -> None:
    """`python -m actors.<room> [MARK] SPEC.json` (the mark is the launcher's): read the spec, run the room, exit with a
    code of those above."""
    log_to_stderr()
    try:
        spec = msgspec.json.decode(Path(sys.argv[-1]).read_bytes(), type=ActorSpec)
        room = msgspec.convert(spec.room, room_type)
    except (IndexError, OSError, msgspec.MsgspecError) as error:
        print(f"actor spec refused: {error}. Actors are started by `miles-async train` or `worker`.", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    try:
        code = run_loop(run_process(spec, room, body))
    except SystemExit as end:  # of a second signal, or of code that this process runs
        last = traceback.extract_tb(end.__traceback__)[-1]
        logging.getLogger(spec.name).error("sys.exit(%r) at %s:%s ended this process", end.code, last.filename, last.lineno)
        sys.exit(EXIT_CRASHED)
    # For a launcher that adopted this process and cannot wait for it.
    try:
        Path(sys.argv[-1]).with_suffix(".exit").write_text(f"{os.getpid()} {code}\n")
    except OSError as error:
        logging.getLogger(spec.name).warning("exit status not noted: %s", error)
    sys.exit(code)


async def run_process(spec: ActorSpec, room: R, body: Callable[[Context, R], Awaitable[None]]) -> int:
    """`run_actor` in a process that is the actor's own: what code of the user's starts there ends with it, and its loop is
    watched."""
    async with ends_with_us(), watched(spec):
        return await run_actor(spec, room, body)


TELL_EACH_CALL = ("httpx", "httpx2", "openai")
"""Loggers of clients in agents and rewards: a line at INFO for each call, whose address may hold a key."""


def log_to_stderr() -> None:
    """One line per event with time and actor; nothing in it that a terminal would obey. A full disk there fails nobody."""
    lose_prints()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Printable("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name in TELL_EACH_CALL:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


async def run_actor(spec: ActorSpec, room: R, body: Callable[[Context, R], Awaitable[None]]) -> int:
    """This process is the actor from here on; returns the exit code."""
    log = logging.getLogger(spec.name)
    try:
        async with Bus(spec.bus) as bus:
            await take_name(bus, spec.name, spec.heartbeat_s)
            log.info("has its name, generation %d", bus.names.hold.generation if bus.names.hold is not None else 0)
            knobs = LiveKnobs(bus)
            await knobs.open()
            context = Context(spec, bus, knobs)
            return await _supervise(context, room, body)
    except (Exception, ExceptionGroup) as raised:
        error = _first(raised)
        if isinstance(error, MilesAsyncError):
            log.error("%s: %s", type(error).__name__, error)
        else:
            log.error("%s crashed", spec.name, exc_info=error)
            log.error("%s: %s", type(error).__name__, disk_text(error, (spec.run_dir, "/dev/shm")) or error)
        if isinstance(error, Refused):
            return EXIT_REFUSED
        if isinstance(error, RunEnds | Garbage):
            return EXIT_RUN_ENDS
        if isinstance(error, NameTaken):
            return EXIT_NAME_TAKEN
        if isinstance(error, BusWentBack):
            return EXIT_BUS_BACK
        return EXIT_BUS_GONE if isinstance(error, BusUnreachable | BusRefused) else EXIT_CRASHED


def disk_text(error: BaseException, places: Sequence[str]) -> str:
    """What is full and what to do, of an error that a full disk made; empty for any other. Libraries wrap the system's."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not full and "No space left on device" not in str(error):
        return ""
    name = getattr(error, "filename", None)
    free = {place: shutil.disk_usage(place).free for place in (name, *places) if place and os.path.exists(place)}
    least = ", ".join(f"{place} has {n / 1e6:.0f} MB free" for place, n in sorted(free.items(), key=lambda item: item[1]))
    what = f" for {name}" if name else ""
    return f"no space left{what}: {least}. Free space there (a container's /dev/shm: --shm-size); the same command goes on"


async def _supervise(context: Context, room: R, body: Callable[[Context, R], Awaitable[None]]) -> int:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    signals = 0
    asked = False

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            raise SystemExit(EXIT_CRASHED)
        drain()

    def drain() -> None:
        nonlocal asked
        asked = True
        context.state = "draining"
        context.draining.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    async def work() -> None:
        try:
            context.state = "running"
            lower_to(ACTOR_NICE)
            with contained():
                await body(context, room)
        finally:
            over.set()
            context.news.set()

    parts = {
        context.name: work(),
        "heartbeat": _beside(_heartbeat(context, over, drain), over),
        "knobs": _beside(context.live_knobs.follow(over), over),
        "usage": _beside(tell_usage(context, over), over),
        "drain": drain_watch(context, over),
    }
    try:
        await together(parts)
    except* Exception as group:
        context.state = "failed"
        context.note = str(_first(group))[:500]
        if not isinstance(_first(group), NameTaken):  # whose last words would be the other's
            await _last_words(context)
        raise
    context.state = "stopped"
    await _last_words(context)
    return EXIT_DRAINED if asked else EXIT_DONE


async def together(parts: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """All of them until all have ended; when one fails, the others are ended. They are cancelled again and again: `wait_for` of
    Python 3.11 swallows a cancellation that comes together with what it waits for, and an actor of which a part never ended went on
    taking work without a heartbeat."""
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    again: asyncio.TimerHandle | None = None

    def end_all() -> None:
        nonlocal again
        for task in asyncio.all_tasks() - before:
            task.cancel()
        again = loop.call_later(END_AGAIN_S, end_all)

    async def part(of: Coroutine[Any, Any, None]) -> None:
        nonlocal again
        try:
            await of
        except Exception:
            again = again or loop.call_later(END_AGAIN_S, end_all)
            raise

    try:
        async with asyncio.TaskGroup() as tasks:
            for name, of in parts.items():
                tasks.create_task(part(of), name=name)
    finally:
        if again is not None:
            again.cancel()


async def _beside(part: Coroutine[Any, Any, None], over: asyncio.Event) -> None:
    """Waits for its end, and no longer than LAST_S after the room's: it may wait for the bus, for as long as that may be away."""

    async def limit() -> None:
        await over.wait()
        await asyncio.sleep(LAST_S)
        task.cancel()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(part)
        limited = tasks.create_task(limit())
        task.add_done_callback(lambda _: limited.cancel())


async def _heartbeat(context: Context, over: asyncio.Event, drain: Callable[[], None]) -> None:
    """Waits for the next beat, for news that do not wait for it, or the end; woken by any. Each beat hears whether the whole run
    is to stop."""
    while not over.is_set():
        context.news.clear()
        await context.beat()
        if not context.draining.is_set() and await context.bus.state(STOP_WISH):
            drain()
        await within(context.spec.heartbeat_s, context.news)


async def _last_words(context: Context) -> None:
    try:
        async with asyncio.timeout(2.0):
            await context.beat(leaves=True)
    except (TimeoutError, MilesAsyncError, OSError) as error:
        context.log.warning("last vitals not sent: %s", error)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
