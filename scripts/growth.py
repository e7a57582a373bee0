"""What a run uses, measured again and again, and how fast it grows with the steps.

A process begins anew when it is killed. So each of its lives has an own level, and the slope is that of all lives of a kind
together: least squares of the differences to the mean of each life. The first two minutes of a life are left out, in which
caches fill, and lives with fewer than five measurements after them. Redis, files and shared memory outlive processes: one level
for all, the first tenth of the steps left out. Measurements that follow one another are alike, so the standard error is that of
clusters: lives, or the pieces of a soak; of fewer than FEW_CLUSTERS, the tenths of each. One step up, as when a table of
Python's doubles, makes a slope too, and it would not go on. So the largest rise between two measurements is told, and the
slope without it: what grows all the time keeps its slope.

`own` is a process's memory without files and shared memory: a page of a file counts as resident from the first time that the
process looks at it, and is no memory that anybody lacks. A page that a forked process shares with its parent counts from its start.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from bus import STREAMS, Bus

SETTLED_S, FEWEST = 120.0, 5
FEW_CLUSTERS, TENTHS = 8, 10
MB = 1 << 20
UNITS = dict.fromkeys(("own", "rss", "memory", "but capped logs", "resident", "bytes"), ("MB", MB))

Line = dict[str, Any]


def kind_of(words: Sequence[str], run_dir: Path) -> str:
    """What a process of a run is, by its command line: a room, an engine, ...; workers of all names are one kind."""
    for word in words:
        if found := re.fullmatch(re.escape(str(run_dir / "actors")) + r"/(.+)\.json", word):
            name = re.sub(r"-[\d-]+$", "", found[1])
            return "generation" if name == "guest" else name
    for part, kind in (
        ("engines.embedded", "engine"),
        ("fork_server", "fork server"),
        ("reward.pool", "reward pool"),
        ("redis-server", "Redis server"),
        ("valkey-server", "Redis server"),
    ):
        if any(part in word for word in words):
            return kind
    return next((kind for word, kind in (("train", "launcher"), ("worker", "guest's launcher")) if word in words), "other")


async def measure(bus: Bus, processes: Iterable[psutil.Process], run_dir: Path, shared: Path) -> Line:
    """One measurement. `shared`: the run's folder in shared memory."""
    found = []
    for process in processes:
        with suppress(psutil.Error), process.oneshot():
            found.append(
                {
                    "life": f"{process.pid}@{process.create_time():.2f}",
                    "what": kind_of(process.cmdline(), run_dir),
                    "age_s": bus.clock.wall() - process.create_time(),
                    "own": own(process),
                    "rss": process.memory_info().rss,
                    "fds": process.num_fds(),
                    "threads": process.num_threads(),
                }
            )
    told = await bus.server_info()
    memory, resident = (int(told[name]) for name in ("used_memory", "used_memory_rss"))
    logs = [bus.keys.stream(stream.name) for stream in STREAMS if stream.cap]
    capped = sum([await bus.link.run("MEMORY", "USAGE", key) or 0 for key in logs])  # grow until they are full, which takes hours
    keys = int(await bus.link.run("DBSIZE"))
    redis = {"memory": memory, "but capped logs": memory - capped, "resident": resident, "keys": keys}
    return {
        "processes": found,
        "Redis": redis,
        "run folder": _use_of(run_dir, but="redis"),
        "append-only file": _use_of(run_dir / "redis"),
        "shared memory": _use_of(shared),
    }


def own(process: psutil.Process) -> int:
    """A process's own memory, in bytes. Linux."""
    with suppress(OSError):
        found = re.search(r"^Anonymous: +(\d+) kB", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.M)
        if found:
            return int(found[1]) << 10
    raise psutil.NoSuchProcess(process.pid)


def _use_of(folder: Path, but: str = "") -> dict[str, int]:
    files = n_bytes = 0
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != but]
        for name in names:
            with suppress(OSError):
                n_bytes += os.lstat(os.path.join(root, name)).st_size
                files += 1
    return {"files": files, "bytes": n_bytes}


