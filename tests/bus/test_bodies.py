"""Bodies in Redis, for runs over several hosts: few round trips, and nobody's body depends on another caller."""

from __future__ import annotations

import asyncio

import pytest

from bus import Bus, BusConfig
from bus.blobs.redis import PIECE_BYTES


def bodies(n: int) -> list[bytes]:
    return [bytes([i]) * (PIECE_BYTES + 1 if i == 0 else 1000 + i) for i in range(n)]


async def test_bodies_that_come_together_are_written_together(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        writes: list[int] = []
        exchange = bus.link._bulk.exchange

        async def counted(commands: list[tuple[object, ...]]) -> list[object]:
            writes.append(len(commands))
            return await exchange(commands)

        monkeypatch.setattr(bus.link._bulk, "exchange", counted)
        refs = await asyncio.gather(*map(bus.blobs.put, bodies(20)))
        assert await asyncio.gather(*map(bus.blobs.get, refs)) == bodies(20)
        assert sum(writes) == 21 and len(writes) <= 2, "the first alone, in two pieces, the others in one write"


async def test_a_caller_that_gives_up_takes_nobody_elses_body_along(redis_url: str, run_name: str) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        tasks = [asyncio.create_task(bus.blobs.put(body)) for body in bodies(20)]
        await asyncio.sleep(0)  # the first one writes for those that wait
        tasks[0].cancel()
        refs = await asyncio.gather(*tasks[1:])
        assert await asyncio.gather(*map(bus.blobs.get, refs)) == bodies(20)[1:]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
