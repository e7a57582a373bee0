"""A connection that the network closes underneath, and a server that stays away: under uvloop, which has its own word for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from typing import Any

import msgspec
import pytest

from actors.runtime import run as run_module
from actors.runtime.context import Context
from actors.runtime.loop import runner
from actors.runtime.run import EXIT_BUS_BACK, EXIT_BUS_GONE, EXIT_DONE, run_actor
from bus import Bus, BusConfig, Commit, Out, Tail
from bus.clock import STALL_S, TICK_S
from bus.knobs.live import publish_initial
from bus.messages.control import Event
from bus.server import EmbeddedRedis
from bus.streams import wire
from bus.streams.redis import LIFE
from bus.topology import EVENTS
from tests.actors.house import KNOBS, until
from tests.bus.suite.clock import ManualClock
from tests.bus.suite.knobs import plain_kinds
from tests.declared import actor_of


def config(server: EmbeddedRedis, deadline_s: float) -> BusConfig:
    return BusConfig(url=server.url, run="cut", deadline_s=deadline_s)


def news() -> Out:
    return Out(EVENTS, Event(actor="a", kind="note", text="", wall=0.0))


def close_underneath(line: Any) -> None:
    """As the network does after a long cut: nobody who holds the connection is told."""
    line._connection._writer.transport.abort()


def test_connections_that_were_closed_underneath_are_dialled_again(private_redis: EmbeddedRedis) -> None:
    async def body() -> tuple[int, int]:
        async with Bus(config(private_redis, 5.0)) as bus:
            tail = Tail(bus, [EVENTS], start="$")
            await tail.open()
            await bus.append([news()], repeatable=True)
            await bus.link.run_many([("PING",)], repeatable=True)
            first = await tail.read(1.0)
            for line in (bus.link._wire, bus.link._bulk, tail._wire):
                close_underneath(line)
            await bus.append([news()], repeatable=True)
            await bus.link.run_many([("PING",)], repeatable=True)
            found = len(first), len(await tail.read(1.0))
            await tail.close()
            return found

    with runner() as loop:
        assert loop.run(body()) == (1, 1)


@pytest.mark.parametrize(("deadline_s", "stands_s"), [(1.0, 1.2 + STALL_S), (3.0 + TICK_S, 3.2 + TICK_S)])
def test_time_in_which_we_stood_still_ourselves_is_not_the_servers(
    private_redis: EmbeddedRedis, deadline_s: float, stands_s: float
) -> None:
    """Both are stopped, as by a frozen container, for longer than the deadline, be it by little, and the server wakes a moment
    later."""
    pid = private_redis.pid
    assert pid is not None

    async def body() -> str:
        async with Bus(config(private_redis, deadline_s)) as bus:
            await bus.commit(Commit(state={"any": "thing"}))
            os.kill(pid, signal.SIGSTOP)
            asked = asyncio.ensure_future(bus.state("any"))
            await asyncio.sleep(0.05)
            time.sleep(stands_s)  # noqa: ASYNC251 - nothing of this process runs
            asyncio.get_running_loop().call_later(0.1, os.kill, pid, signal.SIGCONT)
            return await asked

    try:
        with runner() as loop:
            assert loop.run(body()) == "thing"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_blocking_read_that_the_server_never_ends_is_asked_anew(
    private_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose clock is set back by an hour blocks an hour longer. Actors took that for a server that hangs, and all ended."""
    monkeypatch.setattr(wire, "OVERDUE_S", 0.2)

    async def body() -> int:
        async with Bus(config(private_redis, 20.0)) as bus:
            tail = Tail(bus, [EVENTS], start="$")
            await tail.open()
            exchange, asked = tail._wire.exchange, 0

            async def first_for_ever(commands: Any) -> Any:
                nonlocal asked
                asked += 1
                words = [b"3600000" if asked == 1 and word == 100 else word for word in commands[0]]
                return await exchange([tuple(words)])

            tail._wire.exchange = first_for_ever  # type: ignore[method-assign]
            assert await tail.read(0.1) == []
            await tail.close()
            return asked

    with runner() as loop:
        assert loop.run(body()) >= 2  # on a busy machine the second one may seem overdue as well


