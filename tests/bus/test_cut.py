"""A connection that the network closes underneath, and a server that stays away: under uvloop, which has its own word for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.runtime.context import ActorSpec, Context
from actors.runtime.loop import runner
from actors.runtime.run import EXIT_BUS_GONE, run_actor
from bus import Bus, BusConfig, Out, Tail
from bus.knobs.live import publish_initial
from bus.messages.control import Event
from bus.server import EmbeddedRedis
from bus.topology import EVENTS
from tests.actors.house import KNOBS


def config(server: EmbeddedRedis, deadline_s: float) -> BusConfig:
    return BusConfig(url=server.url, run="cut", deadline_s=deadline_s)


def news() -> Out:
    return Out(EVENTS, Event(actor="a", kind="note", text="", wall=0.0))


def close_underneath(wire: Any) -> None:
    """As the network does after a long cut: nobody who holds the connection is told."""
    wire._connection._writer.transport.abort()


def test_connections_that_were_closed_underneath_are_dialled_again(private_redis: EmbeddedRedis) -> None:
    async def body() -> tuple[int, int]:
        async with Bus(config(private_redis, 5.0)) as bus:
            tail = Tail(bus, [EVENTS], start="$")
            await tail.open()
            await bus.append([news()], repeatable=True)
            await bus.link.run_many([("PING",)], repeatable=True)
            first = await tail.read(1.0)
            for wire in (bus.link._wire, bus.link._bulk, tail._wire):
                close_underneath(wire)
            await bus.append([news()], repeatable=True)
            await bus.link.run_many([("PING",)], repeatable=True)
            found = len(first), len(await tail.read(1.0))
            await tail.close()
            return found

    with runner() as loop:
        assert loop.run(body()) == (1, 1)


def test_an_actor_whose_bus_stays_away_exits_to_be_started_again(
    private_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(context: Context, _: None) -> None:
        await asyncio.to_thread(private_redis.kill)
        while True:
            await context.bus.append([news()], repeatable=True)

    async def body() -> int:
        async with Bus(config(private_redis, 5.0)) as bus:
            await publish_initial(bus, KNOBS)
        return await run_actor(ActorSpec(name="a", role="generation", bus=config(private_redis, 1.0)), None, work)

    with runner() as loop:
        assert loop.run(body()) == EXIT_BUS_GONE
    assert "did not answer for 1 s" in caplog.text
