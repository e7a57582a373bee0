"""From the options that name a run to a connection to its bus, or one line that says why there is none.

Reads what the launcher left: its process id in the run's folder, and on the bus the run's identity with the limits that
its actors use. A run on another host may have neither within reach.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from redis.exceptions import BusyLoadingError, RedisError

from bus import Bus, BusConfig
from bus.client import without_secrets
from bus.errors import BusRefused, BusUnreachable
from bus.identity import Identity, identity_at, read_identity, runs_on
from bus.streams.link import LOGIN
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.runs import RunRef, finished_run, read_settings

if TYPE_CHECKING:  # who only asks a bus does without what follows a run, which takes as long to load as all else here
    from actors.recorder.feed import Feed

ANSWER_DEADLINE_S = 5.0
LOOK_S = 1.0  # between two questions whether anybody of a run lives
PID_FILE = "launcher.pid"


def launcher_pid(run_dir: Path | None) -> int:
    """Process id that the launcher wrote into the run's folder; 0 when there is none."""
    if run_dir is None:
        return 0
    try:
        text = (run_dir / PID_FILE).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


@asynccontextmanager
async def attached(ref: RunRef, *, look: bool = False) -> AsyncIterator[Bus]:
    """The run's bus, for looking and for tools. Raises BusUnreachable or BusRefused in one line; creates nothing. `look`: for
    one that only looks, a run that has ended is shown as the append-only file of its own Redis has it (says so on stderr)."""
    async with AsyncExitStack() as stack:
        try:
            run, identity = await _asked(ref)
        except BusUnreachable:
            if not look or ref.run is None or ref.run_dir is None or not any((ref.run_dir / "redis").glob("appendonly*")):
                raise
            state = "has finished" if finished_run(ref.run_dir) is not None else "is not running"
            print(f"note: run {ref.run} {state}; this is a copy of what its Redis kept", file=sys.stderr)
            run, url = ref.run, await stack.enter_async_context(_kept(ref.run_dir))
            ref = replace(ref, bus_url=url)
            identity = await identity_at(url, run)
        plain = BusConfig(url=ref.bus_url, run=run, deadline_s=ANSWER_DEADLINE_S, room_deadline_s=ANSWER_DEADLINE_S)
        yield await stack.enter_async_context(Bus(_like_actors(plain, identity or Identity())))


@asynccontextmanager
async def _kept(run_dir: Path) -> AsyncIterator[str]:
    """Address of a private server on a copy of a run's data, which stays as it is; both are gone afterwards."""
    from bus.server import EmbeddedRedis

    no_data = shutil.ignore_patterns("lock", "redis.*", "temp-*")
    with tempfile.TemporaryDirectory(prefix="miles-async-") as copy:
        await asyncio.to_thread(shutil.copytree, run_dir / "redis", Path(copy) / "redis", ignore=no_data)
        server = EmbeddedRedis(Path(copy))
        try:
            await server.open()
            yield server.url
        finally:
            await asyncio.to_thread(server.stop)


def _like_actors(config: BusConfig, identity: Identity) -> BusConfig:
    """Limits of the run's own actors, so that the doctor judges by them. A blob directory that is not on this host is left
    out: a tool that only looks must not make it."""
    known: dict[str, Any] = {
        name: identity.bus[name] for name in ("lease_s", "max_deliveries", "stream_max_bytes") if name in identity.bus
    }
    blob_dir = str(identity.bus.get("blob_dir", ""))
    if blob_dir and Path(blob_dir).is_dir():
        known["blob_dir"] = blob_dir
    try:
        return msgspec.convert({**msgspec.to_builtins(config), **known}, BusConfig)
    except msgspec.ValidationError:
        return config


async def run_named(ref: RunRef) -> str:
    """Name of the run on the bus: the one given, or the only one there."""
    return (await _asked(ref))[0]


