"""Who is waited for in the trainer's turn while a run stops: told by when words come here, not by the workers' clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.runtime.context import Context
from actors.trainer import turns
from actors.trainer.backends import NullBackend
from actors.trainer.spec import TurnSpec
from actors.trainer.turns import Turns
from bus import Bus
from bus.messages.control import Event, Vitals
from bus.topology import EVENTS
from tests.actors.house import open_bus, put, running


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
        await Turns(context, spec, NullBackend(), in_thread).take()
        taken.set()

    async with running(bus, "trainer", body, TurnSpec(workers=("w",), deadline_s=30.0)):
        yield taken


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
