"""How commands find a run: `<runs_dir>/<name>/run.json`, written by the launcher when the bus is up.

run.json holds a RunFile; the newest file is the default run.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from miles_async.settings.errors import SettingsError, nearest, refusal

RUN_FILE = "run.json"
BUS_SCHEMES = ("redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://", "unix://")  # as bus/client.py has them


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of run.json. `finished`: steps of a run that has done them all, 0 before. `fingerprint`: tells runs of other data or
    group settings from this one. Unknown keys are allowed: a newer launcher may write more."""

    run: str
    bus_url: str
    finished: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RunRef:
    """Where a run is. `run` is None when only a bus address was given, `run_dir` when it is on another host."""

    run: str | None
    bus_url: str
    run_dir: Path | None


def write_run_file(run_dir: Path, *, run: str, bus_url: str, finished: int = 0, fingerprint: str = "") -> Path:
    """Write run.json by atomic rename, readable by its owner only: the address may hold a password."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / RUN_FILE
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.touch(mode=0o600)
    content = RunFile(run=run, bus_url=bus_url, finished=finished, fingerprint=fingerprint)
    fresh.write_bytes(msgspec.json.encode(content) + b"\n")
    fresh.replace(path)
    return path


def finished_run(run_dir: Path) -> RunFile | None:
    """What a finished run wrote; None for one that has not finished or never began."""
    try:
        found = msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.finished else None


def read_run_file(path: Path) -> RunRef:
    """The run that `path` describes."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is not a run file: {error}", remedy="Give --bus-url and --run.") from None
    check_bus_url(content.bus_url)
    return RunRef(content.run, content.bus_url, path.parent)


def list_runs(runs_dir: Path) -> list[str]:
    """Names of the runs in `runs_dir`, newest first; behind them copies of folders, under other names than the runs."""
    found = [(_is_own(path), path.stat().st_mtime_ns, path.parent.name) for path in runs_dir.glob(f"*/{RUN_FILE}")]
    return [name for _, _, name in sorted(found, reverse=True)]


def _is_own(path: Path) -> bool:
    """Whether a run file lies in the folder of the run that it names."""
    try:
        return read_run_file(path).run == path.parent.name
    except SettingsError:
        return True


def find_run(*, run: str | None, runs_dir: Path, bus_url: str | None) -> RunRef:
    """The run that the options name: `bus_url` if given, else `<runs_dir>/<run>`, else the newest run there."""
    if bus_url is not None:
        check_bus_url(bus_url)
        return RunRef(run, bus_url, None)
    known = list_runs(runs_dir)
    if run not in known and (begun := _begun(runs_dir, run, known)):
        why = f"run {begun} has no bus yet: it is being started, or its start failed"
        raise SettingsError(why, remedy="What miles-async train prints says which; ask again when it is up.")
    if not known:
        remedy = "Start one with miles-async train, or give --runs-dir or --bus-url."
        raise SettingsError(f"no run in {runs_dir.absolute()}", remedy=remedy)
    if run is not None and run not in known:
        remedy = nearest(run, known) or f"Runs there: {', '.join(known[:5])}."
        raise refusal("--run", run, f"no such run in {runs_dir.absolute()}", remedy)
    return read_run_file(runs_dir / (run or known[0]) / RUN_FILE)


def _begun(runs_dir: Path, run: str | None, known: list[str]) -> str:
    """The folder of a run that has come to no bus: `run`, or where no run is there the newest such; empty = none. Other folders
    are no runs."""
    names = [run] if run is not None else [] if known else [path.name for path in runs_dir.glob("[!.]*")]
    folders = [runs_dir / name for name in names if "/" not in name and (runs_dir / name).is_dir()]
    fresh = [path for path in folders if (path / "launcher.lock").exists() or {one.name for one in path.iterdir()} <= {"logs"}]
    return max(fresh, key=lambda path: path.stat().st_mtime_ns).name if fresh else ""


def check_bus_url(url: str | None) -> None:
    """Refuse an address of no known scheme; a password in it is not shown."""
    if url is not None and not url.startswith(BUS_SCHEMES):
        remedy = "Write redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix:///PATH."
        raise refusal("bus_url", url.rpartition("@")[2], "not an address of a Redis", remedy)


def read_settings(run_dir: Path) -> dict[str, dict[str, Any]]:
    """settings.toml as tables; empty when it is not there."""
    try:
        found = tomllib.loads((run_dir / "settings.toml").read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}
    return {name: dict(table) for name, table in found.items() if isinstance(table, dict)}
