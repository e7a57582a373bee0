"""What the page asks for once and what it changes: the functions of the commands, as JSON.

Reads  samples of the run's folder, knobs, dead letters, traces, other runs' records    Writes  knobs, what a retry moves
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from actors.recorder.file import read_records
from actors.recorder.history import history_of
from bus import Bus
from bus.dead import drop, find_letter, read_letters, retry
from bus.errors import MilesAsyncError
from bus.knobs.live import propose, read_history, revert
from miles_async.cli.bus_verbs import letter_json
from miles_async.cli.samples import choose, kept
from miles_async.cli.tune import author, changes_text, document, shown_value
from miles_async.console.trace import trace
from miles_async.console.web.curves import whole_run
from miles_async.console.web.guard import refusal
from miles_async.settings.catalog import catalog
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch
from miles_async.settings.runs import list_runs

MOST_SAMPLES = 200
Answer = Callable[[web.Request], Awaitable[Any]]


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New values of knobs as text, or the epoch to go back to."""

    values: dict[str, str] = {}
    revert: int | None = None
    reason: str = ""


class Burial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do with a dead letter: `retry` or `drop`."""

    id: str
    act: str


class Verbs:
    """`routes` for the application."""

    def __init__(self, bus: Bus, run_dir: Path | None) -> None:
        self._bus, self._run_dir = bus, run_dir

    def routes(self) -> list[web.RouteDef]:
        asked: dict[str, Answer] = {
            "samples": self._samples, "knobs": self._knobs, "dead": self._dead, "trace": self._trace, "runs": self._runs,
            "curves": self._curves,
        }  # fmt: skip
        told: dict[str, Answer] = {"knobs": self._tune, "dead": self._bury}
        return [web.get(f"/api/{name}", answering(verb)) for name, verb in asked.items()] + [
            web.post(f"/api/{name}", answering(verb)) for name, verb in told.items()
        ]

    async def _samples(self, request: web.Request) -> Any:
        """Texts that the recorder kept: those of a step (default: the newest) or group, worst or best first."""
        if self._run_dir is None:
            raise SettingsError("samples are read from the run's folder", remedy="Open the console on the run's host.")
        asked = request.query
        step = int(asked["step"]) if asked.get("step", "").isdigit() else None
        return await asyncio.to_thread(_chosen, self._run_dir, asked.get("set") or None, step, asked.get("order", "worst"))

    async def _knobs(self, _request: web.Request) -> Any:
        history = await read_history(self._bus)
        found = document(history, self._bus.config.run)
        for name, knob in found["knobs"].items():
            spec = catalog()[name]
            knob |= {"shown": shown_value(knob["value"], spec), "group": spec.group}
            knob["choices"] = ["true", "false"] if spec.kind == "bool" else list(spec.shape.choices or spec.shipped)
        log = [
            {"epoch": p.epoch, "wall": p.wall, "author": p.author, "reason": p.reason,
             "values": {} if p.kinds else {"": changes_text(p)} if p.plan or p.planned
             else {k: shown_value(v, catalog().get(k)) for k, v in p.values.items()}}
            for p in history
        ]  # fmt: skip
        return found | {"log": log[::-1]}

    async def _tune(self, request: web.Request) -> Any:
        change = msgspec.json.decode(await request.read(), type=Change)
        who = f"{author()}, console"
        if change.revert is not None:
            made = await revert(self._bus, change.revert, author=who, reason=change.reason, check=check_patch)
        else:
            made = await propose(self._bus, dict(change.values), author=who, reason=change.reason, check=check_patch)
        return {"epoch": made.epoch, "values": {k: shown_value(v, catalog().get(k)) for k, v in made.values.items()}}

    async def _dead(self, _request: web.Request) -> Any:
        return [letter_json(item) for item in await read_letters(self._bus)][::-1]

    async def _bury(self, request: web.Request) -> Any:
        asked = msgspec.json.decode(await request.read(), type=Burial)
        item = await find_letter(self._bus, asked.id)
        if asked.act == "retry":
            return {"text": (await retry(self._bus, item)).text}
        if asked.act != "drop":
            raise SettingsError(f"{asked.act!r} is nothing to do with a dead letter", remedy="It is retry or drop.")
        await drop(self._bus, item)
        return {"text": f"dropped {item.id}"}

    async def _trace(self, request: web.Request) -> Any:
        sample = request.query.get("id", "").strip()
        found = await trace(self._bus, sample, self._run_dir)
        if not sample or not found.found:
            remedy = "A sample is named as g0000042/3, its group g0000042."
            raise SettingsError(f"nothing is on record of {sample[:80]!r}", remedy=remedy)
        return {"sample": found.sample, "state": found.state, "moments": found.moments}

    async def _runs(self, _request: web.Request) -> Any:
        """Runs beside this one, newest first."""
        if self._run_dir is None:
            return []
        return [name for name in await asyncio.to_thread(list_runs, self._run_dir.parent) if name != self._run_dir.name]

    async def _curves(self, request: web.Request) -> Any:
        name = request.query.get("run", "")
        if self._run_dir is None or name not in await asyncio.to_thread(list_runs, self._run_dir.parent):
            raise SettingsError(f"no run {name[:80]!r} beside this one", remedy="/api/runs lists them.")
        folder = self._run_dir.parent / name
        return await asyncio.to_thread(lambda: whole_run(history_of(read_records(folder))))


def answering(verb: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that turns what a command refuses into one line and status 422."""

    async def handler(request: web.Request) -> web.Response:
        try:
            body = msgspec.json.encode(await verb(request), enc_hook=str)
        except SettingsError as error:
            return web.json_response(
                {"error": str(error), "each": [{"field": e.field, "text": str(e)} for e in error.each]}, status=422
            )
        except (MilesAsyncError, msgspec.DecodeError) as error:
            return refusal(422, str(error))
        return web.Response(body=body, content_type="application/json")

    return handler


def _chosen(run_dir: Path, eval_set: str | None, step: int | None, order: str) -> Any:
    sets = sorted({file.name.rpartition("_")[0] for file in (run_dir / "eval_samples").glob("*_*.jsonl")})
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
