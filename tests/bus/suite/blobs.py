"""The suite for large bodies: whatever the store, the life of a body is that of its entry."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bus.dead import drop, letter_of, read_letters, retry
from bus.errors import BadMessage
from bus.messages.active import Activate
from bus.messages.base import EMPTY
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.policy import WeightsReady
from bus.messages.versions import PolicyVersion
from bus.messages.weights import WeightPlan
from bus.plans import get_plan, put_plan
from bus.streams.entry import Commit, Entry, Out
from bus.streams.redis import Bus
from bus.sweep import sweep_orphans
from bus.topology import ACTIVE, DEAD, GROUPS, POLICY, PROMPTS, ROLLOUTS, SCORED
from tests.bus.suite.conformance import Check, MakeBus, publish, reader_of
from tests.bus.suite.messages import a_group, a_response, a_rollout, a_task


async def ids(bus: Bus) -> list[str]:
    """Of all bodies there are."""
    return [ref.split(":")[1] for ref, _ in await bus.blobs.list_ids()]


async def check_bodies_come_back_whole(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        for size in (0, 1, 1000, 512 * 1024, 512 * 1024 + 1, 3_000_000):
            body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            ref = await bus.blobs.put(body)
            assert ref.endswith(f":{size}") and await bus.blobs.get(ref) == body
            await bus.blobs.delete([ref, ref])
            try:
                await bus.blobs.get(ref)
            except BadMessage:
                continue
            raise AssertionError("a deleted body was still there")
        assert await bus.blobs.list_ids() == []


async def check_samples_of_any_length_survive_a_hop(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        reader = await reader_of(bus, "a")
        scorer = await reader_of(bus, "b", [ROLLOUTS], "reward")
        for n_tokens in (0, 1, 1000, 2000, 100_000):
            await publish(bus, 1)
            [entry] = await reader.read(1, 0)
            rollout = a_rollout(a_task(), n_tokens)
            assert (await bus.commit(Commit(ack=(entry,), append=(Out(ROLLOUTS, rollout),)))).done
            [entry] = await scorer.read(1, 0)
            assert entry.fields["tokens"] == str(n_tokens) and bool(entry.blob) == (n_tokens >= 2000)
            got = await bus.message(entry)
            assert got == rollout and got.response == a_response(n_tokens)
            assert (got.response.tokens == EMPTY) == (n_tokens == 0)
            assert (await bus.commit(Commit(ack=(entry,)))).done
        assert await bus.blobs.list_ids() == []
        assert int((await bus.hash_of(bus.keys.in_flight_bytes))[bus.keys.stream("rollouts")]) == 0
        await reader.close()
        await scorer.close()


async def check_a_body_lives_as_long_as_its_entry(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await bus.append([Out(PROMPTS, a_task(i, n_samples=2, prompt_tokens=50_000)) for i in range(2)])
        [first, second] = await bus.scan_all(PROMPTS)
        assert first.blob and first.size > 200_000 and not first.body
        reader = await reader_of(bus, "a")
        entries = await reader.read(2, 0)
        assert await ids(bus) != []
        assert (await bus.commit(Commit(ack=entries[:1]))).done
        assert await ids(bus) == [second.blob.split(":")[1]]
        assert len((await bus.message(entries[1])).prompt_tokens) == 200_000
        await reader.close()


async def check_the_body_of_a_refused_commit_is_swept(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 1)
        zombie, heir = await reader_of(bus, "a"), await reader_of(bus, "b")
        [old] = await zombie.read(1, 0)
        [new] = await heir.claim(0)
        big = Out(ROLLOUTS, a_rollout(a_task(), 20_000))
        assert (await bus.commit(Commit(ack=(new,), append=(big,)))).done
        assert not (await bus.commit(Commit(ack=(old,), append=(big,)))).done
        [entry] = await bus.scan_all(ROLLOUTS)
        assert len(await ids(bus)) == 2 and await sweep_orphans(bus) == 0, "what is young may be about to be named"
        assert await sweep_orphans(bus, older_s=0) == 1
        assert await ids(bus) == [entry.blob.split(":")[1]]
        assert (await bus.message(entry)).response.n_tokens == 20_000
        await zombie.close()
        await heir.close()


async def check_a_plan_is_kept_as_long_as_an_order_names_it(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        version, manifest = PolicyVersion(7, 3), await put_plan(bus, WeightPlan(transport="nccl", buckets=()))
        await put_plan(bus, WeightPlan(transport="nccl", buckets=()))
        await bus.append([Out(POLICY, WeightsReady(version=version, manifest=manifest))])
        await bus.append([Out(ACTIVE, Activate(version=version, manifest=manifest))])
        for stream in (POLICY, ACTIVE):
            await sweep_orphans(bus, older_s=0)
            assert await get_plan(bus, manifest) and len(await ids(bus)) == 1
            await bus.link.run("DEL", bus.keys.stream(stream.name))
        assert await sweep_orphans(bus, older_s=0) == 1


async def check_what_a_killed_writer_left_is_swept_and_nothing_else(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 2, prompt_tokens=50_000)
        lost = [await bus.blobs.put(b"x" * n) for n in (0, 100, 600_000)]
        shown = await bus.blobs.put(b"a picture")  # which an open group's samples share
        group = OpenGroup(group_id="g9", prompt_id="p9", n_samples=2, blobs=(shown,))
        await bus.commit(Commit(open_groups={"g9": msgspec.msgpack.encode(group)}))
        reader = await reader_of(bus, "a")
        [buried, _] = await reader.read(2, 0)
        letter = letter_of(buried, actor="a", error="KeyError: 'x'", wall=0.0)
        assert (await bus.commit(Commit(ack=(buried,), append=(Out(DEAD, letter),)))).done
        if bus.config.blob_dir:
            (Path(bus.config.blob_dir) / "half.part").write_bytes(b"half")
        assert await sweep_orphans(bus, older_s=0) == len(lost) + bool(bus.config.blob_dir)
        assert len(await ids(bus)) == 3, "a body that a letter or an open group names is named"
        assert [(await bus.message(e)).index for e in await bus.scan_all(PROMPTS)] == [1]
        await reader.close()


async def check_a_dead_letter_of_any_length_goes_back_or_goes(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await publish(bus, 2, prompt_tokens=50_000)
        reader = await reader_of(bus, "a")
        for entry in await reader.read(2, 0):
            letter = letter_of(entry, actor="a", error="x", wall=0.0)
            assert (await bus.commit(Commit(ack=(entry,), append=(Out(DEAD, letter),), open_groups={"g0000001": b""}))).done
        [first, second] = await read_letters(bus)
        assert (await retry(bus, first)).how == "again" and await bus.length(DEAD) == 1
        [again] = await reader.read(1, 0)
        assert len((await bus.message(again)).prompt_tokens) == 200_000
        assert (await bus.commit(Commit(ack=(again,)))).done
        await drop(bus, second)
        assert await bus.length(DEAD) == 0 and await ids(bus) == []
        assert int((await bus.hash_of(bus.keys.in_flight_bytes))[bus.keys.stream("prompts")]) == 0
        await reader.close()


async def check_a_missing_body_is_a_bad_message_not_a_crash(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        await bus.append([Out(PROMPTS, a_task(prompt_tokens=50_000))])
        reader = await reader_of(bus, "a")
        [entry] = await reader.read(1, 0)
        await bus.blobs.delete([entry.blob])
        try:
            await bus.message(entry)
        except BadMessage as error:
            assert "gone" in str(error)
        else:
            raise AssertionError("a message without its body")
        assert (await bus.commit(Commit(ack=(entry,)))).done, "it can still be acknowledged"
        await reader.close()


async def check_a_group_moves_with_all_its_members(make_bus: MakeBus) -> None:
    async with make_bus() as bus:
        group = a_group(n_samples=8, n_tokens=2000)
        await bus.append([Out(SCORED, scored) for scored in group.samples])
        reader = await reader_of(bus, "a", [SCORED], "filter")
        entries: list[Entry] = []
        while len(entries) < 8:
            entries += await reader.read(8 - len(entries), 0)
        kept = GroupKept(group_id=group.group_id, prompt_id=group.prompt_id, samples=tuple([await bus.message(e) for e in entries]))
        assert (await bus.commit(Commit(ack=entries, append=(Out(GROUPS, kept),)))).done
        [entry] = await bus.scan_all(GROUPS)
        assert entry.fields["note"] == "samples=8" and entry.fields["tokens"] == "16000"
        assert await bus.message(entry) == group
        assert await bus.length(SCORED) == 0 and len(await bus.blobs.list_ids()) == 1
        await reader.close()


CHECKS: dict[str, Check] = {name: check for name, check in globals().items() if name.startswith("check_")}

__all__ = ("CHECKS",)
