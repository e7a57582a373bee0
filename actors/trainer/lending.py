"""When the trainer lends its GPUs to engines, and when it wants them back (pure; --lend-trainer-gpus).

Reads  nothing    Owns  what lending cost in this run so far
It lends while the wait for the batch will be longer than lending costs, measured in this run, and than the floor; and takes the
GPUs back shortly before the batch is complete. Always true: after k returns in one wait it lends again only for a wait 2^k times as
long, so a wait that is W times the cost sees at most log2(W) + 1 of them, however the estimate moves.
"""

from __future__ import annotations

from collections import deque

KEPT = 5  # newest measurements of each cost
FIRST_S = 1.0  # a cost that was not measured yet; the floor guards the first lending
FADES = 0.95  # of a cost in each step in which nothing was lent: one bad measurement is not for ever
EARLY_S = 0.5  # the trainer looks as seldom as this while nothing arrives
SPARE = 1.25  # of the time that taking back took: it is begun that much earlier


class Arrivals:
    """When samples came, by the bus's clock in seconds: their rate over the newest `window`."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque()
        self._n = 0

    def add(self, at_s: float, n: int, window: int) -> None:
        """`n` samples came at `at_s`."""
        self._came.append((at_s, n))
        self._n += n
        while self._n - self._came[0][1] >= window:
            self._n -= self._came.popleft()[1]

    def rate(self, now_s: float) -> float:
        """Samples a second; 0 where too few came to tell. The oldest only begins the time over which others came."""
        if len(self._came) < 2:
            return 0.0
        (began, first), newest = self._came[0], self._came[-1][0]
        return (self._n - first) / max(1e-3, max(now_s, newest) - began)


def expected_wait(*, missing: int, rate: float, waited_s: float) -> float:
    """Seconds until `missing` samples are there. Without a rate: as long again as was waited."""
    if missing <= 0:
        return 0.0
    return missing / rate if rate > 0 else waited_s


def should_be_lent(*, lent: bool, wait_s: float, lend_s: float, take_s: float, floor_s: float, returns: int, unread: bool) -> bool:
    """Whether engines should have the GPUs now.

    `lent`: they have them. `wait_s`: until the batch is complete. `lend_s`, `take_s`: what lending costs, from the word to the
    first version served, and from the word to the trainer's memory being back. `floor_s`: least wait. `returns`: how often they
    came back in this wait. `unread`: whether samples wait for an engine; without, there is nothing to lend them for.
    """
    back_s = SPARE * take_s + EARLY_S
    if lent:
        return wait_s > back_s
    return unread and wait_s > max(floor_s, lend_s + back_s) * 2**returns


class Costs:
    """Seconds that lending and taking back took: the middle and the longest of the newest."""

    def __init__(self) -> None:
        self._lend: deque[float] = deque(maxlen=KEPT)
        self._take: deque[float] = deque(maxlen=KEPT)

    def lent(self, seconds: float) -> None:
        self._lend.append(seconds)

    def taken(self, seconds: float) -> None:
        self._take.append(seconds)

    def fade(self) -> None:
        """A step went by without lending."""
        for found in (self._lend, self._take):
            for i, seconds in enumerate(found):
                found[i] = seconds * FADES

    @property
    def lend_s(self) -> float:
        """The middle: an engine that had to boot says little of the next time."""
        return sorted(self._lend)[len(self._lend) // 2] if self._lend else FIRST_S

    @property
    def take_s(self) -> float:
        """The longest, since the batch waits for it."""
        return max(self._take, default=FIRST_S)
