"""Lends the trainer's GPUs to engines while the next batch is far away (--lend-trainer-gpus).

Reads  how fast samples came (intake), samples that wait for an engine    Writes  policy (turn), by Turns
Decides by lending.py, at each look of the trainer at its batch. Versions are published as ever: only these engines' turns are tied
to the trainer's waits, all others generate all the time.
"""

from __future__ import annotations

from actors.runtime.context import Context
from actors.trainer.intake import Intake
from actors.trainer.lending import Costs, expected_wait, should_be_lent
from actors.trainer.spec import TurnSpec
from actors.trainer.turns import GpuTurns
from bus.inspect import stream_facts
from bus.topology import PREFIXES, PROMPTS, TAIL

LOOK_S = 0.25  # no decision is made more often


class Lender:
    """Of one trainer. Without `spec.lends` it only passes turns on."""

    def __init__(self, context: Context, spec: TurnSpec, turns: GpuTurns, intake: Intake) -> None:
        self._context = context
        self._spec = spec
        self._turns = turns
        self._intake = intake
        self._costs = Costs()
        self._began = self._looked = self._lent_at = context.clock.monotonic()
        self._returns = 0
        self._lent_s = self._waited_s = 0.0
        self._tokens = 0

    @property
    def lends(self) -> bool:
        return self._spec.lends

    def begin(self) -> None:
        """A wait for a batch begins."""
        if not self._returns:
            self._costs.fade()
        self._began, self._returns = self._context.clock.monotonic(), 0

    async def look(self, *, publishes: bool) -> bool:
        """Lend, take back, or leave it as it is; whether the GPUs were lent by this look. `publishes`: a version that the engines
        do not have was announced."""
        now = self._context.clock.monotonic()
        if not self.lends or self._context.draining.is_set() or now - self._looked < LOOK_S:
            return False
        self._looked, lent, costs = now, not self._turns.held, self._costs
        knobs, bus = self._context.knobs, self._context.bus
        missing = int(knobs.rollout_batch_size) * int(knobs.n_samples_per_prompt) - self._intake.n_ready
        rate = self._intake.arrivals.rate(await bus.server_time())
        wait_s = expected_wait(missing=missing, rate=rate, waited_s=now - self._began)

        def wanted(unread: bool) -> bool:
            return should_be_lent(
                lent=lent,
                wait_s=wait_s,
                lend_s=costs.lend_s,
                take_s=costs.take_s,
                floor_s=self._spec.after_s,
                returns=self._returns,
                unread=unread,
            )

        if lent and not wanted(True):
            await self.take_back()
        elif not lent and wanted(True) and await self._unread():
            self._lent_at = now
            await self._turns.give(publishes=publishes)
            return True
        return False

    async def _unread(self) -> bool:
        """Whether samples wait that no engine has."""
        _, facts = await stream_facts(self._context.bus)
        return any(facts[stream.name].lag for stream in (PROMPTS, PREFIXES, TAIL))

    async def take(self) -> None:
        """The batch is complete: until the trainer has its GPUs."""
        began = self._context.clock.monotonic()
        await self.take_back()
        waited = self._context.clock.monotonic() - began
        if self.lends:
            self._waited_s += waited
            self._context.count("lend/waited_s", waited)

    async def take_back(self) -> None:
        """Until the trainer has its GPUs; measures what the lending cost and brought."""
        if self._turns.held:
            return
        began = self._context.clock.monotonic()
        await self._turns.take()
        if not self.lends:
            return
        lent_s = began - self._lent_at
        self._returns += 1
        self._lent_s += lent_s
        self._costs.taken(self._context.clock.monotonic() - began)
        ready = [event.data.get("ready_s") for event in self._turns.released]
        slowest = max((s if isinstance(s, int | float) else lent_s for s in ready), default=lent_s)
        self._costs.lent(self._turns.times.get("perf/sleep_s", 0.0) + slowest)
        tokens = sum(int(event.data.get("tokens", 0)) for event in self._turns.released)
        self._tokens += tokens
        for name, by in (("lend/times", 1.0), ("lend/s", lent_s), ("lend/tokens", float(tokens))):
            self._context.count(name, by)

    def metrics(self) -> dict[str, float]:
        """Of the step just done; the next one begins."""
        found = dict(self._turns.times)
        if self.lends:
            found |= {"perf/lent_s": self._lent_s, "perf/gpu_wait_s": self._waited_s, "perf/lent_tokens": float(self._tokens)}
            self._lent_s, self._waited_s, self._tokens = 0.0, 0.0, 0
            self._turns.times.clear()
        return found
