"""The tail's lane: which workers it is, that long samples go on there once and nowhere else, and what happens when it is full."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.generation.lane import lane_of
from actors.partial.actor import PartialSpec
from actors.partial.actor import run as run_partial
from actors.runtime.context import Context
from bus import Bus, Out
from bus.messages.active import Activate, PolicyActive
from bus.messages.policy import WeightManifest
from bus.messages.samples import RolloutDone
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, PROMPTS, ROLLOUTS, TAIL
from tests.actors.house import messages, open_bus, running, until
from tests.engine.scripted import ScriptedEngine, sample, workers

VERSION = PolicyVersion(id=1, step=1)
LANE = {"rollout_max_response_len": 64, "tail_slots": 2, "tail_after_tokens": 6}


@given(
    names=st.sets(st.sampled_from([f"w{i}" for i in range(9)])),
    tail=st.integers(0, 100),
    each=st.integers(0, 40),
)
def test_the_lane_is_as_few_workers_as_possible_and_never_all(names: set[str], tail: int, each: int) -> None:
    lane = lane_of(names, tail_slots=tail, each=each)
    assert list(lane) == sorted(names)[: len(lane)], "in the order of their names"
    assert not lane or len(lane) < len(names), "one is left for the rest"
    assert sum(lane.values()) <= tail and all(0 < n <= (each or n) for n in lane.values())
    if each:
        assert len(lane) == max(0, min(-(-tail // each), len(names) - 1))
        assert sum(lane.values()) == min(tail, each * max(0, len(names) - 1))
    elif len(names) > 1 and tail:
        assert lane == {min(names): tail}


@asynccontextmanager
async def at_work(
    redis_url: str, run_name: str, engines: Sequence[ScriptedEngine], serving: Sequence[str] = (), **spec: Any
) -> AsyncIterator[tuple[Bus, list[Context]]]:
    """Workers that serve version 1, with a lane, and the partial room."""
    async with (
        open_bus(redis_url, run_name, knobs=LANE) as bus,
        running(bus, "partial", run_partial, PartialSpec()),
        workers(bus, engines, **spec) as (_, contexts),
    ):
        await bus.append([Out(ACTIVE, Activate(version=VERSION, manifest=WeightManifest()))])

        async def all_serve() -> bool:
            return all(c.version == 1 for c in contexts)

        await until(all_serve)
        names = serving or [c.name for c in contexts]
        await bus.append([Out(ACTIVE, PolicyActive(version=VERSION, serving=dict.fromkeys(names, 1)))])

        async def slots_are_kept() -> bool:
            return contexts[0].vitals().slots == 2

        await until(slots_are_kept)
        yield bus, contexts


async def done(bus: Bus, n: int) -> list[RolloutDone]:
    async def there() -> bool:
        return await bus.length(ROLLOUTS) == n

    await until(there, deadline_s=40)
    return [m for m in await messages(bus, ROLLOUTS) if isinstance(m, RolloutDone)]


async def test_long_samples_go_on_in_the_lane_once_and_short_ones_stay(redis_url: str, run_name: str) -> None:
    engines = [ScriptedEngine(), ScriptedEngine(), ScriptedEngine()]
    async with at_work(redis_url, run_name, engines) as (bus, contexts):
        lengths = [3, 6, 7, 30] * 8
        await bus.append([Out(PROMPTS, sample(f"g{i}", 1, tokens=n)) for i, n in enumerate(lengths)])
        rollouts = await done(bus, len(lengths))
        assert await bus.length(TAIL) == 0
    assert max(len(beside) for _, beside in engines[0].starts) == 1, "the lane runs no more than its slots"
    assert sorted(r.response.n_tokens for r in rollouts) == sorted(lengths)
    moved = [r for r in rollouts if r.resumed_tokens]
    assert moved, "some went there"
    for rollout in rollouts:
        if rollout.worker != "w0":
            assert rollout.response.n_tokens <= 6 and not rollout.resumed_tokens, "what is longer ends in the lane"
    assert {(r.worker, r.resumed_tokens) for r in moved} == {("w0", 6)}, "parked at the length that was set, and once"
    parked = sum(c.counters.get("parked/tail", 0) for c in contexts)
    assert parked == len(moved) == contexts[0].counters["tail/in_lane"]


async def test_what_waits_too_long_for_the_lane_is_taken_by_others_and_counted(redis_url: str, run_name: str) -> None:
    engines = [ScriptedEngine(pace_s=0.5), ScriptedEngine()]  # the lane hardly moves
    async with at_work(redis_url, run_name, engines, tail_wait_s=0.5) as (bus, contexts):
        await bus.append([Out(PROMPTS, sample(f"g{i}", 1, tokens=20)) for i in range(8)])

        async def taken() -> float:
            return contexts[1].counters.get("tail/elsewhere", 0)

        assert await until(taken, deadline_s=40) >= 1
        ended = [r for r in await done(bus, 6) if r.worker == "w1"]
        assert {r.resumed_tokens for r in ended} == {6}, "they went on where they were, and not to the lane again"


async def test_without_a_second_worker_there_is_no_lane(redis_url: str, run_name: str) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with at_work(redis_url, run_name, engines) as (bus, contexts):
        await bus.append([Out(ACTIVE, PolicyActive(version=VERSION, serving={"w1": 1}))])

        async def all_slots() -> bool:
            return [c.vitals().slots for c in contexts] == [8, 8]

        await until(all_slots)
        await bus.append([Out(PROMPTS, sample(f"g{i}", 1, tokens=20)) for i in range(4)])
        assert {r.resumed_tokens for r in await done(bus, 4)} == {0}
