"""No sample is born before its task's step, whatever its worker serves, and versions of its tokens never fall."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.generation.engines.sglang.routed import RoutedEngine
from actors.generation.leasing import LEASED, Leases
from actors.generation.link import EngineLink, State
from actors.generation.pace import Pace
from actors.generation.sample import Running
from actors.generation.sharing import Sharing
from actors.generation.spec import GenerationSpec
from actors.partial.actor import PartialSpec
from actors.partial.actor import run as partial
from actors.publisher.actor import PublisherSpec
from actors.publisher.actor import run as publisher
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.context import Context
from bus import Bus, Commit, Tail
from bus.messages.active import Activate, PolicyActive
from bus.messages.base import pack_floats, pack_ints
from bus.messages.policy import PolicyAnnounced, Restored, WeightManifest
from bus.messages.samples import PrefixResume, Response, RolloutDone
from bus.messages.versions import PolicyVersion, VersionSpan, spans_cover
from bus.topology import ACTIVE, POLICY, PREFIXES, PROMPTS, ROLLOUTS
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.scripted import ScriptedEngine, sample, workers

READ_S = 0.6  # a read that began before some news is over then


def version(number: int, step: int | None = None) -> PolicyVersion:
    """Version `number`; of step `number` - 1 unless told."""
    return PolicyVersion(number, number - 1 if step is None else step)


def files(number: int) -> WeightManifest:
    return WeightManifest(path=f"scripted-{number}")


def order(number: int, *names: str, step: int | None = None) -> Activate:
    return Activate(version=version(number, step), manifest=files(number), workers=names)


def active(number: int, *, step: int | None = None, **serving: int) -> PolicyActive:
    return PolicyActive(version=version(number, step), serving=serving)


async def done(bus: Bus, n: int) -> list[RolloutDone]:
    """All rollouts, once there are `n`."""
    found = [m for m in await messages(bus, ROLLOUTS) if isinstance(m, RolloutDone)]
    return found if len(found) >= n else []


def check(rollouts: list[RolloutDone]) -> None:
    for rollout in rollouts:
        spans = rollout.response.spans
        assert spans[0].step >= rollout.task.step, f"{rollout.task.sample_id} was born before its step: {spans}"
        assert [s.version for s in spans] == sorted({s.version for s in spans}), "versions fell"
        assert spans_cover(spans, rollout.response.n_tokens)


async def active_steps(bus: Bus) -> AsyncIterator[int]:
    """Steps of versions as they become the newest that is active."""
    tail = Tail(bus, [ACTIVE])
    await tail.open()
    newest = -1
    try:
        while True:
            for entry in await tail.read(0.5):
                message = await bus.message(entry)
                if isinstance(message, PolicyActive) and message.version.step > newest:
                    newest = message.version.step
                    yield newest
    finally:
        await tail.close()


@pytest.mark.parametrize("fraction", [1.0, 0.25], ids=["all at once", "rolling"])
@pytest.mark.parametrize("n", [1, 2, 8])
async def test_no_sample_is_born_before_its_step(redis_url: str, run_name: str, n: int, fraction: float) -> None:
    steps, each = 5, 3 * n
    engines = [ScriptedEngine(load_s=0.02 + 0.05 * (i % 4)) for i in range(n)]
    knobs = {"sglang_server_concurrency": 4, "max_tokens_per_slice": 5, "partial_save_tokens": 3}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus:
        spec = PublisherSpec(wave_fraction=fraction, worker_timeout_s=600.0)
        async with (
            running(bus, "partial", partial, PartialSpec()),
            running(bus, "publisher", publisher, spec),
            workers(bus, engines) as (_, contexts),
        ):
            await put(bus, POLICY, PolicyAnnounced(version=version(1), manifest=files(1)))
            async for step in active_steps(bus):
                await put(bus, PROMPTS, *(sample(f"s{step}n{i}", step, tokens=12) for i in range(each)))
                if step == steps - 1:
                    break

                async def half_done(step: int = step) -> bool:
                    return await bus.length(ROLLOUTS) >= each * step + each // 2

                await until(half_done, deadline_s=30)  # as a trainer, which needs a batch
                await put(bus, POLICY, PolicyAnnounced(version=version(step + 2), manifest=files(step + 2)))
            rollouts = await until(lambda: done(bus, steps * each), deadline_s=40)
    check(rollouts)
    assert {s.step for r in rollouts for s in r.response.spans} == set(range(steps))
    assert any(r.resumed_tokens for r in rollouts), "some of them changed workers"
    assert sum(c.counters.get("held", 0) for c in contexts) == 0, "nothing is held for ever"


@asynccontextmanager
async def two(redis_url: str, run_name: str, **fields: Any) -> AsyncIterator[tuple[Bus, list[ScriptedEngine], list[Context]]]:
    """Two workers that serve version 1, step 0, and take one sample at a time; the test is the publisher."""
    engines = [ScriptedEngine(), ScriptedEngine()]
    async with open_bus(redis_url, run_name, knobs={"sglang_server_concurrency": 1}) as bus:
        async with (
            running(bus, "partial", partial, PartialSpec()),
            workers(bus, engines, **fields) as (made, contexts),
        ):
            await put(bus, ACTIVE, order(1))

            async def serve() -> bool:
                return all(w._link.serving == version(1) for w in made)

            await until(serve)
            await put(bus, ACTIVE, active(1, w0=1, w1=1))
            try:
                yield bus, engines, contexts
            finally:
                for engine in engines:
                    engine.gate.set()


async def holds(context: Context, n: int = 1) -> bool:
    return context.counters.get("held", 0) == n


async def serves(context: Context, number: int) -> bool:
    return context.version == number


async def stops(bus: Bus, context: Context, engine: ScriptedEngine, number: int) -> None:
    """The worker begins to load a version, and will not be done before its gate opens; it takes nothing any more."""
    engine.gate.clear()
    await put(bus, ACTIVE, order(number, context.name))

    async def loads() -> bool:
        return any("activation" in what for what, _ in context._waits)

    await until(loads)
    await asyncio.sleep(READ_S)


def anew(name: str, step: int) -> PrefixResume:
    """A fresh task that comes as a parked one, so that also a worker that is behind takes it."""
    return PrefixResume(task=sample(name, step), response=Response())


def prefix(name: str, made_by: int, step: int = 0) -> PrefixResume:
    """Three of eight tokens, made by version `made_by`."""
    response = Response(
        tokens=pack_ints([5] * 3),
        logprobs=pack_floats([-0.5] * 3),
        loss_mask=memoryview(b"\x01" * 3),
        spans=(VersionSpan(made_by, made_by - 1, 3),),
    )
    return PrefixResume(task=sample(name, step), response=response)


async def test_a_task_is_left_to_the_peer_that_has_its_version(redis_url: str, run_name: str) -> None:
    async with two(redis_url, run_name) as (bus, engines, (ahead, behind)):
        await stops(bus, ahead, engines[0], 2)
        await put(bus, ACTIVE, active(2, w1=1))
        await put(bus, PREFIXES, anew("new", 1))
        await until(lambda: holds(behind))
        engines[0].gate.set()
        await until(lambda: serves(ahead, 2))
        await put(bus, ACTIVE, active(2, w0=2, w1=1))
        [rollout] = await until(lambda: done(bus, 1))
        assert (rollout.worker, rollout.response.spans) == ("w0", (VersionSpan(2, 1, 8),))
        assert behind.counters["parked/behind"] == 1 and await holds(behind, 0)


async def test_what_comes_while_its_version_is_on_its_way_waits_for_it(redis_url: str, run_name: str) -> None:
    async with two(redis_url, run_name) as (bus, engines, (ahead, slow)):
        await stops(bus, ahead, engines[0], 2)
        await put(bus, ACTIVE, active(2, w1=1))
        await put(bus, PREFIXES, anew("new", 1))
        await until(lambda: holds(slow))
        await stops(bus, slow, engines[1], 2)
        engines[0].gate.set()
        await until(lambda: serves(ahead, 2))
        await put(bus, ACTIVE, active(2, w0=2, w1=1))
        engines[1].gate.set()
        [rollout] = await until(lambda: done(bus, 1))
        assert (rollout.worker, rollout.response.spans) == ("w1", (VersionSpan(2, 1, 8),))
        assert "parked/behind" not in slow.counters


async def test_a_version_that_does_not_come_is_not_waited_for_longer_than_told(redis_url: str, run_name: str) -> None:
    async with two(redis_url, run_name, hold_s=0.2) as (bus, engines, (ahead, stuck)):
        await stops(bus, ahead, engines[0], 2)
        await put(bus, ACTIVE, active(2, w1=1))
        await put(bus, PREFIXES, anew("new", 1))
        await until(lambda: holds(stuck))
        await stops(bus, stuck, engines[1], 2)

        async def parked() -> bool:
            return stuck.counters.get("parked/behind", 0) == 1

        await until(parked)
        engines[0].gate.set()
        [rollout] = await until(lambda: done(bus, 1))
        assert rollout.worker == "w0"
        engines[1].gate.set()
    check([rollout])


async def test_a_worker_that_is_behind_takes_prefixes_that_it_can_go_on_with_and_no_fresh_prompts(
    redis_url: str, run_name: str
) -> None:
    async with two(redis_url, run_name) as (bus, engines, (ahead, behind)):
        await put(bus, ACTIVE, order(2, "w0"))
        await until(lambda: serves(ahead, 2))
        await put(bus, ACTIVE, active(2, w0=2, w1=1))
        await stops(bus, ahead, engines[0], 3)
        await put(bus, PROMPTS, sample("fresh", 0))
        await put(bus, PREFIXES, prefix("old", made_by=1))
        [old] = await until(lambda: done(bus, 1))
        assert (old.worker, old.response.spans) == ("w1", (VersionSpan(1, 0, 8),))
        await put(bus, PREFIXES, prefix("young", made_by=2))

        async def left() -> bool:
            return behind.counters.get("parked/behind", 0) == 1

        await until(left)
        await put(bus, PREFIXES, prefix("later", made_by=1))  # after "young", which w1 would take first
        engines[0].gate.set()
        rollouts = await until(lambda: done(bus, 4))
        assert {r.task.group_id: r.worker for r in rollouts} == {"old": "w1", "young": "w0", "later": "w0", "fresh": "w0"}
        assert behind.counters["parked/behind"] == 1, "it does not take again what it left"
    check(rollouts)
    assert [s.version for r in rollouts if r.task.group_id == "young" for s in r.response.spans] == [2, 3]


async def test_after_a_restore_a_task_of_the_lost_future_begins_under_the_newest_version_there_is(
    redis_url: str, run_name: str
) -> None:
    async with two(redis_url, run_name) as (bus, _, contexts):
        await put(bus, ACTIVE, order(8))  # step 7
        for context in contexts:
            await until(lambda context=context: serves(context, 8))
        await put(bus, ACTIVE, active(8, w0=8, w1=8))
        await put(bus, POLICY, Restored(step=4, version=version(9, 4)))
        await asyncio.sleep(READ_S)
        await put(bus, PROMPTS, sample("lost", 7), sample("new", 4))
        await put(bus, ACTIVE, order(9, step=4))
        for context in contexts:
            await until(lambda context=context: serves(context, 9))
        await put(bus, ACTIVE, active(9, step=4, w0=9, w1=9))
        rollouts = await until(lambda: done(bus, 2))
        assert {s for r in rollouts for s in r.response.spans} == {VersionSpan(9, 4, 8)}, "none by the lost future"


async def test_a_task_that_is_faster_than_the_news_of_its_version_makes_the_worker_look(redis_url: str, run_name: str) -> None:
    """It would be taken for one of a lost future else: nobody follows the log here."""
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def body(context: Context, hold_s: float) -> None:
        link = EngineLink(context, GenerationSpec(), lambda url, inside: ScriptedEngine())
        link.enter(State.SERVING)
        link.serving = version(1)
        pace = Pace(context, link, 8, 10.0)
        consumer = Consumer(context, LEASED, "generation", on_dead=as_lost(context, lambda entry, lost: Commit()))
        leases = Leases(context, link, Sharing(context, link, ()), pace, consumer, lambda: False, hold_s)
        leases.standing.fold(active(1, w0=1, peer=1))
        found.set_result([await leases.admit(Running(sample("s", step))) for step in (0, 1)])

    async with open_bus(redis_url, run_name) as bus:
        await put(bus, ACTIVE, active(1, w0=1, peer=1), active(2, w0=1, peer=2))
        async with running(bus, "w0", body, 60.0):
            assert await asyncio.wait_for(found, 40.0) == [None, "behind"]


class Routed(ScriptedEngine, RoutedEngine):
    """Behind a router of which nothing is there but its list of one."""

    _open = False

    async def join(self) -> None:
        self._open = True

    async def leave(self) -> None:
        self._open = False

    async def renew(self) -> str:
        return ""


@pytest.mark.parametrize("loads", [True, False], ids=["new weights", "the weights it has"])
async def test_an_engine_that_is_behind_is_not_in_the_router_until_it_has_caught_up(
    redis_url: str, run_name: str, loads: bool
) -> None:
    engine = Routed()
    async with open_bus(redis_url, run_name) as bus, workers(bus, [engine]):

        async def listed() -> bool:
            return engine.routed

        async def alone() -> bool:
            return not engine.routed

        await put(bus, ACTIVE, order(1))
        await until(listed)
        await put(bus, ACTIVE, active(2, w0=1, peer=2))
        await until(alone)
        manifest = files(2 if loads else 1)
        await put(bus, ACTIVE, Activate(version=version(2), manifest=manifest, workers=("w0",)))
        await until(listed)
