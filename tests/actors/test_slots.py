"""Slots under `auto`: found, kept, and found anew after a change; on a simulated engine and a simulated trainer."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generation.slots import KV_FULL, EngineLook, Limits, Slots

ALPHA_S, BETA_S = 0.003, 1.5e-5  # seconds per token of one request: alone, and more with each one beside it


@dataclass
class Engine:
    """Requests that share `room` tokens of keys and values and slow each other down; a look a second. The trainer takes a step
    every `step_s`; of a batch the share `masked_of(slots)` is masked, with the slots of `bound + 1` steps before."""

    rng: random.Random
    room: float
    mean_tokens: float
    demand: int = 1 << 30
    bound: int = 2
    step_s: int = 5
    masked_per_slot: float = 0.0
    noise: float = 0.0
    queue: list[float] = field(default_factory=list)
    running: list[list[float]] = field(default_factory=list)  # tokens made, tokens to make
    looks: int = 0
    steps: int = 0
    history: list[int] = field(default_factory=list)  # slots at each step

    def look(self, slots: int) -> EngineLook:
        self.looks += 1
        while len(self.queue) + len(self.running) < min(slots, self.demand):
            self.queue.append(1 + self.rng.expovariate(1 / self.mean_tokens))
        held = sum(made for made, _ in self.running)
        while self.queue and held < self.room * 0.98:
            self.running.append([0.0, self.queue.pop()])
        tokens = 1 / (ALPHA_S + BETA_S * len(self.running)) if self.running else 0.0
        for request in self.running:
            request[0] += tokens
        busy = len(self.running) + len(self.queue)
        rate = tokens * len(self.running)
        alive = [r for r in self.running if r[0] < r[1]]
        ended = len(self.running) - len(alive)
        self.running = alive
        held = sum(made for made, _ in self.running)
        while held > self.room and self.running:  # retracted, youngest first: waits again
            made, to_make = self.running.pop()
            self.queue.append(to_make)
            held -= made
        if self.looks % self.step_s == 0:
            self.steps += 1
            self.history.append(slots)
        return EngineLook(
            busy=busy,
            ended=ended,
            waiting=len(self.queue),
            kv_used=held / self.room,
            tokens_per_s=rate,
            masked_step=self.steps,
            masked=self.masked(),
        )

    def masked(self) -> float:
        then = self.history[max(0, len(self.history) - self.bound - 1)] if self.history else 0
        noise = random.Random(self.steps).uniform(-1, 1) * self.noise
        return max(0.0, min(1.0, self.masked_per_slot * min(then, self.demand) * (1 + noise)))


def drive(slots: Slots, engine: Engine, limits: Limits, looks: int) -> list[int]:
    now = slots.slots
    seen = []
    for _ in range(looks):
        now = slots.decide(engine.look(now), limits)
        assert limits.floor <= now <= limits.ceiling
        seen.append(now)
    return seen


def falls(seen: list[int]) -> int:
    return sum(b < a for a, b in itertools.pairwise(seen))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), fits=st.integers(60, 400), mean=st.sampled_from([200, 660, 2000]))
def test_under_a_constant_load_slots_settle_where_keys_and_values_are_well_used(seed: int, fits: int, mean: int) -> None:
    engine = Engine(random.Random(seed), room=fits * mean, mean_tokens=mean)
    slots, limits = Slots(), Limits(floor=8, ceiling=512)
    drive(slots, engine, limits, 600)
    seen = drive(slots, engine, limits, 400)
    assert max(seen) <= 1.8 * min(seen), f"{min(seen)} to {max(seen)}"
    assert falls(seen) <= 10, f"{falls(seen)} falls in 400 looks"
    used = [engine.look(seen[-1]).kv_used or 0.0 for _ in range(100)]
    assert 0.45 < sum(used) / len(used) < KV_FULL + 0.02, sum(used) / len(used)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    allowed=st.sampled_from([0.005, 0.015, 0.05]),
    best=st.integers(40, 400),
    bound=st.integers(1, 4),
    noise=st.sampled_from([0.0, 0.3]),
)
def test_slots_settle_below_the_masked_share_that_is_allowed(
    seed: int, allowed: float, best: int, bound: int, noise: float
) -> None:
    engine = Engine(random.Random(seed), room=1e9, mean_tokens=300, bound=bound, masked_per_slot=allowed / best, noise=noise)
    slots, limits = Slots(), Limits(floor=8, ceiling=512, max_masked=allowed, bound=bound)
    drive(slots, engine, limits, 1200)
    seen = drive(slots, engine, limits, 400)
    assert max(seen) <= 1.4 * min(seen), f"{min(seen)} to {max(seen)}"
    assert sum(seen) / len(seen) <= best, "the share is kept"
    assert sum(seen) / len(seen) >= 0.45 * best, "and used"


@pytest.mark.parametrize(("bound", "first"), [(0, 32), (1, 16), (2, 24), (3, 32), (4, 40), (8, 48)])
def test_where_a_masked_share_is_allowed_slots_begin_low_at_small_bounds(bound: int, first: int) -> None:
    nothing_seen = EngineLook(busy=0, ended=0)
    assert Slots().decide(nothing_seen, Limits(floor=8, ceiling=64, max_masked=0.01, bound=bound)) == first
    assert Slots().decide(nothing_seen, Limits(floor=8, ceiling=64, bound=bound)) == 32


@pytest.mark.parametrize(("masked", "risen"), [(0.0, 144 + 36), (0.0005, 144 + 18), (0.002, 144 + 9)])
def test_slots_rise_by_less_the_more_is_masked(masked: float, risen: int) -> None:
    slots, limits = Slots(144), Limits(floor=8, ceiling=384, max_masked=0.01, bound=2)
    for step in range(100):
        if slots.decide(EngineLook(busy=144, ended=10, masked_step=step, masked=masked), limits) != 144:
            break
    assert (slots.slots, slots.why) == (risen, "room")


def test_room_that_is_halved_is_found_within_a_minute_and_given_back_within_ten() -> None:
    engine = Engine(random.Random(5), room=300 * 660, mean_tokens=660)
    slots, limits = Slots(), Limits(floor=8, ceiling=512)
    before = drive(slots, engine, limits, 600)[-1]
    engine.room /= 2
    halved = drive(slots, engine, limits, 60)[-1]
    assert halved <= 0.8 * before
    engine.room *= 2
    assert drive(slots, engine, limits, 600)[-1] >= 0.8 * before


def test_slots_that_nobody_uses_do_not_rise() -> None:
    engine = Engine(random.Random(1), room=1e9, mean_tokens=300, demand=100)
    slots, limits = Slots(), Limits(floor=8, ceiling=512)
    assert set(drive(slots, engine, limits, 300)) == {256}


def test_an_engine_that_tells_nothing_of_itself_gets_all_slots_in_the_end() -> None:
    slots, limits = Slots(), Limits(floor=8, ceiling=64)
    seen = [slots.decide(EngineLook(busy=slots.slots, ended=slots.slots // 4), limits) for _ in range(100)]
    assert seen == sorted(seen) and seen[0] == 32 and seen[-1] == 64


def test_a_queue_that_stands_lowers_slots_and_a_wave_that_passes_does_not() -> None:
    slots, limits = Slots(), Limits(floor=8, ceiling=64)
    slots.decide(EngineLook(busy=0, ended=0), limits)
    for waiting in (20, 20, 0, 20, 20, 0):
        assert slots.decide(EngineLook(busy=32, ended=0, waiting=waiting), limits) == 32
    for _ in range(3):
        slots.decide(EngineLook(busy=32, ended=0, waiting=20), limits)
    assert (slots.slots, slots.why) == (28, "queue")


def test_a_request_much_slower_than_alone_stops_the_rise() -> None:
    limits = Limits(floor=8, ceiling=1 << 20)
    slots = Slots()
    slots.decide(EngineLook(busy=0, ended=0), limits._replace(ceiling=64))
    for _ in range(4000):
        running = slots.slots
        rate = running / (ALPHA_S + BETA_S * running)
        slots.decide(EngineLook(busy=running, ended=running, tokens_per_s=rate), limits)
    fastest = ALPHA_S + BETA_S * 32
    best = (4 * fastest - ALPHA_S) / BETA_S
    assert slots.slots == pytest.approx(best, rel=0.15)


@given(
    before=st.tuples(st.integers(1, 64), st.integers(64, 600)),
    after=st.tuples(st.integers(1, 64), st.integers(64, 600)),
    looks=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300), st.floats(0, 2), st.floats(0, 1)), max_size=60),
)
def test_slots_stay_between_floor_and_ceiling_also_when_these_move(
    before: tuple[int, int], after: tuple[int, int], looks: list[tuple[int, int, float, float]]
) -> None:
    slots = Slots()
    for (floor, ceiling), part in ((before, looks[::2]), (after, looks[1::2])):
        limits = Limits(floor, ceiling, max_masked=0.1)
        for n, (busy, ended, kv, masked) in enumerate(part):
            look = EngineLook(busy, ended, 100.0, ended, kv, n, masked)
            now = slots.decide(look, limits)
            assert floor <= now <= ceiling and math.isfinite(now)
