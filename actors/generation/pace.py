"""How many samples this worker takes at once: the number that was set, or with `auto` what slots.py decides.

Reads  the engine's load, the masked share that the publisher passes on    Owns  this worker's slots
An engine has no word for "my load changed", so it is looked at every LOOK_S, and only under `auto`.
"""

from __future__ import annotations

import asyncio

from actors.generation.engine import EngineLoad, EngineUnavailable, RequestRefused
from actors.generation.link import EngineLink
from actors.generation.slots import Limits, Look, Slots
from actors.runtime.context import Context
from bus.knobs.live import KnobValues
from bus.messages.policy import PolicyActive

LOOK_S = 1.0
TOLD = 0.1  # change of the slots, since it was told last, that is worth an event


class Pace:
    """`room_for`: samples that the engine was started for at once; the ceiling where nothing else sets one."""

    def __init__(self, context: Context, link: EngineLink, room_for: int) -> None:
        self._context = context
        self._link = link
        self._room_for = room_for
        self._auto = Slots()
        self._masked: tuple[int, float] = (-1, 0.0)
        self._told = 0
        self._ended = 0

    @property
    def slots(self) -> int:
        """Samples at once; 0 until the engine was looked at for the first time."""
        return int(self._context.knobs.sglang_server_concurrency) or self._auto.slots

    def sample_ended(self) -> None:
        """One left, whichever way."""
        self._ended += 1

    def hear(self, said: PolicyActive) -> None:
        """The newest batch's masked share, the same for every worker."""
        self._masked = (said.masked_step, said.masked_fraction)

    async def follow(self, stop: asyncio.Event) -> None:
        """Until `stop`: looks at the engine while it serves; woken by time or the end."""
        while not stop.is_set():
            knobs = self._context.knobs
            if knobs.sglang_server_concurrency:
                self._auto, self._told = Slots(), 0
            elif self._link.serving is not None and not self._link.released:
                await self._look(knobs)
            self._context.slots = self.slots
            try:
                await asyncio.wait_for(stop.wait(), LOOK_S)
            except TimeoutError:
                continue

    async def _look(self, knobs: KnobValues) -> None:
        engine = self._link.engine
        if engine is None:
            return
        try:
            load = await engine.load()
        except (EngineUnavailable, RequestRefused):
            return  # whoever runs a sample there notices, and says so
        ended, self._ended = self._ended, 0
        look = Look(
            busy=self._context.in_flight,
            ended=ended,
            running=load.running,
            waiting=load.waiting,
            kv_used=load.kv_used,
            tokens_per_s=load.tokens_per_s,
            masked_step=self._masked[0],
            masked=self._masked[1],
        )
        slots = self._auto.decide(look, self._limits(knobs, load))
        if abs(slots - self._told) > TOLD * self._told:
            why = f": {self._auto.why}" if self._told else ""
            await self._context.event("slots", f"{self._told} -> {slots}{why}", slots=slots, why=self._auto.why)
            self._told = slots

    def _limits(self, knobs: KnobValues, load: EngineLoad) -> Limits:
        given = [int(knobs.sglang_concurrency_max), self._room_for, load.max_running or 0]
        interval = int(knobs.values.get("update_weights_interval", 1))
        ceiling = min(limit for limit in given if limit)
        return Limits(
            floor=min(int(knobs.sglang_concurrency_min), ceiling),
            ceiling=ceiling,
            max_masked=float(knobs.max_masked_fraction),
            bound=(int(knobs.max_weight_staleness) + 1) * interval - 1,
        )


__all__ = ("Pace",)
