"""What a simulated run gave (pure)."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import msgspec

from actors.runtime.staleness import bound_in_steps
from bus.messages.samples import RolloutDone
from bus.messages.versions import staleness
from miles_async.console.whatif.engines import Engines
from miles_async.console.whatif.setup import SimulatedKnobs, SimulatedPace


class SimulatedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the counted steps. `efficiency`: time that trainer or full engines need for a step, whichever is more, over the
    time that it takes. `slots`: of all engines. Shares: `wait` of the trainer's time, `idle` of the engines' slots, `masked` of
    the tokens trained, `dropped` of the samples, by reason, `split` of the groups: trained while members still ran. Ages in steps:
    `mean_age` of what is within the bound, `max_age` before the mask."""

    step_s: float
    efficiency: float
    wait: float
    slots: float
    idle: float
    masked: float
    mean_age: float
    max_age: float
    split: float
    dropped: dict[str, float]


class Seen:
    """What is counted from the time `since` on."""

    def __init__(self, since: float, engines: Engines) -> None:
        self.wait = self.work = 0.0  # seconds of the trainer, and of samples as if each had run alone
        self._since, self._area, self._room = since, engines.area, engines.room
        self._ages: Counter[int] = Counter()  # tokens trained
        self._dropped: Counter[str] = Counter()  # samples
        self._samples = self._masked = 0
        self.groups: dict[str, bool] = {}  # trained -> while members of it still ran

    def drop(self, reason: str, n: int) -> None:
        self._dropped[reason] += n

    def train(self, rollout: RolloutDone, step: int, bound: int) -> int:
        """Its tokens that are masked."""
        self._samples += 1
        masked = 0
        for span in rollout.made:
            age = staleness(step, span.step)
            self._ages[age] += span.n
            masked += span.n if age > bound else 0
        self._masked += masked
        return masked

    def outcome(self, until: float, knobs: SimulatedKnobs, pace: SimulatedPace, engines: Engines, steps: int) -> SimulatedOutcome:
        took = until - self._since
        tokens, judged = self._ages.total(), self._samples + self._dropped.total()
        bound = bound_in_steps(knobs.max_weight_staleness, knobs.update_weights_interval)
        trains_s = pace.train_s + pace.train_token_s * tokens / (steps + 1) + mean(pace.between_s)
        slots = (engines.room - self._room) / took  # of all workers, on average
        engines_s = self.work / steps * (1 + pace.slowdown * slots / len(engines.workers)) / slots
        return SimulatedOutcome(
            step_s=took / steps,
            efficiency=max(trains_s, engines_s) * steps / took,
            wait=self.wait / took,
            slots=slots,
            idle=max(0.0, 1 - (engines.area - self._area) / (took * slots)),
            masked=self._masked / max(1, tokens),
            mean_age=sum(age * n for age, n in self._ages.items() if age <= bound) / max(1, tokens - self._masked),
            max_age=max(self._ages, default=0),
            split=sum(self.groups.values()) / max(1, len(self.groups)),
            dropped={reason: n / judged for reason, n in sorted(self._dropped.items())},
        )
