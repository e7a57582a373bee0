"""Engines that can be sent a version, as their workers tell (pure).

Always true: an engine is in it only between an activation and the next sign of trouble, so a new engine, or one that a
transport failed, takes a version from files before it is counted on again. One that failed STRIKES times in a row, as one that
ends whenever it is sent to, gets files alone for ASIDE_S.
"""

from __future__ import annotations

from typing import NamedTuple

from bus.messages.control import Event, Vitals

STRIKES = 2
ASIDE_S = 600.0


class Seat(NamedTuple):
    """Where an engine runs, its GPUs (ranks in a broadcast group), and which stint of its worker this is: an engine that was
    away is in no group any more."""

    gpus: int
    host: str
    stint: int


class Fleet:
    """Folded from the events log. `timeout_s`: silence after which a worker counts as gone."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._seats: dict[str, Seat] = {}
        self._stints = 0
        self._heard: dict[str, float] = {}  # worker -> wall seconds of its last word
        self._failed: dict[str, tuple[int, float]] = {}  # worker -> ways that failed since the last that did not; when the last

    def fold(self, message: object) -> None:
        """Take one message of the events log; what is not about engines is ignored."""
        match message:
            case Event(kind="activated"):
                if message.actor not in self._seats:
                    self._stints += 1
                    gpus, host = int(message.data.get("gpus", 1)), str(message.data.get("host", ""))
                    self._seats[message.actor] = Seat(gpus, host, self._stints)
                self._heard[message.actor] = message.wall
                if message.data.get("transport") != "disk":
                    self._failed.pop(message.actor, None)
            case Event(kind="joined" | "engine stalled" | "transport failed"):
                self.drop(message.actor)
                if message.kind == "transport failed":
                    self._failed[message.actor] = (self._failed.get(message.actor, (0, 0.0))[0] + 1, message.wall)
            case Vitals(role="generation"):
                self._heard[message.actor] = message.wall
                if message.version < 0 or message.state in ("draining", "stopped", "failed"):
                    self.drop(message.actor)

    def drop(self, worker: str) -> None:
        """Do not count on it until it activates something."""
        self._seats.pop(worker, None)

    def able(self, now: float) -> dict[str, Seat]:
        """Worker -> seat, by name; `now` in wall seconds."""
        aside = self.aside(now)
        return {
            name: seat
            for name, seat in sorted(self._seats.items())
            if now - self._heard.get(name, 0.0) <= self._timeout_s and name not in aside
        }

    def aside(self, now: float) -> set[str]:
        """Workers that get files alone for now."""
        return {name for name, (times, wall) in self._failed.items() if times >= STRIKES and now - wall < ASIDE_S}


__all__ = ("ASIDE_S", "STRIKES", "Fleet", "Seat")
