"""What is left of workers that came and went does not grow, and nothing that an entry needs is taken away."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from bus import Bus, BusConfig, Commit, Out, Reader, ledger
from bus.leavers import ENDED_S, SILENT_S, forget_leavers, gone
from bus.messages.control import ActorState, Vitals
from bus.messages.versions import VersionSpan
from bus.topology import PREFIXES, PROMPTS
from tests.bus.suite.messages import a_task


@pytest_asyncio.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name, deadline_s=10)) as bus:
        await bus.make_readers()
        yield bus


def vitals(name: str, state: ActorState, age_s: float, now: float = 1e9) -> Vitals:
    return Vitals(actor=name, role="generation", pid=1, host="h", state=state, wall=now - age_s)


async def worker(bus: Bus, name: str, state: ActorState, age_s: float, *, takes: int = 0) -> None:
    """One that was here: it read, made 10 tokens and said its last word so long ago."""
    reader = Reader(bus, [PREFIXES, PROMPTS], "generation", name)
    await reader.open()
    await bus.append([Out(PROMPTS, a_task(at, f"g-{name}")) for at in range(1 + takes)])
    entries = await reader.read(1 + takes, 0)
    await bus.commit(Commit(ack=entries[:1], ledger=ledger.generated(name, [VersionSpan(1, 1, 10)])))
    await reader.close()
    await bus.set_vitals(name, vitals(name, state, 0.0))
    await bus.link.run("HINCRBY", bus.keys.heard, name, -int(age_s * 1000))


async def consumers(bus: Bus) -> set[str]:
    found: set[str] = set()
    for stream in (PREFIXES, PROMPTS):
        rows = await bus.link.run("XINFO", "CONSUMERS", bus.keys.stream(stream.name), "generation")
        found |= {row[1].decode() for row in rows}
    return found


async def known(bus: Bus) -> set[str]:
    return set(await bus.hash_of(bus.keys.vitals))


async def test_a_hundred_workers_that_came_and_went_leave_nothing(bus: Bus) -> None:
    for at in range(100):
        await worker(bus, f"w{at}", "stopped", 2 * ENDED_S)
        if at % 10 == 9:
            await forget_leavers(bus, idle_s=0)
            assert (await consumers(bus), await known(bus)) == (set(), set())
    accounts = await ledger.read_accounts(bus)
    assert accounts.tokens_by_worker == {"gone": 1000} and accounts.tokens_generated == 1000


async def test_whoever_holds_an_entry_or_may_come_back_stays(bus: Bus) -> None:
    await worker(bus, "holds", "stopped", 2 * SILENT_S, takes=1)
    await worker(bus, "serves", "running", 0)
    await worker(bus, "ended just now", "stopped", 60)
    await worker(bus, "silent since noon", "running", SILENT_S / 4)
    await worker(bus, "silent for days", "running", 3 * SILENT_S)
    assert await forget_leavers(bus, idle_s=0) == ["silent for days"]
    staying = {"holds", "serves", "ended just now", "silent since noon"}
    assert (await consumers(bus), await known(bus)) == (staying, staying)
    assert (await ledger.check(bus)).accounts.tokens_by_worker == {"gone": 10} | dict.fromkeys(staying, 10)

    heir = Reader(bus, [PREFIXES, PROMPTS], "generation", "serves")
    await bus.commit(Commit(ack=await heir.claim(0)))
    await heir.close()
    assert await forget_leavers(bus, idle_s=0) == ["holds"]


async def test_a_consumer_without_vitals_goes_when_it_is_idle_and_comes_back_by_reading(bus: Bus) -> None:
    reader = Reader(bus, [PROMPTS], "generation", "unknown")
    await reader.open()
    await bus.append([Out(PROMPTS, a_task(0))])
    await bus.commit(Commit(ack=await reader.read(1, 0)))
    await forget_leavers(bus)
    assert await consumers(bus) == {"unknown"}
    await forget_leavers(bus, idle_s=0)
    assert await consumers(bus) == set()
    await bus.append([Out(PROMPTS, a_task(1))])
    assert len(await reader.read(1, 0)) == 1
    await reader.close()


def test_when_an_actor_counts_as_gone() -> None:
    said = {
        "a": vitals("a", "stopped", ENDED_S + 1),
        "b": vitals("b", "failed", ENDED_S + 1),
        "c": vitals("c", "stopped", ENDED_S - 1),
        "d": vitals("d", "running", ENDED_S + 1),
        "e": vitals("e", "waiting", SILENT_S + 1),
        "f": vitals("f", "running", -SILENT_S),  # a clock that runs ahead
    }
    assert gone(said, {name: 1e9 - last.wall for name, last in said.items()}) == ["a", "b", "e"]
