"""A rollout worker whose engine shares its memory with a trainer: turns told on a real bus, a real engine process."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.generation.actor import Worker
from actors.generation.engines.sglang.args import sglang_env
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from bus import Bus, Commit, Out
from bus.messages.policy import Turn
from bus.messages.waits import Wait
from bus.topology import ACTIVE, PARKED, POLICY, PROMPTS
from tests.actors.house import messages, open_bus, running, until
from tests.engine.models import Oracle
from tests.engine.workers import PROMPT, TOKENS, at_work, engines, events, half_way, order, rollouts_of, sample, told

TAGS = ("kv_cache", "cuda_graph", "weights")
Models = Callable[[str], tuple[Path, Path]]


async def tell(bus: Bus, holder: Any, number: int, **more: bool) -> None:
    """As the trainer says it."""
    turn = Turn(holder=holder, number=number, **more)
    await bus.commit(Commit(append=(Out(POLICY, turn),), state={"turn": turn.mark}))


async def released(bus: Bus, turn: int) -> bool:
    return any(event.data["turn"] == turn for event in await events(bus, "memory released"))


@asynccontextmanager
async def sharing(redis_url: str, run_name: str, model: Path, run_dir: Path, **fields: Any) -> AsyncIterator[tuple[Bus, Worker]]:
    """A worker that gives everything back, after the trainer's first turn, with version 1 of `model`."""
    spec = GenerationSpec(model_path=str(model), gives_back=TAGS, **fields)
    async with at_work(redis_url, run_name, spec, run_dir=str(run_dir)) as (bus, worker):
        await tell(bus, "trainer", 1)
        await until(lambda: released(bus, 1))
        assert not engines(run_dir), "the engine boots before the trainer has left"
        await tell(bus, "engines", 1)
        await until(lambda: told(bus, "joined", 1), deadline_s=30)
        await bus.append([Out(ACTIVE, order(1, model))])
        await until(lambda: told(bus, "activated", 1))
        yield bus, worker


