"""What a single look at a run cannot tell: rates of streams, and what engines did with their time (pure).

Folded from snapshots, over the last SPLIT_S and RATE_S seconds.
"""

from __future__ import annotations

from collections import Counter, deque

from actors.runtime.snapshot import ActorFacts, Snapshot
from bus.messages.waits import Wait

RATE_S, SPLIT_S = 10.0, 300.0
MOST_GAP_S = 5.0  # between two looks; while nobody watches nobody looks
DOINGS = ("generating", "taking a new version", "booting", "without work")


def doing(actor: ActorFacts) -> str:
    """Which of DOINGS an engine's worker does."""
    vitals = actor.vitals
    if vitals.state == "starting" or vitals.wait is Wait.BOOTING:
        return "booting"
    if vitals.wait in (Wait.ACTIVATION, Wait.CURRENT_VERSION):
        return "taking a new version"
    return "generating" if vitals.in_flight else "without work"


class Looks:
    """Give each snapshot to `see`."""

    def __init__(self) -> None:
        self._added: deque[tuple[float, dict[str, int]]] = deque()
        self._split: deque[tuple[float, float, Counter[str], int, int]] = deque()  # wall, seconds, doings, in flight, slots

    def see(self, snapshot: Snapshot) -> None:
        """Take in one look, in order of time."""
        wall = snapshot.wall
        if self._added and not 0 <= wall - self._added[-1][0] <= MOST_GAP_S:
            self._added.clear()
        engines = snapshot.living("generation")
        if self._added:
            count = Counter(doing(a) for a in engines)
            busy, slots = sum(a.vitals.in_flight for a in engines), sum(a.vitals.slots for a in engines)
            self._split.append((wall, wall - self._added[-1][0], count, busy, slots))
        self._added.append((wall, {name: facts.added for name, facts in snapshot.streams.items()}))
        while wall - self._added[0][0] > RATE_S:
            self._added.popleft()
        while self._split and wall - self._split[0][0] > SPLIT_S:
            self._split.popleft()

    def rate(self, stream: str) -> float | None:
        """Entries appended a second; None while it is not known."""
        (first, before), (last, now) = (self._added[0], self._added[-1]) if self._added else ((0.0, {}), (0.0, {}))
        if last - first < 0.5 or before.get(stream, -1) < 0 or now.get(stream, -1) < before[stream]:
            return None
        return (now[stream] - before[stream]) / (last - first)

    def split(self) -> dict[str, float]:
        """Shares of the engines' time by what they did."""
        seconds: Counter[str] = Counter()
        for _, took, count, _, _ in self._split:
            for what, n in count.items():
                seconds[what] += took * n  # type: ignore[assignment]
        total = sum(seconds.values())
        return {what: seconds[what] / total for what in DOINGS if seconds[what]} if total else {}

    def slots_used(self) -> float | None:
        """Share of the engines' slots that were in use; None where there are none."""
        offered = sum(took * slots for _, took, _, _, slots in self._split)
        return sum(took * busy for _, took, _, busy, _ in self._split) / offered if offered else None
