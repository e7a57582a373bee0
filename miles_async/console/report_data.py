"""What the report's script shows of one run, as plain values: tables of numbers of a bounded length, and events (pure but
for the reading of the run's folder).

A table has x columns (`step`, `wall`, `samples` trained), and columns of numbers. Where there are more rows than points, a point is
the mean over neighbouring rows, and `low` and `high` hold the least and the most of them: nothing that stood out is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.file import stream_records
from actors.recorder.history import History, Step
from actors.recorder.records import Record
from actors.runtime.readable import bounded
from actors.trainer.spread import BORN, LENGTH, STRAGGLER
from miles_async.console.figures import DROPPED, derived
from miles_async.console.report_samples import samples_of
from miles_async.console.text import knob_text
from miles_async.console.whatif.observed import Spread
from miles_async.settings.addresses import without_credentials
from miles_async.settings.runs import read_settings

STALENESS_KNOB = "max_weight_staleness"
MOST_BYTES = 6_000_000  # of all tables of a page, about
LEAST_POINTS, MOST_POINTS = 200, 1500  # of one table
MOST_OF_OTHERS = 400  # points of a host, of an evaluation
MOST_EVENTS = 400  # of one kind
SAMPLES_BYTES = 3_000_000
SPREAD_STEPS, SPREAD_POINTS = 64, 200
LEAST = 0.002  # share of samples: below this the quantiles of a step say nothing
COUNTED = (DROPPED, f"{BORN}/")
Table = dict[str, Any]


class ReportedRun(msgspec.Struct):
    """What a run left in its folder. `system`: rows of each host and of Redis, each with its `wall`."""

    name: str
    dir: Path
    history: History
    settings: dict[str, dict[str, Any]]
    system: dict[str, list[dict[str, float]]]


def read_run(run_dir: Path) -> ReportedRun:
    """Reads the record line by line: that of a week does not lie in memory twice."""
    run = ReportedRun(run_dir.name, run_dir, History(), without_credentials(read_settings(run_dir)), {})
    for record in stream_records(run_dir):
        run.history.fold(record)
        if record["kind"] == "system":
            _system(run, record)
    return run


def _system(run: ReportedRun, record: Record) -> None:
    try:
        row = {"wall": float(record["wall"])} | {str(k): float(v) for k, v in record["values"].items()}
        run.system.setdefault(str(record["source"]), []).append(row)
    except (KeyError, TypeError, ValueError, AttributeError):
        run.history.left_out += 1


def data_of(run: ReportedRun, runs: int = 1) -> dict[str, Any]:
    """All that the script shows of a run, where `runs` share the page."""
    history, steps = run.history, run.history.steps
    return {
        "name": run.name,
        "began": history.first_wall,
        "curves": curves(steps, _samples_a_step(run), MOST_BYTES // max(1, runs)),
        "evals": [{"name": name, **_evals(history, name)} for name in history.eval_names()],
        "bounds": staleness_bounds(history, run.settings),
        "events": events(history),
        "pauses": _pauses(history),
        "system": {
            source: thinned(rows, len(rows), ("wall",), max(20, min(MOST_OF_OTHERS, 16 * MOST_OF_OTHERS // len(run.system))))
            for source, rows in run.system.items()
        },
        "spreads": spreads(history),
        "samples": samples_of(run.dir, run.history.samples, SAMPLES_BYTES // max(1, runs)),
    }


def _pauses(history: History) -> Table:
    rows = [{name: float(r[name]) for name in ("wall", "pause_s")} for r in history.activations if "pause_s" in r]
    return thinned(rows, len(rows), ("wall",), MOST_OF_OTHERS)


def _samples_a_step(run: ReportedRun) -> int:
    found = run.settings.get("rollout", {}).get("n_samples_per_prompt", 1)
    return found if isinstance(found, int) else 1


def curves(steps: Sequence[Step], per_group: int, n_bytes: int) -> Table:
    """Everything that steps recorded, in about so many bytes."""
    names = {name for step in steps[:: max(1, len(steps) // 64)] for name in (*step.metrics, *derived(step))}
    most = max(LEAST_POINTS, min(MOST_POINTS, n_bytes // max(1, 24 * len(names))))
    return thinned(_rows(steps, per_group), len(steps), ("step", "wall", "samples"), most)


def _rows(steps: Sequence[Step], per_group: int) -> Iterator[dict[str, float]]:
    done = 0.0
    for step in steps:
        done += step.metrics.get("rollout/samples", per_group * step.n_groups)
        yield {**step.metrics, **derived(step), "step": float(step.step), "wall": round(step.wall, 1), "samples": done}


def thinned(rows: Iterable[Mapping[str, float]], n: int, xs: Sequence[str], most: int) -> Table:
    """At most `most` points of `n` rows that lie in the order of their `xs`; of these a point has the last of its rows. COUNTED
    ones are 0 in a row without them; what is not finite is left out."""
    stride = max(1, -(-n // most))
    points = -(-n // stride)
    parts: dict[str, dict[str, list[float | None]]] = {"columns": {}, "low": {}, "high": {}}
    x: dict[str, list[float]] = {name: [] for name in xs}
    left = iter(rows)
    for at in range(points):
        row: Mapping[str, float] = {}
        here: defaultdict[str, list[float]] = defaultdict(list)
        for row in islice(left, stride):
            for name, value in row.items():
                here[name].append(value)
        for name in xs:
            x[name].append(row[name])
            taken = len(here.pop(name))
        for name, values in here.items():
            total = sum(values)
            if not isfinite(total):
                values = [v for v in values if isfinite(v)]
                total = sum(values)
            if not values:
                continue
            many = taken if name.startswith(COUNTED) else len(values)
            parts["columns"].setdefault(name, [0.0 if name.startswith(COUNTED) else None] * points)[at] = float(
                f"{total / many:.5g}"
            )
            if stride > 1:
                for part, one in (("low", min), ("high", max)):
                    parts[part].setdefault(name, [None] * points)[at] = float(f"{one(values):.5g}")
    return {"x": x, **parts}


def _evals(history: History, name: str) -> Table:
    found = history.evals_of(name)
    rows = [{"step": float(e.step), "wall": e.wall, "score": e.score} for e in found]
    table = thinned(rows, len(rows), ("step", "wall"), MOST_OF_OTHERS)
    ends = {end: [e.metrics.get(f"eval/{name}/ci95_{end}") for e in found] for end in ("low", "high")}
    known = len(found) <= MOST_OF_OTHERS and None not in ends["low"] + ends["high"]
    return table | ({end: {"score": values} for end, values in ends.items()} if known else {})


def staleness_bounds(history: History, settings: dict[str, dict[str, Any]]) -> list[tuple[int, int]]:
    """(from step, bound) in order: the setting, then each knob change at the first step after it."""
    rollout = settings.get("rollout", {})
    bounds: list[tuple[int, int]] = []
    if STALENESS_KNOB in rollout:
        bounds.append((0, int(rollout[STALENESS_KNOB])))
    for record in history.knobs:
        if STALENESS_KNOB in record["values"]:
            step = next((s.step for s in history.steps if s.wall >= float(record["wall"])), None)
            value = int(record["values"][STALENESS_KNOB])
            if step is not None and (not bounds or bounds[-1][1] != value):
                bounds.append((step if bounds else 0, value))
    return bounds


def events(history: History) -> list[dict[str, Any]]:
    """What happened besides steps, in the order of time: `kind`, `wall`, `text`."""
    found: dict[str, list[tuple[float, str]]] = {}

    def say(kind: str, record: Record, text: str) -> None:
        found.setdefault(kind, []).append((float(record.get("wall", 0.0)), text))

    for r in history.faults:
        say(str(r.get("level")), r, f"{r.get('actor')}: {r.get('event')}: {r.get('text')}")
    for r in history.dead:
        say("dead letter", r, f"{r.get('stream')}: {r.get('error')}")
    for r in history.knobs:
        if int(r.get("epoch", 0)) > 0:
            say("knob", r, knob_text(r) + (f" ({r['reason']})" if r.get("reason") else ""))
    for r in history.restores[1:]:
        say("restart", r, f"trainer restored to step {r['step']} {r.get('checkpoint', '')}")
    for r in history.checkpoints:
        say("checkpoint", r, f"step {r.get('step')}")
    kept = [
        {"kind": kind, "wall": wall, "text": bounded(text, 300)}
        for kind, all_of in found.items()
        for wall, text in all_of[:: max(1, -(-len(all_of) // MOST_EVENTS))]
    ]
    return sorted(kept, key=lambda event: event["wall"])


def spreads(history: History) -> dict[str, list[list[float]]]:
    """Share of samples above a value, over the newest steps: [values, shares] of lengths and of stragglers."""
    steps = history.steps[-SPREAD_STEPS:]
    found = {name: [spread for s in steps if (spread := Spread.of(s, name)) is not None] for name in (LENGTH, STRAGGLER)}
    return {name: exceeded(all_of) for name, all_of in found.items() if all_of}


def exceeded(all_of: Sequence[Spread]) -> list[list[float]]:
    """[values, share of samples above them] over several spreads together, from 0 to where that is below LEAST."""
    top = max(s.at(1.0) for s in all_of)
    xs = [top * i / SPREAD_POINTS for i in range(SPREAD_POINTS)]
    ys = [1 - sum(s.below(x) for s in all_of) / len(all_of) for x in xs]
    shown = next((i for i, y in enumerate(ys) if y < LEAST), SPREAD_POINTS)
    return [[*xs[:shown], xs[shown] if shown < SPREAD_POINTS else top], [*ys[:shown], LEAST]]
