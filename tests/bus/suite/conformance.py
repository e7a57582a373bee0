"""The suite that every bus must pass, first part: delivery, leases, commits. Needs a real server.

Each `check_*` takes `make_bus`: called with changes to BusConfig it makes a Bus of the test's own run on the server under
test, to be used as `async with`. `CHECKS` names them all. Bounds, trimming and logs are checked in flow.py, bodies in
blobs.py, lost servers and replies in faults.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bus.errors import BadMessage, InvariantBroken
from bus.messages.control import DeadLetter
from bus.messages.samples import RolloutDone
from bus.streams.entry import Commit, Entry, Guard, Out
from bus.streams.reader import Reader
from bus.streams.redis import Bus
from bus.topology import DEAD, PREFIXES, PROMPTS, ROLLOUTS, Stream
from tests.bus.suite.messages import a_rollout, a_task, an_open_group

MakeBus = Callable[..., Bus]
Check = Callable[[MakeBus], Awaitable[None]]
DEADLINE_S = 20.0


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds, at most DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions on a server have no event to wait for
            await asyncio.sleep(0.005)


async def publish(bus: Bus, n: int, *, group: str = "g0000001", stream: Stream = PROMPTS, **task: Any) -> None:
    """`n` samples of one group onto a stream."""
    await bus.append([Out(stream, a_task(index, group, n_samples=n, **task)) for index in range(n)])


async def reader_of(bus: Bus, me: str, streams: Sequence[Stream] = (PROMPTS,), readers: str = "generation") -> Reader:
    """An open reader."""
    reader = Reader(bus, streams, readers, me)
    await reader.open()
    return reader


async def age(bus: Bus, entries: Sequence[Entry], owner: str, seconds: float) -> None:
    """Make pending entries look as if their owner had not renewed them for so long."""
    for entry in entries:
        key = bus.keys.stream(entry.stream.name)
        ms = int(seconds * 1000)
        await bus.link.run("XCLAIM", key, entry.readers, owner, 0, entry.id, "IDLE", ms, "JUSTID")


async def ids_on(bus: Bus, stream: Stream) -> list[str]:
    """Header ids on a stream, in order."""
    return [entry.fields.get("id", "") for entry in await bus.scan_all(stream)]


async def put_raw(bus: Bus, stream: Stream, *fields: str | bytes) -> str:
    """An entry that no code of ours would write."""
    return str((await bus.link.run("XADD", bus.keys.stream(stream.name), "*", *fields)).decode())


# -- delivery -----------------------------------------------------------------------------------------------------------


async def check_entries_come_in_order_with_readable_fields(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await bus.append([Out(ROLLOUTS, a_rollout(a_task(index), 5, version=7)) for index in range(3)])
        reader = await reader_of(bus, "a", [ROLLOUTS], "reward")
        entries = await reader.read(10, 0)
        assert [e.fields["id"] for e in entries] == ["g0000001/0", "g0000001/1", "g0000001/2"]
        expected = {"type": "rollout.done", "group": "g0000001", "version": "7", "tokens": "5"}
        assert all(expected.items() <= e.fields.items() for e in entries)
        assert await bus.message(entries[1]) == a_rollout(a_task(1), 5, version=7)
        await reader.close()


async def check_streams_are_read_in_order_of_priority(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 2, group="g0000002")
        await publish(bus, 2, group="g0000001", stream=PREFIXES)
        reader = await reader_of(bus, "a", [PREFIXES, PROMPTS])
        first, second = await reader.read(2, 0), await reader.read(2, 0)
        assert {e.stream.name for e in first} == {"prefixes"} and {e.stream.name for e in second} == {"prompts"}
        await reader.close()


async def check_a_blocked_read_wakes_for_a_new_entry(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        reader = await reader_of(bus, "a")
        waiting = asyncio.create_task(reader.read(5, DEADLINE_S))
        await asyncio.sleep(0)
        await publish(bus, 1)
        async with asyncio.timeout(DEADLINE_S):
            assert len(await waiting) == 1
        await reader.close()


async def check_a_dead_reader_loses_nothing(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 1)
        dead, peer = await reader_of(bus, "a"), await reader_of(bus, "b")
        [held] = await dead.read(1, 0)
        await dead.close()
        assert await peer.read(1, 0) == []
        [taken] = await peer.claim(0)
        assert (taken.id, taken.deliveries) == (held.id, 2)
        assert (await bus.commit(Commit(ack=(taken,)))).done
        assert await bus.length(PROMPTS) == 0
        await peer.close()


async def check_a_restarted_reader_reads_its_own_pending_first(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 3)
        before = await reader_of(bus, "a")
        held = await before.read(2, 0)
        await before.close()
        again = await reader_of(bus, "a")
        entries = await again.read(2, 0)
        assert [e.id for e in entries] == [e.id for e in held]
        assert [e.deliveries for e in entries] == [2, 2]
        assert [e.fields["id"] for e in await again.read(5, 0)] == ["g0000001/2"]
        await again.close()


async def check_a_reader_never_gets_twice_what_it_holds(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 4)
        reader = await reader_of(bus, "a")
        held = await reader.read(2, 0)
        assert await reader.claim(0) == []
        reader.retry_later(held[0])
        given = [e.id for _ in range(4) for e in await reader.read(1, 0)]
        assert given.count(held[0].id) == 1 and given.count(held[1].id) == 0 and len(set(given)) == 3
        await reader.close()


async def check_a_renewed_lease_is_not_claimed(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 2)
        living, peer = await reader_of(bus, "a"), await reader_of(bus, "b")
        held = await living.read(2, 0)
        await age(bus, held, "a", 3600)
        assert await living.renew(held[:1]) == set()
        taken = await peer.claim(1800)
        assert [e.id for e in taken] == [held[1].id]
        assert await living.renew() == {held[1].id}, "the owner learns that it lost the lease"
        assert set(living.held) == {("prompts", held[0].id)}
        await living.close()
        await peer.close()


async def check_renewing_does_not_count_as_a_delivery(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 1)
        reader, peer = await reader_of(bus, "a"), await reader_of(bus, "b")
        [first] = await reader.read(1, 0)
        for _ in range(5):
            await reader.renew()
        assert first.deliveries == 1
        counts = [2, 3, 4, 5]
        for expected, by in zip(counts, [peer, reader, peer, reader], strict=True):
            by.held.clear()
            [entry] = await by.claim(0)
            assert entry.deliveries == expected
        await reader.close()
        await peer.close()


async def check_a_claim_looks_past_a_long_row_of_living_entries(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 900, prompt_tokens=1)
        living, dead, peer = [await reader_of(bus, name) for name in "abc"]
        while len(living.held) < 890:
            assert await living.read(890 - len(living.held), 0)
        held = await dead.read(10, 0)
        await age(bus, held, "b", 3600)
        assert [e.id for e in await peer.claim(1800, 10)] == [e.id for e in held]
        for reader in (living, dead, peer):
            await reader.close()


async def check_two_readers_share_without_overlap(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 40)
        left, right = await reader_of(bus, "a"), await reader_of(bus, "b")
        seen: list[str] = []
        for _ in range(20):
            seen += [e.id for reader in (left, right) for e in await reader.read(3, 0)]
        assert len(seen) == len(set(seen)) == 40
        await left.close()
        await right.close()


async def check_malformed_bytes_are_refused_and_can_be_buried(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await put_raw(bus, PROMPTS, "body", b"\x93\x01not a message")
        await put_raw(bus, PROMPTS, "nothing", "at all", "\xff", b"\xfe\x00")
        await put_raw(bus, PROMPTS, "blob", "file:../../etc/passwd:10")
        await put_raw(bus, PROMPTS, "blob", "redis:abcdef:999")
        await put_raw(bus, PROMPTS, "blob", "file:abc:" + "9" * 5000)
        await put_raw(bus, PROMPTS, "blob", "redis:abc:²", "tokens", "many", "id", b"\xff\xfe")
        rollout_on_prompts = a_rollout(a_task())
        await bus.append([Out(PROMPTS, rollout_on_prompts)])
        reader = await reader_of(bus, "a")
        entries = await reader.read(10, 0)
        assert len(entries) == 7
        for entry in entries:
            try:
                await bus.message(entry)
            except BadMessage as error:
                letter = DeadLetter(stream="prompts", entry_id=entry.id, actor="a", error=str(error), body=entry.body)
                assert (await bus.commit(Commit(ack=(entry,), append=(Out(DEAD, letter),)))).done
            else:
                raise AssertionError(f"{entry} was taken for a message")
        assert await bus.length(PROMPTS) == 0 and await bus.length(DEAD) == 7
        await reader.close()


# -- commits ------------------------------------------------------------------------------------------------------------


async def check_of_a_zombie_and_its_successor_only_one_commits(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 2)
        zombie, heir = await reader_of(bus, "a"), await reader_of(bus, "b")
        old = await zombie.read(2, 0)
        new = await heir.claim(0)

        def result(entry: Entry, worker: str) -> Commit:
            task = a_task(int(entry.fields["id"].rpartition("/")[2]))
            done = RolloutDone(task=task, response=a_rollout(task).response, finish="stop", worker=worker)
            return Commit(ack=(entry,), append=(Out(ROLLOUTS, done),), ledger={"tokens/generated": 3})

        assert (await bus.commit(result(new[0], "heir"))).done
        late = await bus.commit(result(old[0], "zombie"))
        assert (late.done, late.moved) == (False, (old[0].id,))
        assert (await bus.commit(result(old[1], "zombie"))).done
        assert not (await bus.commit(result(new[1], "heir"))).done
        workers = [(await bus.message(e)).worker for e in await bus.scan_all(ROLLOUTS)]
        assert workers == ["heir", "zombie"]
        assert await bus.hash_of(bus.keys.ledger) == {"tokens/generated": b"6"}
        await zombie.close()
        await heir.close()


async def check_a_commit_is_all_or_nothing(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 3)
        reader = await reader_of(bus, "a")
        held = await reader.read(3, 0)
        assert (await bus.commit(Commit(ack=held[1:2]))).done
        refused = await bus.commit(
            Commit(
                ack=held,
                append=(Out(ROLLOUTS, a_rollout(a_task())),),
                ledger={"issued": 1},
                open_groups={"g": b"x"},
                state={"field": "value"},
            )
        )
        assert (refused.done, refused.moved) == (False, (held[1].id,))
        assert await bus.length(PROMPTS) == 2 and await bus.length(ROLLOUTS) == 0
        assert await bus.snapshot() == await bus.snapshot() and not (await bus.snapshot()).ledger
        assert await bus.state("field") == ""
        assert (await bus.commit(Commit(ack=(held[0], held[2])))).done and await bus.length(PROMPTS) == 0
        await reader.close()


async def check_a_commit_moves_accounts_groups_and_state(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        group = an_open_group()
        await bus.commit(Commit(ledger={"issued": 4}, open_groups={"g1": group, "g2": group}, state={"a": "1"}))
        await bus.commit(Commit(ledger={"issued": 2, "trained": 3}, close_groups=("g1",), state={"a": "2"}))
        seen = await bus.snapshot()
        assert seen.ledger == {"issued": 6, "trained": 3} and list(seen.open_groups) == ["g2"]
        assert seen.state["a"] == "2"


async def check_a_guard_lets_one_of_two_through(make_bus: MakeBus) -> None:
    async with make_bus() as bus, make_bus() as rival:

        def step(by: str, before: str, after: str) -> Commit:
            return Commit(append=(Out(PROMPTS, a_task(group=by)),), guard=Guard("cursor", before, after))

        assert (await bus.commit(step("first", "", "1"))).entry_ids
        again = await rival.commit(step("first", "", "1"))
        assert again.done and not again.entry_ids, "an equal commit repeated by a successor is done, not doubled"
        assert (await rival.commit(step("second", "1", "2"))).entry_ids
        try:
            await bus.commit(step("late", "1", "3"))
        except InvariantBroken as error:
            assert "'2'" in str(error)
        else:
            raise AssertionError("a commit on an outdated state went through")
        assert await ids_on(bus, PROMPTS) == ["first/0", "second/0"] and await bus.state("cursor") == "2"


async def check_numbers_are_never_given_twice(make_bus: MakeBus) -> None:
    async with make_bus() as bus, make_bus() as rival:
        numbers = await asyncio.gather(*(b.next_number("version") for b in (bus, rival) for _ in range(20)))
        assert sorted(numbers) == list(range(1, 41))
        assert await bus.next_number("version", at_least=100) == 100
        assert await rival.next_number("version", at_least=7) == 101


async def check_many_commits_at_once_all_take_effect(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 300, prompt_tokens=1)
        reader = await reader_of(bus, "a")
        while len(reader.held) < 300:
            assert await reader.read(300, 0)
        entries = list(reader.held.values())
        out = Out(ROLLOUTS, a_rollout(a_task()))
        results = await asyncio.gather(*(bus.commit(Commit(ack=(e,), append=(out,))) for e in entries))
        assert all(r.done and r.entry_ids for r in results)
        assert await bus.length(PROMPTS) == 0 and await bus.length(ROLLOUTS) == 300
        await reader.close()


async def check_one_commit_may_acknowledge_very_many(make_bus: MakeBus) -> None:
    """An evaluation ends with all its samples in one commit."""
    async with make_bus() as bus:
        n = 9000
        for start in range(0, n, 1000):
            await bus.append([Out(PROMPTS, a_task(i, prompt_tokens=0)) for i in range(start, start + 1000)])
        reader = await reader_of(bus, "a")
        while len(reader.held) < n:
            assert await reader.read(4096, 0)
        entries = list(reader.held.values())
        assert (await bus.commit(Commit(ack=entries, append=(Out(ROLLOUTS, a_rollout(a_task())),)))).done
        assert await bus.length(PROMPTS) == 0 and await bus.length(ROLLOUTS) == 1
        assert not (await bus.commit(Commit(ack=entries))).done
        await reader.close()


CHECKS: dict[str, Check] = {name: check for name, check in globals().items() if name.startswith("check_")}

__all__ = ("CHECKS", "DEADLINE_S", "Check", "MakeBus", "age", "eventually", "ids_on", "publish", "put_raw", "reader_of")
