"""A clock that stands still until it is told to advance."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """`Clock` for tests. Sleepers wake in the order of their times when `advance` passes them."""

    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self._start = wall
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def wall(self) -> float:
        return self._start + self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Let time pass; each sleeper runs at its own time before the next one wakes."""
        await _let_others_run()  # what is ready now runs now
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await _let_others_run()
        self._now = end
        await _let_others_run()

    @property
    def sleeping(self) -> int:
        """How many tasks wait for time to pass."""
        return len(self._sleepers)


async def _let_others_run() -> None:
    """Woken tasks go on up to their next wait."""
    for _ in range(3):
        await asyncio.sleep(0)


__all__ = ("ManualClock",)
