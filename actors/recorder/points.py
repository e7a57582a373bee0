"""(pure) Lines of metrics.jsonl as points of curves, which is what experiment trackers take.

A point has a training step, wall seconds and numbers by name, named as in docs/metrics.md. A step's point also says how many
groups were dropped since the one before it, and what hosts and Redis used since, as means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.recorder.records import Parts, Record
from bus.messages.reasons import DropReason

DROPPED = "rollout/dropped/{reason}"
STALE = "rollout/fully_async/stale_groups_filtered"  # as Miles names it
MOST_USED = 400  # numbers of hosts and Redis; hosts beyond it are left out
STALE_REASONS = (DropReason.STALE, DropReason.OUTLASTED)


@dataclass(frozen=True, slots=True)
class Point:
    """`values`: finite or not, as measured. `lost`: steps after `step` are trained again; what was said of them is void."""

    step: int
    wall: float
    values: Mapping[str, float] = field(default_factory=dict)
    lost: bool = False


class Points:
    """Feed it every record once, in order."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._parts = Parts()
        self._used: dict[str, list[float]] = {}

    def of(self, record: Record) -> Point | None:
        """The point that a record makes, if any. Raises KeyError, TypeError or ValueError for a line of another shape."""
        kind = record["kind"]
        if kind == "drop" and self._parts.is_new(record):
            self._dropped[str(record["reason"])] += 1
        if kind == "step":
            values = _numbers(record["metrics"])
            self._dropped.update(str(reason) for _, reason in record.get("dropped", ()))
            values |= {DROPPED.format(reason=reason): float(n) for reason, n in self._dropped.items()}
            values[STALE] = float(sum(self._dropped[reason] for reason in STALE_REASONS))
            values |= {name: sum(used) / len(used) for name, used in self._used.items()}
            self._dropped.clear()
            self._used.clear()
            return Point(int(record["step"]), float(record["wall"]), values)
        if kind == "system" and (len(self._used) < MOST_USED or f"system/{record['source']}/cpu_share" in self._used):
            for name, value in _numbers(record["values"]).items():
                self._used.setdefault(f"system/{record['source']}/{name}", []).append(value)
        if kind == "eval":
            return Point(int(record["step"]), float(record["wall"]), _numbers(record["metrics"]))
        if kind == "restored" and record.get("lost"):
            return Point(int(record["step"]), float(record["wall"]), lost=True)
        return None


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)}
