"""The clock for tests: time passes only when it is told to."""

from __future__ import annotations

import asyncio

from tests.bus.suite.clock import ManualClock


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock, woken = ManualClock(wall=1000.0), []

    async def sleeper(name: str, *pauses: float) -> None:
        for pause in pauses:
            await clock.sleep(pause)
            woken.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sleeper("slow", 5.0))
        tasks.create_task(sleeper("twice", 2.0, 2.0))
        tasks.create_task(sleeper("never waits", 0.0))
        await asyncio.sleep(0)
        assert clock.sleeping == 2
        await clock.advance(1.9)
        assert woken == [("never waits", 0.0)]
        await clock.advance(10.0)
    assert woken[1:] == [("twice", 2.0), ("twice", 4.0), ("slow", 5.0)]
    assert (clock.monotonic(), clock.wall(), clock.sleeping) == (11.9, 1000.0 + 11.9, 0)
