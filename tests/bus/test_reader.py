"""A reader and its own pending entries; logs that are read together."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from bus import Bus, BusConfig, Commit, Out, Stream, Tail
from bus.messages.control import Event
from bus.server import EmbeddedRedis
from bus.topology import ACTIVE, EVENTS, PROMPTS
from tests.bus.suite.conformance import age, publish, reader_of
from tests.bus.suite.faults import restart, written


@pytest_asyncio.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        yield bus


async def test_a_restarted_reader_reads_all_of_its_own_before_anything_new(bus: Bus) -> None:
    await publish(bus, 7)
    before = await reader_of(bus, "a")
    held = [e.id for e in await before.read(5, 0)]
    await before.close()
    reader = await reader_of(bus, "a")
    pages = [[e.id for e in await reader.read(2, 0)] for _ in range(3)]
    assert pages == [held[:2], held[2:4], held[4:]] and not reader.recovered
    assert len(await reader.read(9, 0)) == 2 and reader.recovered
    await reader.close()


async def test_of_a_stream_no_more_is_read_than_is_wanted_of_it(bus: Bus) -> None:
    await publish(bus, 7)
    reader = await reader_of(bus, "a")
    assert [len(await reader.read(5, 0, wanted)) for wanted in ([(PROMPTS, 2)], [(PROMPTS, 9)])] == [2, 5]
    await reader.close()


async def test_a_log_that_is_opened_again_after_a_restart_of_the_server_is_read_from_its_beginning(
    private_redis: EmbeddedRedis, run_name: str
) -> None:
    """Whoever forgets all and begins anew must hear all: a sampler that does not hear of trained steps gives no credits."""
    async with Bus(BusConfig(url=private_redis.url, run=run_name, deadline_s=15)) as bus:
        await bus.append([Out(EVENTS, Event(actor="a", kind=f"{n}", text="", wall=0.0)) for n in range(3)])
        tail = Tail(bus, [EVENTS])
        await tail.open()
        ids = [entry.id for entry in await tail.read(1)]
        await written(bus)
        await restart(private_redis)
        await bus.length(EVENTS)
        assert bus.link.server_restarts == 1 and await tail.read(0) == [], "who goes on hears nothing twice"
        await tail.open()
        assert [entry.id for entry in await tail.read(1)] == ids and len(ids) == 3
        await restart(private_redis)
        await bus.length(EVENTS)
        await tail.open()
        assert [entry.id for entry in await tail.read(1)] == ids, "before it looked again"
        await tail.open()
        await restart(private_redis)
        await bus.length(EVENTS)
        assert [entry.id for entry in await tail.read(1)] == ids, "before it read anything"
        await tail.close()


async def test_a_second_look_at_its_own_leaves_out_what_it_holds(bus: Bus) -> None:
    """After a lost connection some entries may be ours that we never saw."""
    await publish(bus, 4)
    reader, key = await reader_of(bus, "a"), bus.keys.stream("prompts")
    held = await reader.read(2, 0)
    await bus.link.run("XREADGROUP", "GROUP", "generation", "a", "COUNT", 1, "STREAMS", key, ">")
    reader._reread = True
    [found] = await reader.read(9, 0)
    assert (found.fields["id"], found.deliveries) == ("g0000001/2", 2)
    counts = {row[0].decode(): row[3] for row in await bus.link.run("XPENDING", key, "generation", "-", "+", 9)}
    assert counts == {held[0].id: 1, held[1].id: 1, found.id: 2}, "a look is no delivery of what is held"
    await reader.close()


async def test_what_the_server_delivers_anew_is_not_given_out_while_it_is_held(bus: Bus) -> None:
    """A server that lost its last second may have forgotten that it delivered these."""
    await publish(bus, 3)
    reader = await reader_of(bus, "a")
    held = await reader.read(2, 0)
    await bus.link.run("XGROUP", "SETID", bus.keys.stream("prompts"), "generation", "0")
    found = [e.fields["id"] for _ in range(3) for e in await reader.read(9, 0)]
    assert found == ["g0000001/2"] and len(reader.held) == 3
    assert (await bus.commit(Commit(ack=held))).done
    await reader.close()


async def test_what_was_claimed_and_lost_again_is_not_given_out(bus: Bus) -> None:
    await publish(bus, 2)
    dead, heir, second = [await reader_of(bus, name) for name in "abc"]
    await dead.read(2, 0)
    claimed = await heir.claim(0)
    heir.offer(claimed)
    await age(bus, claimed[:1], "b", 3600)
    assert len(await second.claim(1800)) == 1
    assert await heir.renew() == {claimed[0].id}
    assert [e.id for e in await heir.read(9, 0)] == [claimed[1].id]
    for reader in (dead, heir, second):
        await reader.close()


async def test_an_entry_to_be_tried_again_counts_the_try(bus: Bus) -> None:
    await publish(bus, 1)
    reader = await reader_of(bus, "a")
    for delivery in (1, 2, 3):
        [entry] = await reader.read(9, 0)
        assert entry.deliveries == delivery
        reader.retry_later(entry)
    await reader.close()


async def test_logs_that_are_read_together_come_in_the_order_of_their_writing(bus: Bus) -> None:
    async def say(stream: Stream, entry_id: str) -> None:
        await bus.link.run("XADD", bus.keys.stream(stream.name), entry_id, "type", "any", "body", b"")

    await say(EVENTS, "5-0")
    everything, news = Tail(bus, [ACTIVE, EVENTS]), Tail(bus, [ACTIVE, EVENTS], "$")
    await everything.open()
    await news.open()
    for stream, entry_id in ((ACTIVE, "6-0"), (EVENTS, "9-1"), (ACTIVE, "10-0")):
        await say(stream, entry_id)
    assert [e.id for e in await everything.read(0)] == ["5-0", "6-0", "9-1", "10-0"]
    assert [e.id for e in await news.read(0)] == ["6-0", "9-1", "10-0"], "what came between the opening and the first read, too"
    await everything.close()
    await news.close()
