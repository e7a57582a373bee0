"""How many samples one engine takes at once, from what it says of itself (pure: no clock, no bus).

Additive increase, multiplicative decrease. More slots make more tokens a second and each request slower. So they rise while
all of them are used, the engine has room and far fewer tokens are masked as too old than the user allows; they fall when keys
and values run out, when requests stand in the engine's own queue, or when more tokens are masked than that.

Why it does not oscillate: a change is judged by what it did. The next rise comes when as many samples have ended as there are
slots; the next fall when no more samples are under way than the last one allows; a masked share counts from the first batch
that was made under these slots. Between rise and fall lies a band, wider than a rise, in which nothing is done.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

KV_ROOM, KV_FULL = 0.80, 0.95
"""Share of the engine's keys and values in use: slots rise below the first, fall above the second."""
SLOWEST = 4.0
"""Slots do not rise where a request takes this many times the time per token of the fastest seen: a tenth more of them would
bring at most 2.5 % more tokens a second."""
IN_USE = 7 / 8  # of the slots; with fewer under way it is not the slots that hold the engine back
FALL, MASKED_FALL = 7 / 8, 3 / 4
MASKED_ROOM = 1 / 2  # of the masked share allowed: slots rise below it
STEPS_JUDGED = 3  # batches whose masked shares are averaged
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


class Look(NamedTuple):
    """What is seen of an engine at one time. None where it does not tell."""

    busy: int  # samples of ours under way
    ended: int  # samples of ours that ended since the look before
    tokens_per_s: float = 0.0  # of ours since then
    waiting: int | None = None  # requests in its queue, of all its clients
    kv_used: float | None = None  # share of the room for keys and values
    masked_step: int = -1  # newest training step whose masked share is known; -1 = none
    masked: float = 0.0  # that share


class Slots:
    """One engine's slots; call `decide` at every look. `why`: what the last change was made for."""

    def __init__(self) -> None:
        self.slots = 0  # 0 = nothing decided yet
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
        self._shares: deque[float] = deque(maxlen=STEPS_JUDGED)
        self._full: deque[bool] = deque(maxlen=PATIENCE)
        self._queued: deque[bool] = deque(maxlen=PATIENCE)

    def decide(self, look: Look, limits: Limits) -> int:
        """The slots from now on, floor to ceiling; half of the ceiling at first."""
        if self.slots == 0:
            self._masked_step = look.masked_step
            return self._set(limits.ceiling // 2, limits, "")
        if not limits.floor <= self.slots <= max(limits.floor, limits.ceiling):
            return self._set(self.slots, limits, "bounds")
        self._fold(look, limits)
        if look.busy > self.slots:  # the last fall has not come through
            self._begin()
            return self.slots
        over = self._masked_over(limits)
        full = len(self._full) == PATIENCE and all(self._full)
        queued = len(self._queued) == PATIENCE and all(self._queued)
        if over or full or queued:
            why: Why = "masked share" if over else "keys and values" if full else "queue"
            self._rest = 0 if over else REST
            used = min(self.slots, max(1, self._most_busy))
            return self._set(int(used * (MASKED_FALL if over else FALL)), limits, why)
        if self._ended >= self.slots * LIVES and self._may_rise(look, limits):
            return self._set(self.slots + max(1, min(limits.ceiling // 16, self.slots // 8)), limits, "room")
        return self.slots

    def _set(self, slots: int, limits: Limits, why: Why) -> int:
        slots = max(limits.floor, min(slots, limits.ceiling))
        if slots != self.slots:
            self.slots, self.why = slots, why
        self._begin()
        return slots

    def _fold(self, look: Look, limits: Limits) -> None:
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
            if self._steps > limits.bound + 1:
                self._shares.append(look.masked)

    def _masked_over(self, limits: Limits) -> bool:
        judged = len(self._shares) == STEPS_JUDGED
        return limits.max_masked > 0 and judged and sum(self._shares) / STEPS_JUDGED > limits.max_masked

    def _may_rise(self, look: Look, limits: Limits) -> bool:
        most_kv, self._most_kv, self._ended = self._most_kv, 0.0, 0
        self._rest = max(0, self._rest - 1)
        if self._rest or self._mean_busy < IN_USE * self.slots:
            return False
        if limits.max_masked > 0:
            judged = len(self._shares) == STEPS_JUDGED
            if not judged or sum(self._shares) / STEPS_JUDGED >= MASKED_ROOM * limits.max_masked:
                return False
        if any(self._queued) or most_kv >= KV_ROOM:
            return False
        return not self._fastest or look.busy <= SLOWEST * self._fastest * look.tokens_per_s