def test_what_swallows_a_cancellation_is_cancelled_again(private_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `wait_for` of Python 3.11 may: a worker without heartbeat went on activating versions for ever."""
    monkeypatch.setattr(run_module, "END_AGAIN_S", 0.05)

    async def work(context: Context, _: None) -> None:
        await asyncio.to_thread(private_redis.kill)
        swallowed = False
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed = True

    async def body() -> int:
        async with Bus(config(private_redis, 5.0)) as bus:
            await publish_initial(bus, KNOBS, plain_kinds(KNOBS))
        async with asyncio.timeout(60):
            return await run_actor(actor_of(name="a", role="generation", bus=config(private_redis, 0.3)), None, work)

    with runner() as loop:
        assert loop.run(body()) == EXIT_BUS_GONE


def test_what_is_queued_to_a_server_that_is_gone_does_not_hold_up_the_close(private_redis: EmbeddedRedis) -> None:
    """Whose caller waits all the same hears of it."""

    async def body() -> list[object]:
        async with asyncio.timeout(60):
            async with Bus(config(private_redis, 3600.0)) as bus:
                await bus.state("any")
                private_redis.kill()
                asked = [asyncio.ensure_future(bus.state("any")) for _ in range(2)]

                async def doubted() -> bool:
                    return bus.link._doubted

                await until(doubted)
            return await asyncio.gather(*asked, return_exceptions=True)

    with runner() as loop:
        assert [type(one) for one in loop.run(body())] == [asyncio.CancelledError] * 2


def test_the_address_of_a_connection_is_told_and_a_socket_has_none(private_redis: EmbeddedRedis) -> None:
    path = private_redis.url.partition("://")[2].partition("?")[0]

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_server = (await asyncio.open_unix_connection(path))[::-1]
        await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

    async def address_at(url: str) -> str:
        async with Bus(BusConfig(url=url, run="cut")) as bus:
            return bus.link.local_address

    async def body() -> tuple[str, str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as front:
            port = front.sockets[0].getsockname()[1]
            return await address_at(f"redis://127.0.0.1:{port}/0"), await address_at(private_redis.url)

    with runner() as loop:
        assert loop.run(body()) == ("127.0.0.1", "")


def test_a_server_that_is_waited_for_is_named_once_and_so_is_its_return(
    private_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        clock = ManualClock()
        async with Bus(config(private_redis, 60.0), clock=clock) as bus:
            await bus.length(EVENTS)
            await asyncio.to_thread(private_redis.kill)
            asked = [asyncio.create_task(bus.length(EVENTS)), asyncio.create_task(bus.vitals())]
            for _ in range(30):  # half of the deadline
                await until(lambda: asyncio.sleep(0, clock.sleeping > 0))
                await clock.advance(1.0)
            await asyncio.to_thread(private_redis.start)
            async with asyncio.timeout(30):
                while not all(one.done() for one in asked):
                    await clock.advance(1.0)
                    await asyncio.sleep(0.01)
            await asyncio.gather(*asked)

    with runner() as loop:
        loop.run(body())
    waits, back = [record.getMessage() for record in caplog.records if record.name == "bus"]
    assert "has not answered for" in waits and waits.endswith("Trying for 60 s in all") and back.endswith("answers again")


def test_an_actor_whose_bus_stays_away_exits_to_be_started_again(
    private_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(context: Context, _: None) -> None:
        await asyncio.to_thread(private_redis.kill)
        while True:
            await context.bus.append([news()], repeatable=True)

    async def body() -> int:
        async with Bus(config(private_redis, 5.0)) as bus:
            await publish_initial(bus, KNOBS, plain_kinds(KNOBS))
        return await run_actor(actor_of(name="a", role="generation", bus=config(private_redis, 1.0)), None, work)

    with runner() as loop:
        assert loop.run(body()) == EXIT_BUS_GONE
    assert "did not answer for 1 s" in caplog.text


def test_an_actor_whose_work_is_done_waits_for_no_bus(private_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker that joined in the run's last moment: it heard of the end, had nothing to do, and the bus was gone."""
    monkeypatch.setattr(run_module, "LAST_S", 0.05)

    async def work(context: Context, _: None) -> None:
        await asyncio.to_thread(private_redis.kill)

        async def doubted() -> bool:
            return context.bus.link._doubted

        await until(doubted)  # heartbeat or knobs wait for it

    async def body() -> int:
        async with Bus(config(private_redis, 5.0)) as bus:
            await publish_initial(bus, KNOBS, plain_kinds(KNOBS))
        async with asyncio.timeout(30):
            return await run_actor(actor_of(name="a", role="generation", bus=config(private_redis, 3600.0)), None, work)

    with runner() as loop:
        assert loop.run(body()) == EXIT_DONE


@pytest.mark.parametrize("held", ["nothing", "another life"])
def test_no_actor_goes_on_with_a_server_that_came_back_without_the_run(
    private_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture, held: str
) -> None:
    """Neither those that were there before, nor those that start after it."""

    def lose() -> None:
        private_redis.kill()
        shutil.rmtree(private_redis.home / "appendonlydir")
        private_redis.start()

    async def work(context: Context, _: None) -> None:
        await asyncio.to_thread(lose)
        if held != "nothing":
            async with Bus(config(private_redis, 5.0)) as other:
                await other.commit(Commit(state={LIFE: "b"}))
        while True:
            await context.bus.append([news()], repeatable=True)

    async def body() -> tuple[int, int, int]:
        async with Bus(config(private_redis, 5.0)) as bus:
            await publish_initial(bus, KNOBS, plain_kinds(KNOBS))
            await bus.commit(Commit(state={LIFE: "a"}))
        own = msgspec.structs.replace(config(private_redis, 5.0), life="a")
        spec = actor_of(name="a", role="generation", bus=own)
        codes = await run_actor(spec, None, work), await run_actor(spec, None, work)
        async with Bus(config(private_redis, 5.0)) as bus:
            return *codes, await bus.length(EVENTS)

    with runner() as loop:
        assert loop.run(body()) == (EXIT_BUS_BACK, EXIT_BUS_BACK, 0), "and none says anything there"
    assert "this run, which is to be restored" in caplog.text
