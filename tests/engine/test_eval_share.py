"""Evaluation beside training: its share of the slots, and who makes its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from actors.partial.actor import PartialSpec
from actors.partial.actor import run as partial
from bus import Bus
from bus.messages.active import Activate, PolicyActive
from bus.messages.policy import WeightManifest
from bus.messages.samples import RolloutDone, SampleTask
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, EVAL_PROMPTS, EVAL_ROLLOUTS, PROMPTS, ROLLOUTS
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.scripted import ScriptedEngine, sample, workers


def order(number: int, *names: str) -> Activate:
    manifest = WeightManifest(path=f"scripted-{number}")
    return Activate(version=PolicyVersion(number, number - 1), manifest=manifest, workers=names)


def active(number: int, **serving: int) -> PolicyActive:
    return PolicyActive(version=PolicyVersion(number, number - 1), serving=serving)


def held_out(number: int, pinned: int = 1, **fields: Any) -> SampleTask:
    """A sample of the evaluation of version `pinned`."""
    return sample(f"e{pinned - 1}n{number}", pinned - 1, eval_name="held", pinned=pinned, **fields)


async def all_done(bus: Bus, prompts: int, evals: int) -> bool:
    return await bus.length(ROLLOUTS) == prompts and await bus.length(EVAL_ROLLOUTS) == evals


async def evaluated(bus: Bus) -> list[RolloutDone]:
    """Evaluation samples that ended."""
    return [m for m in await messages(bus, EVAL_ROLLOUTS) if isinstance(m, RolloutDone)]


def is_eval(rid: str) -> bool:
    return rid.startswith("e")


async def starts(redis_url: str, run_name: str, *, slots: int, share: float, n: int) -> list[tuple[str, frozenset[str]]]:
    """Requests of `n` prompts and `n` evaluation samples that all wait when the worker begins, as they began."""
    engine = ScriptedEngine()
    async with open_bus(redis_url, run_name, knobs={"sglang_server_concurrency": slots, "eval_share": share}) as bus:
        async with workers(bus, [engine]):
            await put(bus, EVAL_PROMPTS, *(held_out(i) for i in range(n)))
            await put(bus, PROMPTS, *(sample(f"g{i}", 0) for i in range(n)))
            await put(bus, ACTIVE, order(1))
            await until(lambda: all_done(bus, n, n), deadline_s=30)
    return engine.starts


@pytest.mark.parametrize(("slots", "share"), [(8, 0.25), (6, 0.34)])
async def test_evaluation_has_its_share_while_prompts_wait_and_all_slots_afterwards(
    redis_url: str, run_name: str, slots: int, share: float
) -> None:
    began = await starts(redis_url, run_name, slots=slots, share=share, n=40)
    last_prompt = max(i for i, (rid, _) in enumerate(began) if not is_eval(rid))
    beside = [sum(map(is_eval, others)) + 1 for rid, others in began[:last_prompt] if is_eval(rid)]
    assert max(beside) == int(slots * share)
    assert len(beside) >= 40 * share, "neither waits for the end of the other"
    after = [sum(map(is_eval, others)) + 1 for rid, others in began[last_prompt:] if is_eval(rid)]
    assert max(after) == slots, "and what prompts leave idle"


async def test_with_all_of_the_slots_evaluation_goes_first(redis_url: str, run_name: str) -> None:
    began = await starts(redis_url, run_name, slots=4, share=1.0, n=20)
    assert [is_eval(rid) for rid, _ in began] == [True] * 20 + [False] * 20


async def test_a_share_of_less_than_a_slot_is_a_turn_now_and_then(redis_url: str, run_name: str) -> None:
    began = [is_eval(rid) for rid, _ in await starts(redis_url, run_name, slots=1, share=0.25, n=20)]
    assert began == [False, False, False, True] * 6 + [False, False] + [True] * 14


async def test_an_evaluation_is_left_to_peers_that_still_serve_its_version(redis_url: str, run_name: str) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with open_bus(redis_url, run_name, knobs={"sglang_server_concurrency": 2}) as bus:
        # A worker that takes the prompt before it hears that it is behind leaves it to its peer through the partial room.
        async with running(bus, "partial", partial, PartialSpec()), workers(bus, engines) as (_, contexts):
            await put(bus, ACTIVE, order(1), active(1, w0=1, w1=1))
            first = 0
            while len({r.worker for r in await evaluated(bus)}) < 2:  # until both have met it
                await put(bus, EVAL_PROMPTS, *(held_out(i) for i in range(first, first + 8)))
                first += 8
                await until(lambda n=first: all_done(bus, 0, n))
            await put(bus, ACTIVE, order(2, "w0"))

            async def moved_on() -> bool:
                return contexts[0].version == 2

            await until(moved_on)
            await put(bus, ACTIVE, active(2, w0=2, w1=1))
            await put(bus, PROMPTS, sample("g", 1))

            async def trained() -> bool:
                return await bus.length(ROLLOUTS) == 1

            await until(trained)  # w0 has heard it, and reads on
            await put(bus, EVAL_PROMPTS, *(held_out(i) for i in range(first, first + 16)))
            await until(lambda: all_done(bus, 1, first + 16))
            rollouts = await evaluated(bus)
            assert {(r.worker, *r.response.spans) for r in rollouts[first:]} == {("w1", *rollouts[0].response.spans)}
            await put(bus, ACTIVE, order(2, "w1"), active(2, w0=2, w1=2))
            await put(bus, EVAL_PROMPTS, *(held_out(i) for i in range(first + 16, first + 32)))
            await until(lambda: all_done(bus, 1, first + 32))


async def test_an_evaluation_does_not_wait_for_a_peer_for_ever(redis_url: str, run_name: str) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with open_bus(redis_url, run_name, knobs={"sglang_server_concurrency": 2}) as bus:
        async with workers(bus, engines[:1], hold_s=0.5):
            await put(bus, ACTIVE, order(1), active(1, w0=1))
            await put(bus, EVAL_PROMPTS, held_out(0))
            await until(lambda: all_done(bus, 0, 1))
            await put(bus, ACTIVE, order(2), active(2, w0=2, silent=1))
            await put(bus, EVAL_PROMPTS, *(held_out(i) for i in range(1, 9)))
            await until(lambda: all_done(bus, 0, 9))
