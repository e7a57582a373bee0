"""Where the time of a step goes, by phase. On a GPU by events, so that nothing waits for the device while it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bus.clock import SystemClock

COMPILE = "compile"


class Compilation:
    """Seconds that torch compiles in this process: it does so in the middle of whatever asked for it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._clock = SystemClock()
        self._began: float | None = None
        self._counts = False

    def count(self) -> None:
        """From now on; for whoever is about to have something compiled."""
        if not self._counts:
            from torch._dynamo.callback import callback_handler

            self._counts = True
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def _start(self, *_: Any) -> None:
        self._began = self._clock.monotonic()

    def _end(self, *_: Any) -> None:
        if self._began is not None:
            self.seconds += self._clock.monotonic() - self._began
            self._began = None


compilation = Compilation()
"""Of this process, as torch's own record of it is."""


class Stopwatch:
    """Adds up seconds per named phase. Those of COMPILE, if any, are also part of the phase that they fell into."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
        self._compiled = compilation.seconds
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        if self._cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
        else:
            start_s = self._clock.monotonic()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.monotonic() - start_s

    def read(self) -> tuple[float, dict[str, float]]:
        """(seconds since this watch was made, seconds per phase); waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            for name, start, stop in self._events:
                self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(stop) / 1000
            self._events.clear()
        compiled = compilation.seconds - self._compiled
        phases = self._seconds | ({COMPILE: compiled} if compiled else {})
        return self._clock.monotonic() - self._began, phases
