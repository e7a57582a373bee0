"""What a console asks for once and what it changes, in the browser and in the terminal: the functions of the commands.

Reads  samples of the run's folder, knobs, dead letters, traces, other runs' records    Writes  knobs, what a retry moves
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.evaluator.kept import kept_files
from actors.recorder.file import stream_records
from actors.recorder.history import history_of
from bus import Bus
from bus.dead import drop, find_letter, read_letters, retry
from bus.knobs.live import propose, read_history, revert
from miles_async.cli.bus_dead import letter_json
from miles_async.cli.samples import choose, kept
from miles_async.cli.tune import author, changes_text, document
from miles_async.console.trace import known
from miles_async.console.trace_live import trace
from miles_async.console.web.curves import whole_run
from miles_async.settings.catalog import catalog, shown_value
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch
from miles_async.settings.runs import list_runs

MOST_SAMPLES = 200


class Verbs:
    """Of one run. `via` stands in the log of knobs behind the user's name. All raise MilesAsyncError or SettingsError in one line
    and have changed nothing then."""

    def __init__(self, bus: Bus, run_dir: Path | None, via: str = "console") -> None:
        self._bus, self._run_dir, self._via = bus, run_dir, via

    async def samples(self, eval_set: str | None = None, step: int | None = None, order: str = "worst") -> dict[str, Any]:
        """Texts that the recorder kept: those of a step (default: the newest), worst or best first."""
        if self._run_dir is None:
            raise SettingsError("samples are read from the run's folder", remedy="Open the console on the run's host.")
        return await asyncio.to_thread(_chosen, self._run_dir, eval_set, step, order)

    async def knobs(self) -> dict[str, Any]:
        """Every knob with what may be typed, and the log, newest first."""
        history = await read_history(self._bus)
        found = document(history, self._bus.config.run)
        for name, knob in found["knobs"].items():
            spec = catalog()[name]
            knob |= {"shown": shown_value(knob["value"], spec), "group": spec.group}
            knob["choices"] = ["true", "false"] if spec.kind == "bool" else list(spec.choices or spec.shipped)
        log = [
            {"epoch": p.epoch, "wall": p.wall, "author": p.author, "reason": p.reason,
             "values": {} if p.kinds else {"": changes_text(p)} if p.plan or p.planned
             else {k: shown_value(v, catalog().get(k)) for k, v in p.values.items()}}
            for p in history
        ]  # fmt: skip
        return found | {"log": log[::-1]}

    async def tune(self, values: Mapping[str, str], reason: str, *, back_to: int | None = None) -> dict[str, Any]:
        """One patch, or back to the values of an epoch."""
        who = f"{author()}, {self._via}"
        if back_to is not None:
            made = await revert(self._bus, back_to, author=who, reason=reason, check=check_patch)
        else:
            made = await propose(self._bus, dict(values), author=who, reason=reason, check=check_patch)
        return {"epoch": made.epoch, "values": {k: shown_value(v, catalog().get(k)) for k, v in made.values.items()}}

    async def letters(self) -> list[dict[str, Any]]:
        """Dead letters, newest first."""
        return [letter_json(item) for item in await read_letters(self._bus)][::-1]

    async def bury(self, letter: str, act: str) -> str:
        """`retry` or `drop` one, by its id; says what happened."""
        item = await find_letter(self._bus, letter)
        if act == "retry":
            return (await retry(self._bus, item)).text
        if act != "drop":
            raise SettingsError(f"{act!r} is nothing to do with a dead letter", remedy="It is retry or drop.")
        await drop(self._bus, item)
        return f"dropped {item.id}"

    async def trace(self, sample: str) -> dict[str, Any]:
        """The life of a sample or group."""
        found = known(await trace(self._bus, sample, self._run_dir))
        return {"sample": found.sample, "state": found.state, "moments": found.moments}

    async def runs(self) -> list[str]:
        """Runs beside this one, newest first."""
        if self._run_dir is None:
            return []
        return [name for name in await asyncio.to_thread(list_runs, self._run_dir.parent) if name != self._run_dir.name]

    async def curves(self, name: str) -> dict[str, Any]:
        """Of another run beside this one."""
        if self._run_dir is None or name not in await asyncio.to_thread(list_runs, self._run_dir.parent):
            raise SettingsError(f"no run {name[:80]!r} beside this one", remedy="/api/runs lists them.")
        folder = self._run_dir.parent / name
        return await asyncio.to_thread(lambda: whole_run(history_of(stream_records(folder))))


def _chosen(run_dir: Path, eval_set: str | None, step: int | None, order: str) -> Any:
    sets = sorted(kept_files(run_dir))
    steps: list[int] = []

    def noting(samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for sample in samples:
            if not steps or steps[-1] != sample["step"]:
                steps.append(sample["step"])
            yield sample

    found = choose(noting(kept(run_dir, eval_set if eval_set in sets else None)), step=step, group=None)
    if order in ("worst", "best"):
        found.sort(key=lambda sample: sample["reward"], reverse=order == "best")
    return {"sets": sets, "steps": sorted(set(steps), reverse=True), "samples": found[:MOST_SAMPLES], "all": len(found)}
