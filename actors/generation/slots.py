"""How many samples one engine takes at once, from what it says of itself (pure: no clock, no bus).

Additive increase, multiplicative decrease. More slots make more tokens a second and each request slower. So they rise while
all of them are used, the engine has room and far fewer tokens are masked as too old than the user allows; they fall when keys
and values run out, when requests stand in the engine's own queue, or when more tokens are masked than that.

Why it does not oscillate: a change is judged by what it did. The next rise comes when as many samples have ended as there are
slots; the next fall when no more samples are under way than the last one allows; a masked share counts from the first batch
that was made under these slots. Between rise and fall lies a band, wider than a rise, in which nothing is done. Masked shares of
single batches scatter about as much as they measure, so what they lie above or below the share allowed is summed (cumulative
sums; Page, Biometrika 41, 1954): a share far above it is met at the next batch, one a little above it only when it lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

LOOK_S = 1.0
"""Seconds from one look to the next."""
KV_ROOM, KV_FULL = 0.80, 0.95
"""Share of the engine's keys and values in use: slots rise below the first, fall above the second."""
SLOWEST = 4.0
"""Slots do not rise where a request takes this many times the time per token of the fastest seen: a tenth more of them would
bring at most 2.5 % more tokens a second."""
IN_USE = 7 / 8  # of the slots; with fewer under way it is not the slots that hold the engine back
FALL, MASKED_FALL = 7 / 8, 3 / 4
MUCH_MASKED = 2.0  # times the share allowed: slots fall by MASKED_FALL, else by FALL
MASKED_ROOM, MASKED_FULL = 0.7, 0.9
"""Times the share allowed: masked shares below the first speak for more slots, above the second for fewer."""
EVIDENCE = 4.0
"""Sum over batches, in shares allowed, of what lies beyond one of these; more than that decides."""
RISE, RISES, MASKED_RISE = 8, ((0.01, 4), (0.1, 8)), 16
"""Slots rise by one in so many, counting no more than half of the ceiling. Where a masked share is allowed: at most so many times
that is masked -> by one in so many; else by the least, since from there it grows far faster than they."""
LIVES = 2  # a rise is judged when as many samples have ended as there are slots, times this
REST = 6  # such judgements after a fall for lack of room, before slots rise again
PATIENCE = 3  # looks in a row that find keys and values full, or a queue: not a wave that passes
SMOOTH = 1 / 8  # weight of a look in the mean number of samples under way

Why = Literal["", "masked share", "keys and values", "queue", "room", "bounds"]


class Limits(NamedTuple):
    """What the user and the engine set. `max_masked`: share of tokens, 0 = any. `bound`: training steps that a token may be
    older than its training, and for which batches made under former slots still come."""

    floor: int
    ceiling: int
    max_masked: float = 0.0
    bound: int = 0

    @property
    def first(self) -> int:
        """Half of the ceiling. Where a masked share is allowed, by the bound: a token may be half as old at bound 1 as at bound 3,
        and what was masked before slots fell is not taken back; at wide bounds nothing is masked for long below three quarters."""
        eighths = min(6, self.bound + 1) if self.max_masked > 0 and self.bound > 0 else 4
        return self.ceiling * eighths // 8

    @classmethod
    def of(cls, least: int, most: Iterable[int], max_masked: float | None, bound: int, interval: int) -> Limits:
        """From settings; of `most` 0 says nothing. `bound`: max_weight_staleness, with a version every `interval` steps."""
        ceiling = min(limit for limit in most if limit)
        return cls(min(least, ceiling), ceiling, max_masked or 0.0, (bound + 1) * interval - 1)


class EngineLook(NamedTuple):
    """What is seen of an engine at one time. None where it does not tell."""

    busy: int  # samples of ours under way
    ended: int  # samples of ours that ended since the look before
    tokens_per_s: float = 0.0  # of ours since then
    waiting: int | None = None  # requests in its queue, of all its clients
    kv_used: float | None = None  # share of the room for keys and values
    masked_step: int = -1  # newest training step whose masked share is known; -1 = none
    masked: float = 0.0  # that share


