"""Large and mixed commits through the script, on a real server."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from bus import Bus, BusConfig, Commit, Entry, Out, Reader, ledger
from bus.errors import BusFull, DeadlineExceeded, InvariantBroken
from bus.messages.codec import encode
from bus.messages.policy import Checkpointed
from bus.messages.versions import VersionSpan
from bus.server import EmbeddedRedis
from bus.streams.hop import Placed, hop_args, id_key
from bus.streams.link import refuses_writes, translate
from bus.streams.redis import COMMIT
from bus.topology import POLICY, PROMPTS, ROLLOUTS
from tests.bus.suite.messages import a_rollout, a_task


async def publish(bus: Bus, n: int) -> None:
    await bus.append([Out(PROMPTS, a_task(index, "g0000001", n_samples=n)) for index in range(n)])


async def read_all(bus: Bus, n: int, me: str = "a") -> tuple[Reader, list[Entry]]:
    reader = Reader(bus, [PROMPTS], "generation", me)
    await reader.open()
    while len(reader.held) < n:
        assert await reader.read(n - len(reader.held), 1.0)
    return reader, list(reader.held.values())


def test_entry_ids_sort_as_numbers():
    assert sorted(["10-0", "9-11", "9-2"], key=id_key) == ["9-2", "9-11", "10-0"]


async def test_thousands_of_acknowledgements_fit_into_one_commit(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 2500)
        reader, entries = await read_all(bus, 2500)
        result = await bus.commit(Commit(ack=entries[::-1], append=(Out(ROLLOUTS, a_rollout(a_task())),)))
        assert result.done
        assert (await bus.length(PROMPTS), await bus.length(ROLLOUTS)) == (0, 1)
        assert int((await bus.hash_of(bus.keys.in_flight_bytes))[bus.keys.stream("prompts")]) == 0
        await reader.close()


async def test_entries_of_others_in_between_do_not_disturb_a_commit(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 9)
        first, second = Reader(bus, [PROMPTS], "generation", "a"), Reader(bus, [PROMPTS], "generation", "b")
        await first.open()
        for _ in range(3):
            await first.read(1, 0)
            await second.read(2, 0)
        assert (await bus.commit(Commit(ack=list(first.held.values())))).done
        assert await bus.length(PROMPTS) == 6
        await first.close()
        await second.close()


async def test_one_finished_entry_among_many_stops_the_whole_commit_and_is_named(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 5)
        reader, entries = await read_all(bus, 5)
        assert (await bus.commit(Commit(ack=entries[2:3]))).done
        result = await bus.commit(Commit(ack=entries, append=(Out(ROLLOUTS, a_rollout(a_task())),)))
        assert (result.done, result.moved) == (False, (entries[2].id,))
        assert (await bus.length(PROMPTS), await bus.length(ROLLOUTS)) == (4, 0)
        await reader.close()


async def test_commits_that_share_a_call_succeed_and_fail_each_for_itself(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 40)
        reader, entries = await read_all(bus, 40)
        assert (await bus.commit(Commit(ack=entries[::2]))).done
        out = Out(ROLLOUTS, a_rollout(a_task()))
        results = await asyncio.gather(*(bus.commit(Commit(ack=(e,), append=(out,))) for e in entries))
        assert [r.done for r in results] == [False, True] * 20
        assert [r.moved for r in results[::2]] == [(e.id,) for e in entries[::2]]
        assert await bus.length(ROLLOUTS) == 20
        await reader.close()


async def test_the_byte_bound_counts_what_the_same_call_appends(redis_url, run_name):
    config = BusConfig(url=redis_url, run=run_name, stream_max_bytes=2000, room_deadline_s=0.05)
    async with Bus(config) as bus:
        results = await asyncio.gather(*(publish(bus, 1) for _ in range(30)), return_exceptions=True)
        assert any(isinstance(r, DeadlineExceeded) for r in results)
        used = int((await bus.hash_of(bus.keys.in_flight_bytes))[bus.keys.stream("prompts")])
        assert 0 < used <= 2000
        assert await bus.length(PROMPTS) == sum(r is None for r in results)


async def test_a_server_out_of_memory_takes_hops_and_refuses_appends_also_in_one_batch(private_redis: EmbeddedRedis, run_name):
    async with Bus(BusConfig(url=private_redis.url, run=run_name, deadline_s=5.0)) as bus:
        await publish(bus, 3)
        reader, entries = await read_all(bus, 3)
        await bus.link.run("CONFIG", "SET", "maxmemory", "1")
        refused, *hops = await asyncio.gather(
            publish(bus, 1), *(bus.commit(Commit(ack=(e,))) for e in entries), return_exceptions=True
        )
        assert isinstance(refused, BusFull)
        assert [getattr(hop, "done", hop) for hop in hops] == [True, True, True]
        await bus.link.run("CONFIG", "SET", "maxmemory", "0")
        await publish(bus, 1)
        assert await bus.length(PROMPTS) == 1
        await reader.close()


@pytest.mark.parametrize("code", ["OOM", "READONLY", "MISCONF", "NOREPLICAS"])
def test_what_refuses_a_write_inside_a_script_is_known_in_the_words_of_redis_6_2(code):
    words = f"Error running script (call to f_{'0a' * 20}): @user_script:110: @user_script: 110: "
    error = ResponseError(f"{words}-{code} command not allowed when used memory > 'maxmemory'.")
    assert refuses_writes(error) and isinstance(translate(error, "h"), BusFull)
    assert ("Free its disk" in str(translate(error, "h"))) == (code == "MISCONF")
    other = translate(ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), "h")
    assert isinstance(other, InvariantBroken) and "Another program writes there" in str(other)
    mistake = ResponseError(f"{words}attempt to index a nil value near -OOM")
    assert not refuses_writes(mistake) and isinstance(translate(mistake, "h"), InvariantBroken)


@pytest.mark.parametrize("n", [0, 1, 129, 400])
async def test_appends_of_any_number_keep_their_order(redis_url, run_name, n):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, n)
        assert [e.fields["id"] for e in await bus.scan_all(PROMPTS)] == [f"g0000001/{i}" for i in range(n)]


async def test_a_pending_entry_in_between_is_not_taken_for_one_that_is_finished(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 3)
        reader, (first, _, last) = await read_all(bus, 3)
        assert (await bus.commit(Commit(ack=(first,)))).done
        result = await bus.commit(Commit(ack=(first, last), append=(Out(ROLLOUTS, a_rollout(a_task())),)))
        assert (result.done, result.moved) == (False, (first.id,))
        assert (await bus.length(PROMPTS), await bus.length(ROLLOUTS)) == (2, 0)
        await reader.close()


async def test_a_message_whose_body_is_gone_is_not_appended(redis_url, run_name, monkeypatch):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 1)
        reader, entries = await read_all(bus, 1)
        put = bus.blobs.put

        async def swept(body: bytes) -> str:
            ref = await put(body)
            await bus.blobs.delete([ref])
            return ref

        monkeypatch.setattr(bus.blobs, "put", swept)
        with pytest.raises(InvariantBroken, match="the body of the message is missing"):
            await bus.commit(Commit(ack=entries, append=(Out(ROLLOUTS, a_rollout(a_task(), 100_000)),)))
        assert (await bus.length(PROMPTS), await bus.length(ROLLOUTS)) == (1, 0)
        await reader.close()


async def script_call(bus: Bus, mark: int, *commits: Commit, bound: int = 0) -> list[bytes]:
    """What the script answers to these commits, sent as call `mark` of one sender: the first word for each. `bound`: bytes of a
    stream."""
    named, sections = [], []
    for commit in commits:
        placed = [Placed(out, encode(out.message)) for out in commit.append]
        keys, args = hop_args(commit, placed, keys=bus.keys, stream_keys=bus._stream_keys, bound=bound)
        named += keys
        sections += args
    keys = [*bus._fixed_keys, *named]
    head = ("7", mark, len(commits), "", "")  # of a sender without a name
    return [reply[0] for reply in await bus.link.run("EVAL", COMMIT.source, len(keys), *keys, *head, *sections)]


async def test_in_a_repeated_call_what_had_its_effect_is_done_and_what_had_none_is_tried(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 2)
        reader, (first, second) = await read_all(bus, 2)
        assert (await bus.commit(Commit(ack=(first,)))).done
        out = Out(ROLLOUTS, a_rollout(a_task()))
        both = [Commit(ack=(entry,), append=(out,)) for entry in (first, second)]
        assert await script_call(bus, 1, *both) == [b"moved", b"ok"]
        assert await script_call(bus, 1, *both) == [b"moved", b"done"]
        assert await bus.length(ROLLOUTS) == 1
        await reader.close()


async def test_a_call_that_arrives_after_a_later_one_has_no_effect(redis_url, run_name):
    """It was sent on a connection that was given up, and repeated on another."""
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        append = Commit(append=(Out(ROLLOUTS, a_rollout(a_task())),))
        assert await script_call(bus, 2, append) == [b"ok"]
        assert await script_call(bus, 1, append) == [b"done"]
        assert await script_call(bus, 3, append) == [b"ok"]
        assert await bus.length(ROLLOUTS) == 2


async def test_a_log_takes_no_room_of_the_bound(redis_url, run_name):
    """Its entries are never acknowledged, so what they took would never be given back."""
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        saved = Checkpointed(step=1, path="")
        assert (await bus.commit(Commit(append=(Out(POLICY, saved), Out(PROMPTS, a_task()))))).done
        held = await bus.hash_of(bus.keys.in_flight_bytes)
        assert int(held[bus.keys.stream("prompts")]) > 0 and not int(held.get(bus.keys.stream("policy"), 0))


async def test_what_has_its_effect_in_the_second_try_has_none_in_the_third(redis_url, run_name):
    """Two replies were lost, and the first try of one commit found no room."""
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await publish(bus, 2)
        held = int((await bus.hash_of(bus.keys.in_flight_bytes))[bus.keys.stream("prompts")])
        reader, entries = await read_all(bus, 2)
        both = Commit(append=(Out(PROMPTS, a_task()),)), Commit(append=(Out(ROLLOUTS, a_rollout(a_task())),))
        bound = held + held // 4  # two and a half prompts
        assert await script_call(bus, 1, *both, bound=bound) == [b"full", b"ok"]
        assert (await bus.commit(Commit(ack=entries))).done
        assert await script_call(bus, 1, *both, bound=bound) == [b"ok", b"done"]
        assert await script_call(bus, 1, *both, bound=bound) == [b"done", b"done"]
        assert (await bus.length(PROMPTS), await bus.length(ROLLOUTS)) == (1, 1)
        await reader.close()


async def test_accounts_of_versions_are_folded_up_to_the_edge_also_where_it_is_not_known_what_was(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await bus.commit(Commit(ledger=ledger.generated("w", (VersionSpan(1000, 1, 5),))))
        await bus.commit(Commit(ledger=ledger.generated("w", (VersionSpan(1001, 2, 7),))))
        await bus.link.run("HDEL", bus.keys.state, "folded")  # as after a lost bus
        await bus.commit(Commit(ledger=ledger.generated("w", (VersionSpan(1064, 3, 1),))))
        accounts = await ledger.read_accounts(bus)
        assert accounts.tokens_by_version == {ledger.OLDER: 5, 1001: 7, 1064: 1}
