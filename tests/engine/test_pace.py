"""Slots of a worker on a real engine: what the engine tells, what `auto` makes of it, who hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.generation import pace
from actors.generation.actor import Worker
from actors.generation.engine import EngineUnavailable, GenerateRequest
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.wire import load_of
from actors.generation.spec import GenerationSpec
from bus import Bus, Out
from bus.knobs.live import propose
from bus.messages.active import PolicyActive
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, PROMPTS
from tests.actors.house import until
from tests.engine.conftest import Http, Target, engine_process, serving
from tests.engine.processes import until_async
from tests.engine.workers import at_work, events, order, rollouts_of, sample, told


@asynccontextmanager
async def worker_on(
    model: Path, redis_url: str, run_name: str, *words: str, **knobs: Any
) -> AsyncIterator[tuple[Bus, Worker, psutil.Process]]:
    """Bus, worker and process of an engine that serves its first version."""
    with engine_process(model, "--stream-interval", "8", *words) as (url, _):
        spec = GenerationSpec(engine="external", engine_url=url, model_path=str(model))
        async with at_work(redis_url, run_name, spec, knobs=knobs) as (bus, worker):
            await until(lambda: told(bus, "joined", 1))
            await bus.append([Out(ACTIVE, order(1, model))])
            yield bus, worker, serving(url)


async def test_an_engine_tells_how_full_it_is(http: Http, client: SGLangClient, target: Target) -> None:
    idle = await client.load()
    assert (idle.running, idle.waiting) == (0, 0) and idle.max_running
    streams = [
        client.generate(GenerateRequest(rid=f"s{i}", input_ids=[2, 3], max_new_tokens=1500, ignore_eos=True)) for i in range(2)
    ]
    for stream in streams:
        await anext(stream)

    async def seen() -> bool:
        load = await client.load()
        return load.running == 2 and 0 < (load.kv_used or 0) <= 1

    await until_async(seen, "two run and hold keys and values")
    for stream in streams:
        await stream.aclose()


def test_ranks_of_an_engine_are_one_load() -> None:
    rank = '{"num_running_reqs":%d,"num_waiting_reqs":1,"token_usage":%f,"max_running_requests":64,"x":1}'
    load = load_of('{"version":"0.5.12","loads":[' + rank % (3, 0.25) + "," + rank % (4, 0.75) + "]}")
    assert (load.running, load.waiting, load.kv_used, load.max_running) == (7, 2, 0.75, 128)
    for nothing in ("{}", '{"loads":[]}', "not found", '{"loads":[{"num_running_reqs":"many"}]}'):
        assert load_of(nothing).running is None


async def test_auto_begins_with_half_of_what_the_engine_runs_and_a_number_ends_it(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]]
) -> None:
    first, _ = models("qwen3-endless")
    six = ("--max-running-requests", "6")
    async with worker_on(first, redis_url, run_name, *six, sglang_server_concurrency=0) as (bus, worker, _):
        await bus.append([Out(PROMPTS, sample(f"g{i}")) for i in range(60)])
        context = worker._context

        async def at_once(n: int) -> bool:
            return context.in_flight == n == context.vitals().slots

        await until(lambda: at_once(3))
        [event] = await events(bus, "slots")
        assert event.data["slots"] == 3 and event.text == "3 samples at once"
        await propose(bus, {"sglang_server_concurrency": 5}, author="test")
        await until(lambda: at_once(5))
        await propose(bus, {"sglang_server_concurrency": 0, "sglang_concurrency_max": 4}, author="test")

        async def auto_again() -> bool:
            return context.vitals().slots == 2

        await until(auto_again)


async def test_a_masked_share_above_the_one_allowed_lowers_the_slots(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]]
) -> None:
    first, _ = models("qwen3-endless")
    knobs = {"sglang_server_concurrency": 0, "sglang_concurrency_max": 16, "max_masked_fraction": 0.01, "max_weight_staleness": 2}
    async with worker_on(first, redis_url, run_name, **knobs) as (bus, worker, _):
        await bus.append([Out(PROMPTS, sample(f"g{i}")) for i in range(200)])

        async def has(slots: int) -> bool:
            return worker._context.slots == slots

        await until(lambda: has(6))  # three eighths at bound 2
        step = 0

        async def lowered() -> bool:
            nonlocal step
            step += 1
            said = PolicyActive(version=PolicyVersion(1, 1), masked_fraction=0.05, masked_step=step)
            await bus.append([Out(ACTIVE, said)])
            return await has(4)

        await until(lowered, deadline_s=40)
        assert (await events(bus, "slots"))[-1].data == {"slots": 4, "why": "masked share", "most": 16}


async def test_a_sample_tells_how_many_ran_beside_it_on_average_over_its_tokens(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]]
) -> None:
    first, _ = models("qwen3-endless")
    async with worker_on(first, redis_url, run_name, sglang_server_concurrency=2) as (bus, _, _):
        await bus.append([Out(PROMPTS, sample("long")), Out(PROMPTS, sample("short", tokens=150))])
        both = {done.task.group_id: done.running for done in await rollouts_of(bus, 2)}
        await bus.append([Out(PROMPTS, sample("alone", tokens=150))])
        alone = (await rollouts_of(bus, 3))[-1].running
    assert 1.0 < both["long"] < both["short"] <= 2.0
    assert alone == 1.0


async def test_the_worker_shows_the_pace_of_its_engine_and_for_how_long_it_has_been_silent(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LOOK_S", 0.1)
    monkeypatch.setattr(pace, "RATE_S", 0.3)
    first, _ = models("qwen3-endless")
    async with worker_on(first, redis_url, run_name, sglang_server_concurrency=4) as (bus, worker, engine):
        await bus.append([Out(PROMPTS, sample(f"g{i}")) for i in range(40)])
        shown = worker._context.counters

        async def works() -> bool:
            busy = shown.get("engine/asked", 0) == 4 and shown.get("engine/tokens_per_s", 0) > 0
            return busy and shown["engine/silent_s"] < 0.5

        await until(works)
        engine.suspend()

        async def silent() -> bool:
            return shown["engine/silent_s"] > 1.0

        await until(silent)
        engine.resume()
        await until(works)


async def test_an_engine_that_is_gone_tells_nothing() -> None:
    client = SGLangClient("http://127.0.0.1:9", request_deadline_s=5, token_deadline_s=5, control_deadline_s=5)
    try:
        await client.load()
    except EngineUnavailable as error:
        assert "/v1/loads" in str(error)
    else:
        raise AssertionError("an engine that is not there has no load")
    finally:
        await client.close()