def write_figures(file: Path, figures: Any) -> None:
    """As JSON, in which what is not known (nan) is null."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


class Slope(NamedTuple):
    """Of one quantity: per 1000 steps, with its standard error (nan: too few measurements). `mean`: its level. `rise`: the largest
    from one measurement to the next; `rest`, `rest_error`: the slope without it."""

    what: str
    unit: str
    mean: float
    slope: float
    error: float
    clusters: int
    n: int
    rise: float
    rest: float
    rest_error: float


def slope_of(points: Sequence[tuple[str, float, float]], *, apart: bool) -> tuple[float, float]:
    """Slope and its error of (cluster, x, y), those of a cluster in their order. `apart`: each cluster has a level of its own. nan
    where x does not vary."""
    clusters: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, x, y in points:
        clusters[name].append((x, y))

    def mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return sum(x for x, _ in values) / len(values), sum(y for _, y in values) / len(values)

    level = mean([(x, y) for _, x, y in points])
    centred = {}
    for name, values in clusters.items():
        at = mean(values) if apart else level
        centred[name] = [(x - at[0], y - at[1]) for x, y in values]
    spread = sum(x * x for values in centred.values() for x, _ in values)
    if spread == 0.0:
        return math.nan, math.nan
    slope = sum(x * y for values in centred.values() for x, y in values) / spread
    alike = list(centred.values())
    if len(alike) < FEW_CLUSTERS:
        ends = [[round(part * len(values) / TENTHS) for part in range(TENTHS + 1)] for values in alike]
        parts = [values[a:b] for values, at in zip(alike, ends, strict=True) for a, b in itertools.pairwise(at)]
        alike = [values for values in parts if values]
    n = len(alike)
    if n < 2:
        return slope, math.nan
    scores = [sum(x * (y - slope * x) for x, y in values) for values in alike]
    return slope, math.sqrt(n / (n - 1) * sum(s * s for s in scores)) / spread


def without_largest_rise(points: Sequence[tuple[str, float, float]]) -> tuple[float, list[tuple[str, float, float]]]:
    """The largest rise from one measurement of a cluster to its next (0: none), and the points as if it had not been."""
    largest, at, last = 0.0, -1, dict[str, float]()
    for place, (name, _, y) in enumerate(points):
        if y - last.get(name, y) > largest:
            largest, at = y - last[name], place
        last[name] = y
    risen = points[at][0] if at >= 0 else ""
    later = [name == risen and place >= at >= 0 for place, (name, _, _) in enumerate(points)]
    return largest, [(name, x, y - largest * after) for (name, x, y), after in zip(points, later, strict=True)]


def slopes(lines: Sequence[Line], settled_s: float = SETTLED_S) -> list[Slope]:
    """Of measurements with `piece` and `done` (steps trained by then, those that were lost included), oldest first. `settled_s`: of
    a life that is left out."""
    if not lines:
        return []
    lives: dict[tuple[str, str], list[tuple[str, float, float]]] = defaultdict(list)
    whole: dict[tuple[str, str], list[tuple[str, float, float]]] = defaultdict(list)
    from_step = lines[0]["done"] + (lines[-1]["done"] - lines[0]["done"]) / 10
    for line in lines:
        x = float(line["done"])
        for process in line["processes"]:
            for name in ("own", "rss", "fds", "threads"):
                if process["age_s"] > settled_s and name in process:
                    lives[process["what"], name].append((process["life"], x, float(process[name])))
        if x >= from_step:
            for what in ("Redis", "run folder", "append-only file", "shared memory"):
                for name, value in line.get(what, {}).items():  # pieces of older code measured less
                    whole[what, name].append((str(line["piece"]), x, float(value)))
    found = []
    for key, points in lives.items():
        n_of = defaultdict[str, int](int)
        for life, _, _ in points:
            n_of[life] += 1
        found.append(_row(key, [p for p in points if n_of[p[0]] >= FEWEST], apart=True))
    found.extend(_row(key, points, apart=False) for key, points in whole.items())
    return [row for row in found if row is not None]


def _row(key: tuple[str, str], points: Sequence[tuple[str, float, float]], *, apart: bool) -> Slope | None:
    if not points:
        return None
    unit, size = UNITS.get(key[1], ("", 1))
    rise, others = without_largest_rise(points)
    each = (*slope_of(points, apart=apart), *slope_of(others, apart=apart))
    slope, error, rest, rest_error = (1000 * value / size for value in each)
    mean = sum(y for _, _, y in points) / len(points) / size
    clusters = len({name for name, _, _ in points})
    return Slope(" ".join(key), unit, mean, slope, error, clusters, len(points), rise / size, rest, rest_error)


def table(rows: Iterable[Slope]) -> str:
    """As lines of Markdown."""
    names = ("what", "level", "slope per 1000 steps", "largest rise at once", "slope without it", "lives or pieces", "measurements")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        unit = f" {r.unit}" if r.unit else ""
        slope, rest = f"{r.slope:+.3f} ± {r.error:.3f}{unit}", f"{r.rest:+.3f} ± {r.rest_error:.3f}{unit}"
        lines.append(f"| {r.what} | {r.mean:.1f}{unit} | {slope} | {r.rise:.2f}{unit} | {rest} | {r.clusters} | {r.n} |")
    return "\n".join(lines)
