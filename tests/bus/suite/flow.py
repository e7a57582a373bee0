"""The suite, second part: saved prefixes, bounds, logs, and runs that share a server."""

from __future__ import annotations

import asyncio

from bus.messages.control import Event
from bus.streams.entry import Commit, Out
from bus.streams.reader import Tail
from bus.topology import EVENTS, PROMPTS
from tests.bus.suite.conformance import DEADLINE_S, Check, MakeBus, age, eventually, publish, reader_of
from tests.bus.suite.messages import a_task


async def check_a_prefix_is_saved_only_under_a_lease(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 1)
        worker, peer = await reader_of(bus, "a"), await reader_of(bus, "b")
        [entry] = await worker.read(1, 0)
        sample = entry.fields["id"]
        await age(bus, [entry], "a", 3600)
        assert await bus.save_prefix(entry, "a", sample, b"one")
        assert await peer.claim(1800) == [], "saving renews the lease"
        assert await bus.save_prefix(entry, "a", sample, b"two")
        [taken] = await peer.claim(0)
        assert not await bus.save_prefix(entry, "a", sample, b"late")
        assert await bus.load_prefix(sample) == [b"one", b"two"]
        assert await bus.save_prefix(taken, "b", sample, b"three")
        assert (await bus.commit(Commit(ack=(taken,), delete_prefixes=(sample,)))).done
        assert await bus.load_prefix(sample) == []
        assert not await bus.save_prefix(taken, "b", sample, b"after the end")
        await worker.close()
        await peer.close()


async def check_a_full_stream_blocks_and_releases(make_bus: MakeBus) -> None:
    async with make_bus(stream_max_bytes=2000) as bus:
        reader = await reader_of(bus, "a")
        fill = Commit(append=(Out(PROMPTS, a_task(prompt_tokens=400)),), bounded=True)
        assert (await bus.commit(fill)).done, "one message larger than the bound may always pass"
        waiting = asyncio.create_task(bus.commit(Commit(append=(Out(PROMPTS, a_task(1)),), bounded=True)))
        appending = asyncio.create_task(bus.append([Out(PROMPTS, a_task(2, prompt_tokens=400))]))
        await eventually(lambda: bus.waiting_for_room.endswith("prompts"), "the producer says what it waits for")
        assert await bus.length(PROMPTS) == 1
        assert (await bus.commit(Commit(append=(Out(PROMPTS, a_task(3)),)))).done, "unbounded ones are not held up"
        for _ in range(4):
            for entry in await reader.read(5, 0):
                assert (await bus.commit(Commit(ack=(entry,)))).done
            if waiting.done() and appending.done():
                break
            await asyncio.wait([waiting, appending], timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(DEADLINE_S):
            assert (await waiting).done
            await appending
        for entry in await reader.read(5, 0):
            await bus.commit(Commit(ack=(entry,)))
        assert bus.waiting_for_room == "" and await bus.length(PROMPTS) == 0
        assert int((await bus.hash_of(bus.keys.in_flight_bytes))[bus.keys.stream("prompts")]) == 0
        await reader.close()


async def check_logs_are_read_from_a_position_by_everyone(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        news = [Event(actor="a", kind=f"k{n}", text="", wall=0.0) for n in range(5)]
        await bus.append([Out(EVENTS, event) for event in news[:3]])
        all_of_it, from_now = Tail(bus, [EVENTS]), Tail(bus, [EVENTS], "$")
        await all_of_it.open()
        await from_now.open()
        await bus.append([Out(EVENTS, event) for event in news[3:]])
        assert [await bus.message(e) for e in await all_of_it.read(0)] == news
        assert [await bus.message(e) for e in await from_now.read(0)] == news[3:]
        assert await all_of_it.read(0) == []
        await all_of_it.close()
        await from_now.close()


async def check_a_log_that_lost_its_end_is_read_on_from_what_is_left(make_bus: MakeBus) -> None:
    """A promoted replica lacks the last entries, and its clock is behind: it goes on numbering from the last that it has."""
    async with make_bus() as bus:
        key = bus.keys.stream(EVENTS.name)
        await bus.append([Out(EVENTS, Event(actor="a", kind=f"k{n}", text="", wall=0.0)) for n in range(3)])
        await asyncio.sleep(0.01)  # ids are milliseconds
        await bus.append([Out(EVENTS, Event(actor="a", kind=f"k{n}", text="", wall=0.0)) for n in (3, 4)])
        tail, late = Tail(bus, [EVENTS]), Tail(bus, [EVENTS], "$")
        await tail.open()
        await late.open()
        assert len(await tail.read(0)) == 5
        rows = await bus.link.run("XRANGE", key, "-", "+")
        await bus.link.run("DEL", key)
        for entry_id, fields in rows[:3]:
            await bus.link.run("XADD", key, entry_id, *fields)
        third, sequence = rows[2][0].decode().split("-")
        await bus.link.run("XADD", key, f"{third}-{int(sequence) + 1}", *rows[4][1])
        bus.link.server_restarts += 1
        assert [e.fields["note"] for e in await tail.read(0)] == ["k4"], "what it has is not read again, what is new is"
        assert [e.fields["note"] for e in await late.read(0)] == ["k4"]
        assert await tail.read(0) == await late.read(0) == []
        await tail.close()
        await late.close()


async def check_two_runs_on_one_server_never_meet(make_bus: MakeBus) -> None:
    async with make_bus() as bus, make_bus(run="another-run") as other:
        await publish(bus, 2)
        stranger = await reader_of(other, "a")
        await bus.commit(Commit(ledger={"issued": 2}, state={"field": "mine"}))
        assert await stranger.read(5, 0) == [] and await stranger.claim(0) == []
        assert await other.length(PROMPTS) == 0 and await other.state("field") == ""
        assert await other.snapshot() == await other.snapshot() and not (await other.snapshot()).ledger
        await stranger.close()


CHECKS: dict[str, Check] = {name: check for name, check in globals().items() if name.startswith("check_")}

__all__ = ("CHECKS",)
