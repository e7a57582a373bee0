"""Paired comparison (pure): the run's value and the shadow's of the same thing, and how sure their difference is.

Samples of one prompt are alike, so the group is what is counted: its mean difference is one observation, and the interval is
Student's over groups. Nothing is kept but sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

Z = 1.959964  # of the normal distribution, two-sided 95 %


def student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t (Abramowitz and Stegun 26.7.5; exact for 1 and 2, within 0.4 % from 3 on)."""
    if freedom < 1:
        return inf
    if freedom < 3:
        return (12.70620, 4.302653)[freedom - 1]
    z, v = Z, float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v ** (n + 1) for n, term in enumerate(terms))


@dataclass(slots=True)
class Paired:
    """`groups` observations of `pairs` values. Means are over groups."""

    groups: int = 0
    pairs: int = 0
    run: float = 0.0
    shadow: float = 0.0
    _difference: float = 0.0
    _squares: float = field(default=0.0)  # of deviations of the difference (Welford)

    def add(self, pairs: list[tuple[float, float]]) -> None:
        """One group's (run, shadow), at least one."""
        self.groups += 1
        self.pairs += len(pairs)
        run, shadow = (sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1))
        self.run += (run - self.run) / self.groups
        self.shadow += (shadow - self.shadow) / self.groups
        before = shadow - run - self._difference
        self._difference += before / self.groups
        self._squares += before * (shadow - run - self._difference)

    @property
    def difference(self) -> float:
        """Mean of shadow - run."""
        return self._difference

    @property
    def half(self) -> float:
        """Half the width of its 95 % interval; infinite with one group."""
        if self.groups < 2:
            return inf
        return student(self.groups - 1) * sqrt(self._squares / (self.groups - 1) / self.groups)

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain values; no bounds with one group."""
        sure = self.groups > 1
        low, high = (self.difference - self.half, self.difference + self.half) if sure else (None, None)
        return {
            "groups": self.groups,
            "pairs": self.pairs,
            "run": self.run,
            "shadow": self.shadow,
            "difference": self.difference,
            "low": low,
            "high": high,
        }
