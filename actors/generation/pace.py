"""How many samples this worker takes at once, and whether these are the tail's.

Reads  the engine's load, what the publisher says of masked shares and of who serves    Owns  this worker's slots
Slots are the number that was set, or with `auto` what slots.py decides; a worker of the tail's lane (lane.py) takes no more than
are kept there. An engine has no word for "my load changed", so it is looked at every LOOK_S, or every TOLD_S
where it is only shown.
"""

from __future__ import annotations

import asyncio

from actors.generation.engine import EngineLoad, EngineUnavailable, RequestRefused
from actors.generation.lane import lane_of
from actors.generation.link import EngineLink
from actors.generation.slots import LOOK_S, EngineLook, Limits, Slots
from actors.runtime.context import Context
from actors.runtime.deadline import within
from bus import Entry, Reader
from bus.knobs.live import KnobValues
from bus.messages.active import PolicyActive
from bus.messages.events import EventKind
from bus.messages.samples import SampleTask
from bus.topology import TAIL

TOLD_S = 5.0
RATE_S = 30.0  # over which the rate of tokens is smoothed
TOLD_SEEN = 0.3  # part of it, after which the rate is told: some ten seconds of work
TOLD = 0.1  # change of the slots, since it was told last, that is worth an event


class Pace:
    """`room_for`: samples that the engine was started for at once; the ceiling where nothing else sets one. `tail_wait_s`: longest
    wait for a worker of the lane; then any worker takes what waits there."""

    def __init__(self, context: Context, link: EngineLink, room_for: int, tail_wait_s: float) -> None:
        self._context = context
        self._link = link
        self._room_for = room_for
        self._tail_wait_s = tail_wait_s
        self._auto = Slots()
        self._masked: tuple[int, float] = (-1, 0.0)
        self._told = 0
        self.asked = 0  # requests that the engine has now
        self.tokens, self.ended = 0, 0  # that came from it, and samples that left, whichever way
        self._looked = (0, 0)  # the same at the last look of `auto`
        self._shown = 0  # tokens that were shown
        self._came_at = 0.0  # when some had come, or the engine had nothing to do, as it was shown last
        self._rate, self._seen = 0.0, 0.0  # tokens a second, smoothed from 0; the same of a rate that is always 1
        self._looked_at = context.clock.monotonic()
        self._shown_at = 0.0
        self._serving: tuple[str, ...] = ()
        self._lane: dict[str, int] = {}  # worker -> slots kept for the tail
        self._overdue = False  # somebody waits in the lane for too long

    @property
    def slots(self) -> int:
        """Samples at once; 0 until the engine was looked at for the first time."""
        slots = int(self._context.knobs.sglang_server_concurrency) or self._auto.slots
        return min(slots, self._lane.get(self._context.name, slots))

    @property
    def in_lane(self) -> bool:
        """Whether this worker's slots are the tail's first."""
        return self._context.name in self._lane

    @property
    def takes_tail(self) -> bool:
        """Whether samples of the lane are for this worker: it is of the lane, or there is none, or they wait for too long."""
        return not self._lane or self.in_lane or self._overdue

    def leaves_at(self, entry: Entry, task: SampleTask) -> int | None:
        """Response tokens at which this sample goes on in the lane; None = it stays here. Nobody goes there twice."""
        if not self._lane or self.in_lane or entry.stream is TAIL or task.eval_name:
            return None
        return self._context.knobs.tail_after_tokens or None

    def _show(self) -> None:
        """What the doctor compares: requests with the engine, their tokens a second while there are any, and for how long none has
        come although the engine serves."""
        counters, now = self._context.counters, self._context.clock.monotonic()
        came, self._shown = self.tokens - self._shown, self.tokens
        works = self.asked and self._link.serving is not None and not self._link.released
        if came or not works:
            self._came_at = now
        if works:
            share = LOOK_S / RATE_S
            self._rate += share * (came / LOOK_S - self._rate)
            self._seen += share * (1 - self._seen)
            if self._seen > TOLD_SEEN:
                counters["engine/tokens_per_s"] = self._rate / self._seen
        counters.update({"engine/asked": float(self.asked), "engine/silent_s": now - self._came_at})

    def hear(self, said: PolicyActive) -> None:
        """The newest batch's masked share and who serves, the same for every worker."""
        self._masked = (said.masked_step, said.masked_fraction)
        self._serving = tuple(name for name, version in said.serving.items() if version >= 0)
        self._find_lane(self._context.knobs)

    def _find_lane(self, knobs: KnobValues) -> None:
        each = int(knobs.sglang_server_concurrency or knobs.sglang_concurrency_max or 0)
        self._lane = lane_of(self._serving, tail_slots=int(knobs.tail_slots or 0), each=each)

    async def follow(self, reader: Reader, stop: asyncio.Event) -> None:
        """Until `stop`: looks at the engine while it serves, and at the lane; woken by time or the end."""
        while not stop.is_set():
            self._show()
            knobs = self._context.knobs
            self._find_lane(knobs)
            others = bool(self._lane) and not self.in_lane
            self._overdue = others and await reader.unread_s(TAIL) > self._tail_wait_s
            here = self._link.serving is not None and not self._link.released
            if knobs.sglang_server_concurrency:
                self._auto, self._told = Slots(), 0
                if here and self._context.clock.monotonic() - self._shown_at >= TOLD_S:
                    await self._load()
            elif here and (load := await self._load()) is not None:
                await self._look(knobs, load)
            self._context.slots = self.slots
            await within(LOOK_S, stop)

    async def _load(self) -> EngineLoad | None:
        """The engine's, shown in vitals; None where it does not answer."""
        engine = self._link.engine
        if engine is None:
            return None
        self._shown_at = self._context.clock.monotonic()
        try:
            load = await engine.load()
        except (EngineUnavailable, RequestRefused):
            return None  # whoever runs a sample there notices, and says so
        for name in ("running", "waiting", "kv_used"):
            if (value := getattr(load, name)) is not None:
                self._context.counters[f"engine/{name}"] = float(value)
        return load

    async def _look(self, knobs: KnobValues, load: EngineLoad) -> None:
        now, before = self._context.clock.monotonic(), self._looked_at
        tokens, ended = self.tokens - self._looked[0], self.ended - self._looked[1]
        self._looked, self._looked_at = (self.tokens, self.ended), now
        look = EngineLook(
            busy=self._context.in_flight,
            ended=ended,
            tokens_per_s=tokens / max(1e-3, now - before),
            waiting=load.waiting,
            kv_used=load.kv_used,
            masked_step=self._masked[0],
            masked=self._masked[1],
        )
        limits = self._limits(knobs, load)
        slots = self._auto.decide(look, limits)
        if abs(slots - self._told) > TOLD * self._told:
            said = f"{self._told} -> {slots} samples at once: {self._auto.why}" if self._told else f"{slots} samples at once"
            await self._context.event(EventKind.SLOTS, said, slots=slots, why=self._auto.why, most=limits.ceiling)
            self._told = slots

    def _limits(self, knobs: KnobValues, load: EngineLoad) -> Limits:
        kept = self._lane.get(self._context.name, 0)
        given = [int(knobs.sglang_concurrency_max or 0), self._room_for, load.max_running or 0, kept]
        return Limits.of(
            int(knobs.sglang_concurrency_min),
            given,
            knobs.max_masked_fraction,
            int(knobs.max_weight_staleness),
            int(knobs.update_weights_interval),
        )
