"""Where the time of a step goes, by phase. On a GPU by events, so that nothing waits for the device while it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bus.clock import SystemClock


class Stopwatch:
    """Adds up seconds per named phase."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
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
        return self._clock.monotonic() - self._began, dict(self._seconds)
