"""From the options that name a run to a connection to its bus, or one line that says why there is none.

Reads run.json beyond what settings need: `pid` and `host` of the launcher, `blob_dir` of large bodies. All are optional,
a run on another host has none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from redis.exceptions import RedisError

from bus import Bus, BusConfig
from bus.errors import BusRefused, BusUnreachable
from bus.server import connect, without_secrets
from bus.streams.link import call
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.runs import RUN_FILE, RunRef

ANSWER_DEADLINE_S = 5.0


class RunDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher wrote about itself; zero and empty mean unknown."""

    pid: int = 0
    host: str = ""
    blob_dir: str = ""
    started: float = 0.0


def read_details(run_dir: Path | None) -> RunDetails:
    """Details from run.json; all unknown when there is no such file."""
    if run_dir is None:
        return RunDetails()
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunDetails)
    except (OSError, msgspec.DecodeError):
        return RunDetails()  # settings/runs.py has read the same file and complains about it


@asynccontextmanager
async def attached(ref: RunRef) -> AsyncIterator[Bus]:
    """The run's bus, for looking and for tools. Raises BusUnreachable or BusRefused in one line; creates nothing."""
    run = await _ask(ref)
    config = BusConfig(
        url=ref.bus_url, run=run, blob_dir=_blob_dir(ref), deadline_s=ANSWER_DEADLINE_S, room_deadline_s=ANSWER_DEADLINE_S
    )
    async with Bus(config) as bus:
        yield bus


def _blob_dir(ref: RunRef) -> str:
    directory = read_details(ref.run_dir).blob_dir
    # A directory that is not there must not be made by a tool that only looks.
    return directory if directory and Path(directory).is_dir() else ""


async def _ask(ref: RunRef) -> str:
    """Name of the run on the bus: the one given, or the only one there."""
    socket = ref.bus_url.partition("?")[0].removeprefix("unix://")
    if ref.bus_url.startswith("unix://") and not Path(socket).exists():
        raise BusUnreachable(_gone(ref, "its socket is not there"))
    client = connect(ref.bus_url)
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await call(client, "PING")
            known = await _runs_there(client)
    except (OSError, TimeoutError) as error:
        raise BusUnreachable(_gone(ref, _why(error))) from error
    except RedisError as error:
        if isinstance(error.__cause__, OSError) or "onnect" in str(error):
            raise BusUnreachable(_gone(ref, _why(error))) from error
        raise BusRefused(f"bus at {without_secrets(ref.bus_url)} refuses us: {_why(error)}. Correct --bus-url.") from error
    finally:
        await client.aclose()
    if ref.run is not None:
        if ref.run not in known and ref.run_dir is None:
            raise SettingsError(
                f"no such run on the bus at {without_secrets(ref.bus_url)}",
                field="--run",
                value=ref.run,
                remedy=nearest(ref.run, known) or (f"Runs there: {', '.join(known[:8])}." if known else "It holds none."),
            )
        return ref.run
    if len(known) == 1:
        return known[0]
    where = without_secrets(ref.bus_url)
    if not known:
        raise SettingsError(f"no run on the bus at {where}", remedy="Start one with miles-async train.")
    raise SettingsError(f"{len(known)} runs on the bus at {where}", remedy=f"Choose with --run: {', '.join(known[:8])}.")


async def _runs_there(client: object) -> list[str]:
    """Names of all runs on a server, from keys that every run has."""
    names: set[str] = set()
    for pattern in ("ma:{*}:vitals", "ma:{*}:state", "ma:{*}:events"):
        cursor: bytes = b"0"
        while True:
            cursor, keys = await call(client, "SCAN", cursor, "MATCH", pattern, "COUNT", 1000)  # type: ignore[arg-type]
            names |= {key.decode("utf-8", "replace").partition("{")[2].rpartition("}")[0] for key in keys}
            if cursor == b"0":
                break
    return sorted(names)


def _gone(ref: RunRef, why: str) -> str:
    where = without_secrets(ref.bus_url)
    if ref.run_dir is None:
        return f"no bus at {where}: {why}. Start that Redis or correct --bus-url."
    report = ref.run_dir / "report.html"
    read = f" What it did is in {report if report.exists() else ref.run_dir}." if ref.run_dir.exists() else ""
    return (
        f"run {ref.run} is not running: no bus at {where} ({why}). The same miles-async train command resumes it.{read}"
    )


def _why(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return f"no answer within {ANSWER_DEADLINE_S:g} s"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__


__all__ = ("ANSWER_DEADLINE_S", "RunDetails", "attached", "read_details")
