"""The watchdog names what stays wrong, and its own looks cost the run next to nothing."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from bus import Bus, Commit
from bus.errors import BusFull, BusUnreachable
from bus.leavers import ENDED_S
from bus.messages.control import Event
from bus.topology import EVENTS, POLICY
from miles_async.console import watchdog
from miles_async.console.scene import OfLate, read_scene
from miles_async.console.watchdog import AUDIT_SHARE, Audits, watch
from tests.actors.house import messages, until
from tests.miles_async.console_data import Story, config, vitals


@given(st.lists(st.floats(0.001, 30.0), min_size=1, max_size=50), st.floats(1.0, 60.0))
def test_audits_take_a_fixed_share_of_the_time_however_long_one_takes(costs: list[float], every_s: float) -> None:
    audits, now, spent = Audits(), 0.0, 0.0
    for cost in costs:
        while not audits.due(now):
            now += every_s
        assert spent <= AUDIT_SHARE * now + 1e-6  # before this one, all former ones are paid for
        audits.done(now, now + cost)
        now, spent = now + cost, spent + cost
        assert not audits.due(now)


async def test_a_ledger_that_does_not_close_is_named_though_not_every_look_audits(redis_url, run_name) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        stop = asyncio.Event()

        async def named() -> bool:
            return any(isinstance(e, Event) and "does not close" in e.text for e in await messages(bus, EVENTS))

        async with asyncio.TaskGroup() as tasks:
            await bus.commit(Commit(close_groups=("g4",)))
            tasks.create_task(watch(bus, stop, every_s=0.02, persist_s=0.1))
            await until(named)
            stop.set()


async def test_actors_long_gone_are_taken_off_the_bus(redis_url, run_name) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        await bus.set_vitals("generation-77", vitals("generation-77", state="stopped"))
        await bus.link.run("HINCRBY", bus.keys.heard, "generation-77", -int(2000 * ENDED_S))
        stop = asyncio.Event()

        async def forgotten() -> bool:
            return "generation-77" not in await bus.hash_of(bus.keys.vitals)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(bus, stop, every_s=0.02))
            await until(forgotten)
            stop.set()


async def test_garbage_on_the_policy_log_ends_no_look_at_the_run(redis_url, run_name) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        story, of_late = Story(bus), OfLate()
        await story.whole()
        before = await of_late.read(bus)
        for fields in (["body", b"\xc1"], ["type", "policy.step", "body", b"\xc1"], ["type", "policy.step", "blob", "redis:no:1"]):
            await bus.link.run("XADD", bus.keys.stream(POLICY.name), "*", *fields)
        assert await OfLate().read(bus) == await of_late.read(bus) == before
        assert (await read_scene(bus, of_late=of_late)).uncommitted == before[0]
        await story.train(2, "g3")
        assert await OfLate().read(bus) == await of_late.read(bus) != before


async def test_the_watchdog_outlives_a_server_that_refuses_writes(redis_url, run_name, monkeypatch) -> None:
    refusals = iter([BusFull("no room"), BusUnreachable("gone")])
    real = watchdog.read_scene

    async def read(bus: Bus, **options: object) -> object:
        for error in refusals:
            raise error
        return await real(bus, **options)

    monkeypatch.setattr(watchdog, "read_scene", read)
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).whole()
        await bus.commit(Commit(close_groups=("g4",)))
        stop = asyncio.Event()

        async def named() -> bool:
            return any(isinstance(e, Event) and e.kind == "stall" for e in await messages(bus, EVENTS))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(bus, stop, every_s=0.02, persist_s=0.1))
            await until(named)
            stop.set()
