"""Who is waited for in the trainer's turn while a run stops: told by when words come here, not by the workers' clocks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest

from actors.runtime.context import Context
from actors.runtime.host import processes_name
from actors.trainer import turns
from actors.trainer.backends import NoTraining
from actors.trainer.lender import LOOK_S, Lender
from actors.trainer.spec import TurnSpec
from actors.trainer.turns import GpuTurns
from bus import Bus
from bus.messages.control import Event, Vitals
from bus.messages.policy import Turn
from bus.topology import EVENTS, POLICY, PROMPTS
from tests.actors.house import messages, open_bus, put, running, task, until
from tests.actors.test_trainer_parts import trainer_of


def beat(skew_s: float) -> Vitals:
    wall = time.time() + skew_s
    return Vitals(actor="w", role="generation", pid=1, host="elsewhere", state="running", wall=wall, version=1)


@asynccontextmanager
async def taking(bus: Bus) -> AsyncIterator[asyncio.Event]:
    """A trainer that is stopping and shares its GPU with one worker takes its turn; set once it has it."""
    taken = asyncio.Event()

    async def in_thread(call: Any, *args: Any) -> Any:
        return call(*args)

    async def body(context: Context, spec: TurnSpec) -> None:
        context.draining.set()
        await GpuTurns(context, spec, NoTraining(), in_thread).take()
        taken.set()

    async with running(bus, "trainer", body, TurnSpec(workers=("w",), deadline_s=30.0)):
        yield taken


async def test_gpus_are_lent_for_a_long_wait_with_work_and_come_back_before_the_batch(redis_url: str, run_name: str) -> None:
    """A worker that died with its engine holds nothing, and is not waited for."""
    spec = TurnSpec(workers=("w", "dead"), lends=True, after_s=1.0)
    ended = psutil.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = msgspec.structs.replace(beat(0.0), actor="dead", pid=ended.pid, processes=processes_name())
    async with open_bus(redis_url, run_name) as bus, trainer_of(bus) as trainer:
        context, intake = trainer.context, trainer.intake

        async def in_thread(call: Any, *args: Any) -> Any:
            return call(*args)

        turns = GpuTurns(context, spec, NoTraining(), in_thread)
        lender = Lender(context, spec, turns, intake)

        async def look(seconds: float) -> bool:
            """At a batch of four samples, which come so fast that it takes so many seconds."""
            await asyncio.sleep(LOOK_S)
            last = await bus.server_time()
            for at in (last - seconds / 4, last):
                intake.arrivals.add(at, 1, window=2)
            return await lender.look(publishes=True)

        async def answer(number: int) -> None:
            await until(lambda: turn_said(bus, number))
            data = {"turn": number, "ready_s": 0.1, "tokens": 5}
            await put(bus, EVENTS, Event(actor="w", kind="memory released", text="", wall=0.0, data=data))

        await bus.set_vitals("dead", gone)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer(1))
            tasks.create_task(answer(2))
            await put(bus, EVENTS, beat(0.0))
            await bus.set_vitals("w", beat(0.0))
            await turns.take()
            lender.begin()
            assert not await look(60.0), "no sample waits for an engine"
            await put(bus, PROMPTS, task(9, 0))
            assert not await look(0.5)
            assert await look(60.0) and not turns.held
            assert not await look(30.0) and not turns.held
            assert not await look(0.5) and turns.held
        metrics = lender.metrics()
        assert metrics["perf/lent_s"] > 0 and metrics["perf/lent_tokens"] == 5 and metrics["perf/gpu_wait_s"] == 0
        assert context.counters["lend/times"] == 1


async def turn_said(bus: Bus, number: int) -> bool:
    return any(m.holder == "trainer" and m.number == number for m in await messages(bus, POLICY) if isinstance(m, Turn))


@pytest.mark.parametrize("skew_s", [-3600.0, 30.0])
async def test_a_worker_that_speaks_is_waited_for_whatever_its_clock_says(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    monkeypatch.setattr(turns, "SILENT_S", 1.0)
    async with open_bus(redis_url, run_name) as bus:
        await bus.set_vitals("w", beat(skew_s))
        async with taking(bus) as taken:
            for _ in range(30):  # three times as long as a silent one is waited for
                await put(bus, EVENTS, beat(skew_s))
                await asyncio.sleep(0.1)
            assert not taken.is_set()
            await put(bus, EVENTS, Event(actor="w", kind="memory released", text="", wall=0.0, data={"turn": 1}))
            await asyncio.wait_for(taken.wait(), 10.0)


async def test_a_silent_worker_is_not_waited_for_though_its_clock_is_ahead(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SILENT_S", 1.0)
    async with open_bus(redis_url, run_name) as bus:
        await bus.set_vitals("w", beat(3600.0))
        async with taking(bus) as taken:
            await asyncio.wait_for(taken.wait(), 10.0)