class Slots:
    """One engine's slots; call `decide` at every look. `why`: what the last change was made for. `slots`: those that it has
    already; 0 = none, so nothing is decided yet."""

    def __init__(self, slots: int = 0) -> None:
        self.slots = slots
        self.why: Why = ""
        self._mean_busy = 0.0
        self._fastest: float | None = None  # least time per token of one request, seconds
        self._rest = 0
        self._busy = 0  # at the look before
        self._masked_step = -1
        self._begin()

    def _begin(self) -> None:
        """Reset all counts, for the present slots."""
        self._ended = 0
        self._most_busy = 0
        self._most_kv = 0.0
        self._steps = 0
        self._judged = 0  # batches made under these slots
        self._share = 0.0  # their masked shares together, in shares allowed
        self._above = self._below = 0.0  # the cumulative sums
        self._full: deque[bool] = deque(maxlen=PATIENCE)
        self._queued: deque[bool] = deque(maxlen=PATIENCE)

    def decide(self, look: EngineLook, limits: Limits) -> int:
        """The slots from now on, floor to ceiling; at first what `Limits.first` says."""
        if self.slots == 0:
            self._masked_step = look.masked_step
            return self._set(limits.first, limits, "")
        if not limits.floor <= self.slots <= max(limits.floor, limits.ceiling):
            return self._set(self.slots, limits, "bounds")
        self._fold(look, limits)
        if look.busy > self.slots:  # the last fall has not come through
            self._begin()
            return self.slots
        over = self._above > EVIDENCE
        full = len(self._full) == PATIENCE and all(self._full)
        queued = len(self._queued) == PATIENCE and all(self._queued)
        if over or full or queued:
            why: Why = "masked share" if over else "keys and values" if full else "queue"
            self._rest = 0 if over else REST
            used = min(self.slots, max(1, self._most_busy))
            much = over and self._share > MUCH_MASKED * self._judged
            return self._set(int(used * (MASKED_FALL if much else FALL)), limits, why)
        if self._ended >= self.slots * LIVES and self._may_rise(look, limits):
            return self._set(self.slots + self._step_up(limits), limits, "room")
        return self.slots

    def _step_up(self, limits: Limits) -> int:
        """Slots of the next rise."""
        part = RISE
        if limits.max_masked > 0:
            part = next((part for share, part in RISES if self._share <= share * self._judged), MASKED_RISE)
        return max(1, min(limits.ceiling // 2, self.slots) // part)

    def _set(self, slots: int, limits: Limits, why: Why) -> int:
        slots = max(limits.floor, min(slots, limits.ceiling))
        if slots != self.slots:
            self.slots, self.why = slots, why
        self._begin()
        return slots

    def _fold(self, look: EngineLook, limits: Limits) -> None:
        self._ended += look.ended
        self._most_busy = max(self._most_busy, look.busy)
        self._mean_busy += SMOOTH * (look.busy - self._mean_busy)
        self._most_kv = max(self._most_kv, look.kv_used or 0.0)
        self._full.append(look.kv_used is not None and look.kv_used > KV_FULL)
        self._queued.append((look.waiting or 0) > max(1, self.slots // 8))  # an eighth waits for company (GATHER)
        if look.busy and look.tokens_per_s and abs(look.busy - self._busy) <= look.busy / 4:  # about as many all the time
            time_s = look.busy / look.tokens_per_s
            self._fastest = time_s if self._fastest is None else min(self._fastest, time_s)
        self._busy = look.busy
        if look.masked_step != self._masked_step:
            self._masked_step = look.masked_step
            self._steps += 1
            if self._steps > limits.bound + 1 and limits.max_masked > 0:
                self._judge(look.masked / limits.max_masked)

    def _judge(self, share: float) -> None:
        """A batch's masked share, in shares allowed."""
        self._judged += 1
        self._share += share
        self._above = max(0.0, self._above + share - MASKED_FULL)
        self._below = max(0.0, self._below + MASKED_ROOM - share)

    def _may_rise(self, look: EngineLook, limits: Limits) -> bool:
        most_kv, self._most_kv, self._ended = self._most_kv, 0.0, 0
        self._rest = max(0, self._rest - 1)
        if self._rest or self._mean_busy < IN_USE * self.slots:
            return False
        if limits.max_masked > 0 and self._below < EVIDENCE:
            return False
        if any(self._queued) or most_kv >= KV_ROOM:
            return False
        return not self._fastest or look.busy <= SLOWEST * self._fastest * look.tokens_per_s