async def _asked(ref: RunRef) -> tuple[str, Identity | None]:
    """That name, and what the run says of itself there."""
    socket = ref.bus_url.partition("?")[0].removeprefix("unix://")
    socket = socket if socket.startswith("/") else socket.partition("@")[2]  # of a user
    if ref.bus_url.startswith("unix://") and not Path(socket).exists():
        raise BusUnreachable(_gone(ref, "its socket is not there"))
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            if ref.run is not None and ref.run_dir is not None:  # whatever else is there
                identity = await identity_at(ref.bus_url, ref.run)
                if identity is not None and _is_elsewhere(ref.run_dir, identity.run_dir):
                    raise BusUnreachable(_gone(ref, f"that one is kept in {identity.run_dir}, and this folder is a copy"))
                return ref.run, identity
            known = await runs_on(ref.bus_url)
            name = ref.run or (known[0] if len(known) == 1 else "")
            identity = await identity_at(ref.bus_url, name) if name else None
    except (OSError, TimeoutError) as error:
        raise BusUnreachable(_gone(ref, _why(error))) from error
    except RedisError as error:
        if isinstance(error, BusyLoadingError) or isinstance(error.__cause__, OSError) or "onnect" in str(error):
            raise BusUnreachable(_gone(ref, _why(error))) from error
        raise BusRefused(
            f"bus at {without_secrets(ref.bus_url)} refuses us: {_why(error)}. Correct --bus-url; {LOGIN[0].lower()}{LOGIN[1:]}"
        ) from error
    if ref.run is not None:
        if ref.run not in known:
            raise SettingsError(
                f"no such run on the bus at {without_secrets(ref.bus_url)}",
                field="--run",
                value=ref.run,
                remedy=nearest(ref.run, known) or (f"Runs there: {', '.join(known[:8])}." if known else "It holds none."),
            )
        return ref.run, identity
    if len(known) == 1:
        return known[0], identity
    where = without_secrets(ref.bus_url)
    if not known:
        raise SettingsError(f"no run on the bus at {where}", remedy="Start one with miles-async train.")
    raise SettingsError(f"{len(known)} runs on the bus at {where}", remedy=f"Choose with --run: {', '.join(known[:8])}.")


def _is_elsewhere(folder: Path, kept_in: str) -> bool:
    """Whether the run on a bus has another folder on this host: what lies in this one, a copy, is not of what runs there. Where it
    is mounted under another name, as in a container, nothing is known."""
    known = Path(kept_in)
    return bool(kept_in) and known.is_dir() and folder.is_dir() and not known.samefile(folder)


def _gone(ref: RunRef, why: str) -> str:
    where = without_secrets(ref.bus_url)
    if ref.run_dir is None:
        return f"no bus at {where}: {why}. Start that Redis or correct --bus-url."
    report = ref.run_dir / "report.html"
    read = f" What it did is in {report if report.exists() else ref.run_dir}." if ref.run_dir.exists() else ""
    if (done := finished_run(ref.run_dir)) is not None:
        return f"run {ref.run} has finished, with step {done.finished}. A higher --num-rollout continues it.{read}"
    return (
        f"run {ref.run} is not running: no bus at {where} ({why}). The same miles-async train command with --name {ref.run} "
        f"resumes it, with what you change in it.{read}"
    )


def _why(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return f"no answer within {ANSWER_DEADLINE_S:g} s"
        if isinstance(cause, ssl.SSLError):
            from bus.server.checks import tls_failure

            return tls_failure(cause)
        if isinstance(cause, FileNotFoundError):
            return "no such file (its socket, or one of its options for TLS)"
        if isinstance(cause, OSError) and cause.strerror:
            number = cause.errno or 0
            return (os.strerror(number) if number > 0 else cause.strerror).lower()  # asyncio's own text is no cause
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__


class Watched(NamedTuple):
    """A run that somebody looks at. `folder`: where this host has it. `feed`: goes on after what is on record there. `kept`: the
    bus is a copy of what an ended run's Redis kept. `total_steps`: that its settings ask for, 0 = unknown."""

    bus: Bus
    folder: Path | None
    feed: Feed
    kept: bool
    total_steps: int


@asynccontextmanager
async def watched(ref: RunRef, *, look: bool = True) -> AsyncIterator[Watched]:
    """As `attached`, with all that a view of the run needs."""
    from actors.recorder.feed import Feed
    from actors.recorder.file import stream_records

    async with attached(ref, look=look) as bus:
        known = await read_identity(bus)
        folder = ref.run_dir or (Path(known.run_dir) if known is not None and known.run_dir else None)
        here = folder if folder is not None and folder.is_dir() else None
        total = int(read_settings(here).get("rollout", {}).get("num_rollout", 0)) if here is not None else 0
        feed = await asyncio.to_thread(Feed, bus, stream_records(here) if here is not None else ())
        try:
            yield Watched(bus, here, feed, bus.config.url != ref.bus_url, total)
        finally:
            await feed.close()


async def until_over(bus: Bus) -> None:
    """Waits until nobody of the run lives, or its bus is gone with it."""
    from actors.runtime.snapshot import read_snapshot

    while True:
        try:
            snapshot = await read_snapshot(bus)
        except BusUnreachable:
            return
        if snapshot.actors and not snapshot.living():
            return
        await asyncio.sleep(LOOK_S)
