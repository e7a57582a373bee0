"""Who activates next (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def next_wave(*, serving: Mapping[str, int], target: int, fraction: float, in_progress: Sequence[str]) -> list[str]:
    """Workers to order to `target` now.

    `fraction` 1.0 = all at once; 1/k = rolling, at most that share (at least one) is away at any time. Workers already
    there or on their way are left alone; names are sorted, so that the choice does not depend on arrival.
    """
    behind = sorted(name for name, version in serving.items() if version < target and name not in in_progress)
    if fraction >= 1.0:
        return behind
    allowed = max(1, int(len(serving) * fraction))
    return behind[: max(0, allowed - len(in_progress))]


__all__ = ("next_wave",)
