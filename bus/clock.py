"""The house's only source of time, so that tests can own it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

STALL_S = 1.0  # by which a wait of ours may outlast what it was to take; more, and this process did not run
TICK_S = 1.0


class Clock(Protocol):
    """Wall time for people and records, monotonic time for waits; both in seconds."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real clock."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Awake:
    """`async with`: whether this process ran all the while. A timer of its own that is late by more than STALL_S tells that it was
    stopped, as SIGSTOP, a frozen container or a loop that is held do; also where that took no longer than a deadline."""

    def __init__(self) -> None:
        self.stood = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self.stood = False
        self._wait()

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        due = self._loop.time() + TICK_S
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self.stood = self.stood or self._loop.time() - due > STALL_S
        self._wait()