async def test_samples_under_way_wait_for_the_end_of_the_trainers_turn(
    redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    first, second = models("qwen3-endless")
    async with sharing(redis_url, run_name, first, tmp_path) as (bus, worker):
        await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
        await until(lambda: half_way(worker), deadline_s=30)
        await tell(bus, "trainer", 2)
        await until(lambda: released(bus, 2))
        assert [r.n_tokens < TOKENS for r in worker._running.values()] == [True, True]
        await tell(bus, "engines", 2)
        await until(lambda: half_way(worker) if not worker._link.released else _no(), deadline_s=30)
        await tell(bus, "trainer", 3)
        await until(lambda: released(bus, 3))
        await bus.append([Out(ACTIVE, order(2, second))])  # ordered while away: loaded before anything else
        await tell(bus, "engines", 3, publishes=True)
        rollouts = await rollouts_of(bus, 2)
    for rollout in rollouts:
        response = rollout.response
        assert [span.version for span in response.spans] == [1, 2] and rollout.resumed_tokens == 0
        old = response.spans[0].n
        tokens = np.frombuffer(response.tokens, np.int32).tolist()
        expected = Oracle(first).logprobs(PROMPT, tokens[:old])
        expected += Oracle(second).logprobs(PROMPT + tokens[:old], tokens[old:])
        assert np.abs(np.frombuffer(response.logprobs, np.float32) - np.array(expected)).max() < 1e-3


async def gone(run_dir: Path) -> bool:
    """A warm engine ends a moment after the process that its worker ended."""
    return not engines(run_dir)


async def _no() -> bool:
    return False


@pytest.mark.timeout(180)
async def test_an_engine_that_does_not_give_its_memory_is_ended(
    redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    first, _ = models("qwen3")
    async with sharing(redis_url, run_name, first, tmp_path, control_deadline_s=10.0) as (bus, _):
        (process,) = engines(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        await tell(bus, "trainer", 2)
        await until(lambda: released(bus, 2), deadline_s=60)
        await until(lambda: gone(tmp_path))
        assert await told(bus, "engine stalled", 1)
        await tell(bus, "engines", 2)
        await until(lambda: told(bus, "joined", 2), deadline_s=30)


async def test_an_engine_whose_update_failed_half_way_is_ended_when_the_trainer_wants_the_memory(
    redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    """Its weights were back already, and would not be given again by one that is broken."""
    first, _ = models("qwen3")
    wrong, _ = models("llama")
    async with sharing(redis_url, run_name, first, tmp_path) as (bus, _):
        await tell(bus, "trainer", 2)
        await until(lambda: released(bus, 2))
        await bus.append([Out(ACTIVE, order(2, wrong))])
        await tell(bus, "engines", 2, publishes=True)
        await until(lambda: told(bus, "engine stalled", 1), deadline_s=30)
        await tell(bus, "trainer", 3)
        await until(lambda: released(bus, 3), deadline_s=60)
        if not await told(bus, "joined", 2):
            await until(lambda: gone(tmp_path))


async def test_an_engine_that_is_lent_a_gpu_leaves_its_samples_to_peers(
    redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    """It boots before the trainer loads, which waits for that alone; what it serves is good for the next time too."""
    first, _ = models("qwen3-endless")
    spec = GenerationSpec(model_path=str(first), gives_back=TAGS, lent_s=20.0)
    async with at_work(redis_url, run_name, spec, run_dir=str(tmp_path)) as (bus, worker):
        await tell(bus, "trainer", 1, boots=True)
        await until(lambda: released(bus, 1))
        assert len(engines(tmp_path)) == 1
        await tell(bus, "engines", 1)
        await until(lambda: told(bus, "lent", 1))
        await bus.append([Out(ACTIVE, order(1, first))])
        await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
        await until(lambda: half_way(worker), deadline_s=30)
        await tell(bus, "trainer", 2)
        await until(lambda: released(bus, 2))
        parked = await messages(bus, PARKED)
        assert [(p.reason, 0 < p.response.n_tokens < TOKENS) for p in parked] == [("drain", True)] * 2
        assert worker._context.vitals().waits_for == Wait.UNLENT and worker._leases.free() == 0
        data = (await events(bus, "memory released"))[-1].data
        assert data["ready_s"] > 0 and data["tokens"] == sum(p.response.n_tokens for p in parked)
        await bus.append([Out(PROMPTS, sample("g2", 8))])
        await tell(bus, "engines", 2)
        await rollouts_of(bus, 1)
        assert [event.data["version"] for event in await events(bus, "lent")] == [-1, 1]


async def test_a_boot_on_a_lent_gpu_ends_when_the_trainer_wants_it_back(
    redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    first, _ = models("qwen3")
    spec = GenerationSpec(model_path=str(first), gives_back=TAGS, lent_s=20.0)

    async def body(context: Context, given: GenerationSpec) -> None:
        await Worker(context, given).run()

    async def boots() -> bool:
        return bool(engines(tmp_path))

    async with open_bus(redis_url, run_name) as bus:
        await tell(bus, "trainer", 7)
        async with running(bus, "generation-0", body, spec, run_dir=str(tmp_path)):
            await until(lambda: released(bus, 7))
            assert not engines(tmp_path), "it boots beside the trainer"
            await tell(bus, "engines", 7)
            await until(boots)
            await tell(bus, "trainer", 8)
            await until(lambda: released(bus, 8))
            assert not engines(tmp_path) or await told(bus, "joined", 1)


@pytest.mark.parametrize("holder", ["trainer", "engines"])
async def test_a_worker_that_starts_late_reads_whose_turn_it_is(
    holder: str, redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    first, _ = models("qwen3")
    spec = GenerationSpec(model_path=str(first), gives_back=TAGS)

    async def body(context: Context, given: GenerationSpec) -> None:
        await Worker(context, given).run()

    async with open_bus(redis_url, run_name) as bus:
        await tell(bus, holder, 7)
        async with running(bus, "generation-0", body, spec, run_dir=str(tmp_path)):
            kind = "memory released" if holder == "trainer" else "joined"
            await until(lambda: told(bus, kind, 1), deadline_s=30)
            assert bool(engines(tmp_path)) == (holder == "engines")


def test_an_engine_of_two_gpus_beside_a_trainer_starts_where_one_has_less_memory_free() -> None:
    def env(**fields: Any) -> dict[str, str]:
        return sglang_env(GenerationSpec(engine="sglang", **fields))

    assert env(tp_size=2, gives_back=TAGS) == {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
    assert env(tp_size=2) == env(gives_back=TAGS) == {}
