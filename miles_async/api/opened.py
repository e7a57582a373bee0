"""A run, opened: its metrics and samples as tables, its settings, its accounts; while it goes on and afterwards, here or elsewhere.

Reads  the run's folder where it is on this host, else its bus    Writes  knobs, a wish to stop    Owns  nothing: each call
makes its own connection, and ends it
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from miles_async.settings.addresses import take_password
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.runs import RUN_FILE, RunRef, find_run, list_runs, read_run_file, read_settings

if TYPE_CHECKING:
    import pandas

    from bus import Bus

T = TypeVar("T")
Row: TypeAlias = dict[str, Any]
Table: TypeAlias = "pandas.DataFrame | list[Row]"
NEWS = ("step", "eval", "sample", "ledger")  # records that are no events
EVAL = ("step", "version", "wall", "name", "n_samples", "duration_s", "error")  # of an evaluation's record, beside its metrics
QUIET_S = 0.3  # that the logs of a bus are asked for what is left


def open_run(
    name_or_url: str | os.PathLike[str] | None = None, *, run: str | None = None, runs_dir: str | os.PathLike[str] = "runs"
) -> Run:
    """Open a run by its name in `runs_dir`, by its folder, or by the address of its bus (redis://, rediss://, redis+sentinel://,
    unix://); without any, the newest run in `runs_dir`. `run`: its name, where a bus has several.

    SettingsError when there is no such run. A password in the address goes into the environment variable that the commands use.
    """
    given = os.fspath(name_or_url) if isinstance(name_or_url, os.PathLike) else name_or_url
    if not isinstance(given, str | None):
        remedy = "Give the name of a run, its folder, or the address of its bus."
        raise SettingsError("not a text", field="name_or_url", value=given, remedy=remedy)
    url = take_password(given) if given is not None and "://" in given else None
    folder = Path(runs_dir).absolute()  # a program may go to another folder later
    if url is None and given and (given != name_or_url or os.sep in given):
        folder, given = Path(given).absolute().parent, Path(given).absolute().name
    return Run(find_run(run=run if url else given or run, runs_dir=folder, bus_url=url))


def runs(runs_dir: str | os.PathLike[str] = "runs") -> list[Run]:
    """All runs in a folder, the newest first; of a folder that is not there none. `[run.name for run in miles_async.runs()]`"""
    folder = Path(runs_dir).absolute()
    return [Run(find_run(run=name, runs_dir=folder, bus_url=None)) for name in list_runs(folder)]


class Run:
    """A run that goes on or has ended. Every call raises SettingsError or bus.errors.BusUnreachable, one line, where it cannot be.

    Tables are pandas data frames where pandas is installed (`pip install 'miles-async[notebook]'`), else lists of dicts, one a row.
    """

    def __init__(self, ref: RunRef) -> None:
        self._ref = ref

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._ref.run or 'of ' + self._ref.bus_url}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._ref.run or self._ask(_name)

    @property
    def folder(self) -> Path | None:
        """Where it keeps its files; None where that is not on this host."""
        return self._ref.run_dir or self._ask(_folder)

    def _repr_html_(self) -> str:
        """What a notebook shows: where it is, and how far."""
        here = self.folder
        cells = {"run": self.name, "running": self.running, "folder": here or "on another host"}
        cells |= {"checkpoints": ", ".join(map(str, self.checkpoints)) or "none"} if here is not None else {}
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in cells.items())
        return f"<table>{rows}</table>"

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of its last start, by name."""
        tables = read_settings(self._here("settings lie in the run's folder"))
        return {name: value for table in tables.values() for name, value in table.items()}

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> directory, oldest first; each is a Hugging Face directory, or Megatron's."""
        from actors.trainer.checkpoint import iter_dir, steps_in

        here = self._here("checkpoints are told by the run's folder")
        save = Path(str(self.settings.get("save") or here / "checkpoints"))
        save = save if save.is_dir() else here / "checkpoints"
        return {step: iter_dir(save, step) for step in steps_in(save)}

    def best(self, name: str | None = None) -> Row:
        """The evaluation with the highest mean reward, of the held-out set `name` or of the only one: a row as of `evals`, and
        `checkpoint`, the newest that is no younger, or None."""
        found = [r for r in self._records() if r["kind"] == "eval" and not r.get("error") and f"eval/{r['name']}" in r["metrics"]]
        sets = sorted({r["name"] for r in found})
        if name not in sets and (name is not None or len(sets) != 1):
            remedy = f"Give one of {', '.join(sets)}." if sets else "Nothing was evaluated yet."
            raise SettingsError("no evaluation of this set", field="name", value=name, remedy=remedy)
        row = max((r for r in found if name in (None, r["name"])), key=lambda r: float(r["metrics"][f"eval/{r['name']}"]))
        before = [path for step, path in self.checkpoints.items() if step <= row["step"]]
        return {**{k: row.get(k) for k in EVAL}, **row["metrics"], "checkpoint": before[-1] if before else None}

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write its report.html, or `output`; the path."""
        from miles_async.console.report import write_report

        here = self._here("a report is written from the run's folder")
        return Path(write_report(here, [], Path(output) if output is not None else None))

    def doctor(self) -> Row:
        """Who waits for what, and what is wrong: as `miles-async doctor --json`."""
        from miles_async.cli.doctor import document

        async def body(bus: Bus) -> Row:
            found: Row = msgspec.to_builtins(await document(bus, self._ref.run_dir), enc_hook=str)
            return found

        return self._ask(body)

    def trace(self, sample_id: str) -> Row:
        """The life of a sample or a group (`g0000012/3`, `g0000012`): as `miles-async trace --json`."""
        from miles_async.cli.trace import told_of

        async def body() -> Row:
            found: Row = msgspec.to_builtins(await asyncio.to_thread(told_of, self._now(), sample_id), enc_hook=str)
            return found

        return _sync(body())

    @property
    def running(self) -> bool:
        """Whether any actor of it lives."""
        from actors.runtime.snapshot import read_snapshot
        from bus.errors import BusUnreachable

        async def body(bus: Bus) -> bool:
            return bool((await read_snapshot(bus)).living())

        try:
            return self._ask(body, look=False)
        except BusUnreachable:
            return False

    @property
    def knobs(self) -> Knobs:
        """Its live settings."""
        return Knobs(self)

    def metrics(self) -> Table:
        """One row for each training step that counts (steps lost by going back to a checkpoint do not): `step`, `wall` (seconds
        since 1970), `gap_s` (seconds since the step before), `groups` (trained), and every metric under its name and in its unit
        (docs/metrics.md)."""
        from actors.recorder.history import history_of

        steps = history_of(self._records()).steps
        return _table({"step": s.step, "wall": s.wall, "gap_s": s.gap_s, "groups": s.n_groups, **s.metrics} for s in steps)

    def evals(self) -> Table:
        """One row for each evaluation: `step`, `version`, `wall` (seconds since 1970), `name` of the held-out set, `n_samples`,
        `duration_s`, `error` (empty where it worked) and its metrics (`eval/NAME` is the mean reward)."""
        found = (record for record in self._records() if record["kind"] == "eval")
        return _table({**{name: r.get(name) for name in EVAL}, **r.get("metrics", {})} for r in found)

    def events(self, kind: str | None = None) -> Table:
        """What happened, in order: `kind` (restored, knob, checkpoint, activated, drop, dead, fault, finished, ...), `wall`
        (seconds since 1970) and what the kind has; of one `kind`, or of all. actors/recorder/records.py lists them."""
        found = (record for record in self._records() if record["kind"] not in NEWS and kind in (None, record["kind"]))
        return _table({name: value for name, value in record.items() if name != "entry"} for record in found)

    def samples(self, *, step: int | None = None, eval_set: str | None = None) -> Table:
        """Samples that were kept as text: `step` at which they were looked at, `sample`, `group`, `version`, `reward`, `rewards`,
        `label`, `tokens`, `finish`, `prompt`, `response`. Of one `step`; of an evaluation of the set `eval_set`, all its samples.
        From another host than the run's, the few that its log of events holds."""
        from miles_async.cli.samples import kept

        folder = self.folder
        if folder is not None:
            found: Iterator[Row] = iter(kept(folder, eval_set))
        elif eval_set is not None:
            raise SettingsError("samples of evaluations lie in the run's folder", remedy="Open the run on its host.")
        else:
            found = (_without(r, "kind", "entry", "wall") for r in self._records() if r["kind"] == "sample")
        return _table(sample for sample in found if step in (None, sample.get("step")))

    def ledger(self, by: str = "reason") -> Row:
        """Where every issued sample and token is, and whether the accounts close: as `miles-async ledger --json`. `by`: reason,
        version or worker."""
        from bus.ledger import check
        from miles_async.cli.ledger import KINDS, as_json

        if by not in KINDS:
            raise SettingsError("no such division", field="by", value=by, remedy=f"Give one of {', '.join(KINDS)}.")

        async def body(bus: Bus) -> Row:
            found: Row = msgspec.to_builtins(as_json(await check(bus), by), enc_hook=str)
            return found

        return self._ask(body)

    def status(self) -> Row:
        """Policy versions, actors, streams and accounts, now: as `miles-async status --json`."""
        from miles_async.cli.status import document

        return self._ask(document)

    def stop(self, wait_s: float = 120.0) -> bool:
        """Ask it to stop: a last checkpoint is written, actors end. Whether it has ended within `wait_s` seconds; the same settings
        resume it."""
        from miles_async.cli.stop import stop

        return _sync(stop(self._now(), wait_s)) == 0

    def _here(self, why: str) -> Path:
        """Its folder. SettingsError where that is on another host."""
        if (folder := self.folder) is None:
            raise SettingsError(why, remedy="Open the run on its host.")
        return folder

    def _now(self) -> RunRef:
        """Where it is now: a run that was started again may have another address."""
        file = self._ref.run_dir / RUN_FILE if self._ref.run_dir is not None else None
        return read_run_file(file) if file is not None and file.is_file() else self._ref

    def _ask(self, body: Callable[[Bus], Awaitable[T]], *, look: bool = True) -> T:
        """What `body` says of the run's bus; of a run that has ended, of what its Redis kept, if it only looks."""
        from miles_async.console.attach import attached

        async def go() -> T:
            async with attached(self._now(), look=look) as bus:
                return await body(bus)

        return _sync(go())

    def _records(self) -> list[Row]:
        """The run's record, from its folder or else from the logs on its bus, which hold the newest part."""
        from actors.recorder.file import read_records

        folder = self.folder
        return read_records(folder) if folder is not None else self._ask(_of_bus)


class Knobs:
    """Live settings of a run. A change is checked as `miles-async tune` checks it: all of it holds, or nothing does."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def get(self) -> dict[str, Any]:
        """Every live setting by name, with its value now."""
        return {name: knob["value"] for name, knob in self.describe().items()}

    def __getitem__(self, name: str) -> Any:
        found = self.get()
        if name not in found:
            raise SettingsError("no live setting has this name", field=name, remedy=nearest(name, found))
        return found[name]

    def describe(self) -> dict[str, Row]:
        """Of every live setting `value`, `range`, `unit`, `applies` (where a change takes effect), `changed_at` (epoch), `help`."""
        from miles_async.cli.tune import document

        found: dict[str, Row] = document(self._history(), self._run.name)["knobs"]
        return found

    def set(self, reason: str = "", /, **values: Any) -> dict[str, Any]:
        """Change settings of the running run, together: `run.knobs.set("too slow", lr=2e-6)`. What changed, with what follows from
        it; the log has the user, the host and `reason`. SettingsError or KnobRejected when it may not be: then nothing changes."""
        from bus.knobs.live import propose
        from miles_async.cli.tune import author
        from miles_async.settings.live import check_patch
        from miles_async.settings.load import plain

        async def body(bus: Bus) -> dict[str, Any]:
            return dict((await propose(bus, plain(values), author=author(), reason=reason, check=check_patch)).values)

        return self._run._ask(body, look=False)

    def log(self) -> Table:
        """Every change so far, the initial values first: `epoch`, `wall` (seconds since 1970), `author`, `reason`, `values`."""
        names = ("epoch", "wall", "author", "reason", "values")
        return _table({name: getattr(patch, name) for name in names} for patch in self._history())

    def _history(self) -> list[Any]:
        from bus.knobs.live import read_history

        return self._run._ask(read_history)


def _sync(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end on a thread of its own, so that a loop that runs in this one (a notebook's) does not matter."""
    with ThreadPoolExecutor(1, "miles-async") as threads:
        return threads.submit(asyncio.run, work).result()


def _table(rows: Iterator[Row]) -> Table:
    found = list(rows)
    if find_spec("pandas") is None:
        return found
    import pandas

    return pandas.DataFrame(found)


def _without(record: Mapping[str, Any], *names: str) -> Row:
    return {name: value for name, value in record.items() if name not in names}


async def _name(bus: Bus) -> str:
    return bus.config.run


async def _folder(bus: Bus) -> Path | None:
    from bus.identity import read_identity

    known = await read_identity(bus)
    folder = Path(known.run_dir) if known is not None and known.run_dir else None
    return folder if folder is not None and (folder / RUN_FILE).is_file() else None


async def _of_bus(bus: Bus) -> list[Row]:
    from actors.recorder.feed import Feed

    feed, found = Feed(bus), list[Row]()
    try:
        while True:
            fresh, any_left = await feed.read(QUIET_S)
            found += fresh
            if not any_left:
                return found
    finally:
        await feed.close()
