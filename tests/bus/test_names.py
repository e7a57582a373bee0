"""Of two processes with one name one has it: the other writes nothing, is given nothing, and hears so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bus import Bus, BusConfig, Commit, Out, Reader
from bus.errors import BusWentBack, Garbage, NameTaken
from bus.messages.control import Event
from bus.streams.hold import Held, Who, own_token
from bus.streams.redis import LIFE
from bus.topology import EVENTS, PROMPTS, ROLLOUTS
from tests.bus.suite.conformance import publish
from tests.bus.suite.messages import a_rollout, a_task
from tests.bus.suite.proxy import LossyProxy
from tests.miles_async.console_data import vitals

LAPSE_S = 10.0


def who(pid: int = 1) -> Who:
    return Who(pid=pid, host="node7", processes="p", began="1:2")


@asynccontextmanager
async def process(url: str, run: str, token: str, life: str = "") -> AsyncIterator[Bus]:
    """A bus as another process would have it."""
    async with Bus(BusConfig(url=url, run=run, life=life)) as bus:
        bus.names.token = token
        yield bus


async def has(bus: Bus, name: str = "filter", pid: int = 1, instead_of: Held | None = None) -> Held | None:
    return await bus.names.take(name, who(pid), lapse_s=LAPSE_S, instead_of=instead_of)


async def took_over(bus: Bus) -> None:
    """From whoever is silent."""
    held = await has(bus, pid=2)
    assert held is not None and held.who.pid == 1
    assert await has(bus, pid=2, instead_of=held) is None


def generation_of(bus: Bus) -> int:
    assert bus.names.hold is not None
    return bus.names.hold.generation


async def test_a_name_is_one_processes_and_each_generation_is_given_once(redis_url: str, run_name: str) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        assert await has(first) is None and await has(first) is None, "its own it may ask for again"
        before = generation_of(first)
        held = await has(second, pid=2)
        assert held is not None and held.who == who() and second.names.hold is None
        assert await has(second, "sampler") is None and generation_of(second) > before


async def test_who_was_heard_meanwhile_is_not_replaced(redis_url: str, run_name: str) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        await has(first)
        held = await has(second, pid=2)
        assert held is not None
        await asyncio.sleep(0.002)  # the server's clock counts milliseconds
        await first.set_vitals("filter", vitals("filter"))
        again = await has(second, pid=2, instead_of=held)
        assert again is not None and again.heard > held.heard
        assert (await first.names.holder_of("filter") or held).token == "a1"


@pytest.mark.parametrize("many", [1, 3])
async def test_a_zombie_commits_nothing_however_its_commits_are_sent(redis_url: str, run_name: str, many: int) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        await has(first)
        await publish(first, many)
        reader = Reader(first, [PROMPTS], "generation", "filter")
        await reader.open()
        entries = await reader.read(many, 0.0)
        await took_over(second)
        commits = [Commit(ack=(entry,), append=(Out(ROLLOUTS, a_rollout(a_task())),), state={"f": "x"}) for entry in entries]
        found = await asyncio.gather(*(first.commit(commit) for commit in commits), return_exceptions=True)
        assert [type(one) for one in found] == [NameTaken] * many
        assert "taken by process 2 on host node7" in str(found[0]) and "\n" not in str(found[0])
        note = Event(actor="filter", kind="k", text="t", wall=0.0)
        with pytest.raises(NameTaken):
            await first.append([Out(EVENTS, note)], repeatable=True)
        assert (await second.length(ROLLOUTS), await second.length(EVENTS), await second.state("f")) == (0, 0, "")
        assert (await second.commit(commits[0])).done
        await reader.close()


async def test_a_zombie_that_only_waits_hears_it_at_its_beat_and_leaves_no_vitals(redis_url: str, run_name: str) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        await has(first)
        await took_over(second)
        await second.set_vitals("filter", vitals("filter", note="of the second"))
        with pytest.raises(NameTaken):
            await first.set_vitals("filter", vitals("filter", note="of the first"))
        assert (await second.vitals())["filter"].note == "of the second"


@pytest.mark.parametrize("block_s", [0.0, 0.2])
async def test_what_a_zombie_is_given_its_successor_finds(
    redis_url: str, run_name: str, block_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        zombie, reader = (Reader(bus, [PROMPTS], "generation", "filter") for bus in (first, second))
        await zombie.open()
        await has(first)
        await took_over(second)
        assert await reader.read(8, 0.0) == []
        await publish(second, 2)
        with pytest.raises(NameTaken):
            await zombie.read(8, block_s)
        assert not zombie.held
        assert await reader.read(8, 0.0) == [], "they are under its name, and it was not given them"
        monkeypatch.setattr("bus.streams.reader.QUIET_S", 0.0)
        assert len(await reader.read(8, 0.0)) == 2
        assert await reader.read(8, 0.0) == [], "once"
        await zombie.close()
        await reader.close()


async def test_a_zombie_saves_no_prefix(redis_url: str, run_name: str) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        await has(first)
        await publish(first, 1)
        reader = Reader(first, [PROMPTS], "generation", "filter")
        await reader.open()
        [entry] = await reader.read(1, 0.0)
        assert await first.save_prefix(entry, "filter", "s/0", b"one")
        await took_over(second)
        assert not await first.save_prefix(entry, "filter", "s/0", b"two")
        assert await second.save_prefix(entry, "filter", "s/0", b"three")
        assert await second.load_prefix("s/0") == [b"one", b"three"]
        await reader.close()


async def test_a_name_that_lapsed_and_was_not_taken_is_its_holders_in_a_new_generation(redis_url: str, run_name: str) -> None:
    async with process(redis_url, run_name, "a1") as bus:
        await has(bus)
        before = generation_of(bus)
        assert not await bus.set_vitals("filter", vitals("filter"))
        await bus.link.run("HINCRBY", bus.keys.heard, "filter", -60_000)
        assert await bus.set_vitals("filter", vitals("filter")) and generation_of(bus) > before
        await bus.link.run("HINCRBY", bus.keys.heard, "filter", 60_000)  # the server's clock was set back
        assert not await bus.set_vitals("filter", vitals("filter"))
        await bus.commit(Commit(state={"f": "x"}))


async def test_a_name_that_the_server_lost_is_taken_again_before_anything_is_written(redis_url: str, run_name: str) -> None:
    async with process(redis_url, run_name, "a1") as first, process(redis_url, run_name, "b2") as second:
        await has(first)
        for write in (lambda: first.commit(Commit(state={"f": "x"})), lambda: first.set_vitals("filter", vitals("filter"))):
            await first.link.run("DEL", first.keys.names)
            await write()
            assert (await has(second, pid=2)) is not None
        reader = Reader(first, [PROMPTS], "generation", "filter")
        await reader.open()
        await publish(second, 1)
        await first.link.run("DEL", first.keys.names)
        assert len(await reader.read(1, 0.0)) == 1 and await has(second, pid=2) is not None
        await reader.close()


async def test_of_another_life_of_the_run_no_name_is_taken(redis_url: str, run_name: str) -> None:
    """The launcher made the bus anew from a checkpoint while this one lived."""
    async with process(redis_url, run_name, "a1") as launcher:
        await launcher.commit(Commit(state={LIFE: "one"}))
        async with process(redis_url, run_name, "b2", life="one") as old:
            await has(old)
            await launcher.forget_run()
            await launcher.commit(Commit(state={LIFE: "two"}))
            for write in (lambda: old.commit(Commit(state={"f": "x"})), lambda: old.set_vitals("filter", vitals("filter"))):
                with pytest.raises(BusWentBack):
                    await write()
            assert await launcher.state("f") == "" and await launcher.names.holder_of("filter") is None


async def test_a_name_is_given_back_with_the_last_words_also_where_their_reply_is_lost(redis_url: str, run_name: str) -> None:
    with TemporaryDirectory(prefix="ma-test-") as folder:
        async with LossyProxy(redis_url, Path(folder)) as proxy, process(proxy.url, run_name, "a1") as first:
            await has(first)
            before = generation_of(first)
            proxy.lose_reply_to("EVALSHA")
            await first.set_vitals("filter", vitals("filter", state="stopped"), leaves=True)
            async with process(redis_url, run_name, "b2") as second:
                assert await has(second, pid=2) is None and generation_of(second) > before


def test_who_was_forked_is_another_than_who_forked_it() -> None:
    """Children of one fork server, which has loaded this: one may be the successor of the other."""
    ours, (ear, mouth) = own_token(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(mouth, own_token().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(mouth)
    with os.fdopen(ear) as said:
        assert said.read() not in ("", ours) and own_token() == ours


@pytest.mark.parametrize("word", [b"\xc1", b"7", b"x:y:z", b"7:ab:{", b"7:ab:[1]"])
async def test_garbage_under_a_name_is_told_with_its_place_and_remedy(redis_url: str, run_name: str, word: bytes) -> None:
    async with process(redis_url, run_name, "a1") as bus:
        await bus.link.run("HSET", bus.keys.names, "filter", word)
        with pytest.raises(Garbage) as refused:
            await has(bus)
        assert bus.keys.names in str(refused.value) and "HDEL" in str(refused.value) and "\n" not in str(refused.value)
