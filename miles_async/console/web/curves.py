"""A run's steps as columns of at most MOST points, kept up to date step by step (pure).

A point is the mean over `stride` neighbouring steps; when there are too many points, two become one and the stride doubles. So a
week of steps costs no more to keep or to send than the first thousand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from actors.recorder.history import AVG_STALENESS, MAX_STALENESS, REWARD, History, Step
from miles_async.console.figures import DROPPED, TRAINER, derived

MOST = 800
Point = tuple[int, int, dict[str, tuple[float, int]]]
"""Last step, steps, and of each name sum and count."""
METRICS = (
    *(REWARD, AVG_STALENESS, MAX_STALENESS, *TRAINER.values()),
    *("train/train_rollout_kl", "train/train_rollout_logprob_abs_diff", "train/forward_logp_abs_diff"),
    *("train/tis_clipfrac", "train/critic_grad_norm"),
    *("rollout/response_len/mean", "rollout/response_len/max"),
)


def values_of(step: Step) -> dict[str, float]:
    """What the charts show of one step."""
    return {name: step.metrics[name] for name in METRICS if name in step.metrics} | derived(step)


class Curves:
    """`edition` changes when points that were given out already are no longer so. Of those of one edition only the last changes."""

    def __init__(self, most: int = MOST) -> None:
        self.edition, self._most = 0, most
        self._clear()

    def _clear(self) -> None:
        self._stride = 1
        self._newest: Step | None = None
        self._points: list[Point] = []

    @property
    def length(self) -> int:
        return len(self._points)

    def follow(self, steps: Sequence[Step]) -> None:
        """Take in the steps behind those seen; all anew after a restore took some back."""
        at = bisect_right(steps, self._newest.step, key=lambda s: s.step) if self._newest is not None else 0
        if self._newest is not None and (at == 0 or steps[at - 1] is not self._newest):
            self._clear()
            self.edition, at = self.edition + 1, 0
        for step in steps[at:]:
            self._take(step)
        self._newest = steps[-1] if steps else None

    def _take(self, step: Step) -> None:
        point = step.step, 1, {name: (value, 1) for name, value in values_of(step).items()}
        if self._points and self._points[-1][1] < self._stride:
            point = _joined(self._points.pop(), point)
        self._points.append(point)
        if len(self._points) > self._most:
            self._halve()

    def _halve(self) -> None:
        pairs = zip(self._points[::2], [*self._points[1::2], None], strict=False)
        self._points = [_joined(a, b) if b is not None else a for a, b in pairs]
        self._stride *= 2
        self.edition += 1

    def since(self, at: int) -> dict[str, Any]:
        """The points from index `at` on: `step`, and a column for each name (null where a point has none). Drops count as 0."""
        points = self._points[at:]
        names = dict.fromkeys(name for _, _, sums in points for name in sums)
        columns = {name: [_mean(name, n, sums) for _, n, sums in points] for name in names}
        return {"edition": self.edition, "at": at, "step": [last for last, _, _ in points], "columns": columns}


def _joined(a: Point, b: Point) -> Point:
    sums = dict(a[2])
    for name, (total, count) in b[2].items():
        before, n = sums.get(name, (0.0, 0))
        sums[name] = (before + total, n + count)
    return b[0], a[1] + b[1], sums


def _mean(name: str, steps: int, sums: dict[str, tuple[float, int]]) -> float | None:
    """Of a reason, groups a step; of a metric, the mean over the steps that have it."""
    total, count = sums.get(name, (0.0, 0))
    count = steps if name.startswith(DROPPED) else count
    return float(f"{total / count:.5g}") if count else None


def whole_run(history: History) -> dict[str, Any]:
    """Another run's curves, to lie over this one's."""
    curves = Curves()
    curves.follow(history.steps)
    return curves.since(0) | {"evals": evals_of(history)}


def evals_of(history: History) -> list[dict[str, Any]]:
    """Scores of every evaluation set, with their intervals where they have one."""
    return [
        {
            "name": name,
            "points": [
                [e.step, e.score, *(e.metrics.get(f"eval/{name}/ci95_{end}") for end in ("low", "high"))]
                for e in history.evals_of(name)
            ],
        }
        for name in history.eval_names()
    ]
