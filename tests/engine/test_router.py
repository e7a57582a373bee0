"""The real sglang-router in front of two embedded engines, and workers that live with its coming and going."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from pathlib import Path

import psutil
import pytest

from actors.generation.engine import Chunk, GenerateRequest, RouteBroken
from actors.generation.engines.sglang import routed as routed_module
from actors.generation.engines.sglang.routed import RoutedEngine
from actors.generation.engines.sglang.router_client import RouterClient, RouterGone
from actors.router.actor import RouterSpec, answers, run
from actors.router.launch import DEFAULTS
from actors.runtime.child import Child, command_line, free_port
from actors.runtime.context import Context
from actors.runtime.run import Refused
from bus import Bus, Out
from bus.messages.control import Event
from bus.topology import ACTIVE, EVENTS
from tests.actors.house import messages, open_bus, running, until
from tests.engine.conftest import engine_process, serving
from tests.engine.processes import BOOT_DEADLINE_S, until_async
from tests.engine.test_sharing import released, sharing, tell
from tests.engine.workers import events, order, told

pytest.importorskip("sglang_router")
DEADLINES = {"request_deadline_s": 60.0, "token_deadline_s": 20.0, "control_deadline_s": 20.0}


@pytest.fixture(scope="module")
def engines(models: Callable[[str], tuple[Path, Path]]) -> Iterator[list[str]]:
    """URLs of two engines with the same weights; each states its own version."""
    with ExitStack() as stack:
        first, _ = models("qwen3")
        yield [stack.enter_context(engine_process(first, "--served-version", str(n)))[0] for n in (1, 2)]


class RealRouter:
    """A router process on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port(successors=1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._child = Child()
        self._log = folder / "router.log"

    async def start(self) -> None:
        from sys import executable

        address = {"host": "127.0.0.1", "port": self.port}
        address |= {"prometheus-host": "127.0.0.1", "prometheus-port": self.port + 1}
        args = {**DEFAULTS, "health-check-interval-secs": 1, **address}
        await self._child.start(command_line((executable, "-m", "sglang_router.launch_router"), args), self._log)
        await until_async(lambda: answers("127.0.0.1", self.port), "router starts", BOOT_DEADLINE_S)

    async def kill(self) -> None:
        os.kill(self._child.pid, signal.SIGKILL)
        await self._child.wait()

    async def stop(self) -> None:
        await self._child.stop()


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RealRouter]:
    real = RealRouter(tmp_path)
    await real.start()
    yield real
    await real.stop()


@pytest.fixture
async def routed(router: RealRouter, engines: list[str]) -> AsyncIterator[list[RoutedEngine]]:
    """What two workers hold: each its engine, all behind the router."""
    async with AsyncExitStack() as stack:
        made = []
        for url in engines:
            engine = RoutedEngine(url, router.url, **DEADLINES)
            stack.push_async_callback(engine.close)
            await engine.join()
            await until_async(lambda engine=engine: _renewed(engine), f"the router takes up {url}")
            made.append(engine)
        yield made


def ask(rid: str, *, key: str | None = None, n: int = 4) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=[7, 12, 40],
        max_new_tokens=n,
        ignore_eos=True,
        sampling_seed=3,
        extra_key="9",
        routing_key=key,
    )


async def served_by(engine: RoutedEngine, rid: str, key: str | None = None) -> str:
    chunks = [chunk async for chunk in engine.generate(ask(rid, key=key))]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4 and chunks[-1].finish == "length"
    return chunks[-1].weight_version


async def test_engines_register_are_listed_and_leave(router: RealRouter, engines: list[str]) -> None:
    client = RouterClient(router.url, deadline_s=10.0)
    await client.register(engines[0])
    await client.register(engines[0])  # twice is once
    await client.register(engines[1])
    assert {url: healthy for url, (_, healthy) in (await client.workers()).items()} == dict.fromkeys(engines, True)
    await client.deregister(engines[0])
    await client.deregister("http://127.0.0.1:9")  # never was there
    await until_async(lambda: _listed(client, {engines[1]}), "the first engine is gone from the list")
    await client.close()


async def _listed(client: RouterClient, wanted: set[str]) -> bool:
    return set(await client.workers()) == wanted


async def test_siblings_stay_together_and_groups_are_spread(routed: list[RoutedEngine]) -> None:
    where = {}
    async with AsyncExitStack() as running_on:
        for group in range(6):  # one sibling of each runs on, else nothing runs and any engine is the least busy
            stream = routed[0].generate(ask(f"g{group}/0", key=f"g{group}", n=3000))
            await running_on.enter_async_context(aclosing(stream))
            where[group] = (await anext(stream)).weight_version
            rest = {await served_by(routed[i % 2], f"g{group}/{i}", key=f"g{group}") for i in (1, 2)}
            assert rest == {where[group]}, "siblings of one group met different engines"
    assert sorted(where.values()) == ["1"] * 3 + ["2"] * 3


async def test_an_abort_reaches_a_request_on_a_peers_engine(routed: list[RoutedEngine]) -> None:
    mine = routed[0]
    streams = {f"g{n}/0": mine.generate(ask(f"g{n}/0", key=f"g{n}", n=3000)) for n in range(4)}
    firsts = {rid: await anext(stream) for rid, stream in streams.items()}
    assert {chunk.weight_version for chunk in firsts.values()} == {"1", "2"}
    for rid in streams:
        await mine.abort(rid)
    for rid, stream in streams.items():
        chunks = [firsts[rid], *[chunk async for chunk in stream]]
        assert chunks[-1].finish == "abort"
        assert 0 < sum(len(chunk.token_ids) for chunk in chunks) < 3000


async def test_the_death_of_the_router_costs_no_sample(router: RealRouter, routed: list[RoutedEngine]) -> None:
    mine = routed[0]
    stream = mine.generate(ask("long/0", key="long", n=3000))
    first = await anext(stream)
    await router.kill()
    kept: list[Chunk] = [first]
    with pytest.raises(RouteBroken):  # and not EngineUnavailable alone: our engine is well
        async for chunk in stream:
            kept.append(chunk)
    assert not mine.routed
    assert await served_by(mine, "while it is gone") == "1"
    await router.start()
    await until_async(lambda: _renewed(mine), "the engine registers again")
    assert await served_by(mine, "after it came back") == "1"  # the only one that registered again so far


async def _renewed(engine: RoutedEngine) -> bool:
    await engine.renew()
    return engine.routed


async def test_an_engine_that_answers_late_is_taken_up_at_last(
    router: RealRouter, models: Callable[[str], tuple[Path, Path]]
) -> None:
    with engine_process(models("qwen3")[0], "--served-version", "3") as (url, _):
        engine = RoutedEngine(url, router.url, **DEADLINES | {"control_deadline_s": 2.0})
        itself = serving(url)
        itself.suspend()
        await engine.join()
        assert not engine.routed
        itself.resume()
        await until_async(lambda: _renewed(engine), "the router takes it up")
        assert await served_by(engine, "late") == "3"
        await engine.close()


async def test_an_engine_that_hangs_keeps_no_other_from_the_router(
    router: RealRouter, engines: list[str], models: Callable[[str], tuple[Path, Path]]
) -> None:
    hasty, patient = RouterClient(router.url, deadline_s=0.3), RouterClient(router.url, deadline_s=20.0)
    with engine_process(models("qwen3")[0]) as (url, _):
        itself = serving(url)
        itself.suspend()
        for _ in range(12):  # more often than a router has jobs at once
            with pytest.raises(RouterGone):
                await hasty.register(url)
        await patient.register(engines[0])
        itself.resume()
    await hasty.close()
    await patient.close()


async def test_an_engine_that_leaves_before_it_was_taken_up_stays_out(
    router: RealRouter, models: Callable[[str], tuple[Path, Path]]
) -> None:
    client = RouterClient(router.url, deadline_s=1.0)
    with engine_process(models("qwen3")[0]) as (url, _):
        itself = serving(url)
        itself.suspend()
        with pytest.raises(RouterGone, match="did not take up"):
            await client.register(url)
        with pytest.raises(RouterGone, match="still about to take up"):
            await client.deregister(url)
        itself.resume()
        await until_async(lambda: _left(client, url), "the router takes it up and lets it go")
        await until_async(lambda: _listed(client, set()), "the engine is out")
    await client.close()


async def test_an_engine_that_left_too_early_is_let_go_later(
    router: RealRouter, models: Callable[[str], tuple[Path, Path]]
) -> None:
    with engine_process(models("qwen3")[0]) as (url, _):
        engine = RoutedEngine(url, router.url, **DEADLINES | {"control_deadline_s": 1.0})
        itself = serving(url)
        itself.suspend()
        await engine.join()
        await engine.leave()
        assert engine.leaving and not engine.routed, "the router is still at it, and would take it up behind our back"
        itself.resume()
        await until_async(lambda: _out(engine), "the router takes it up and lets it go")
        client = RouterClient(router.url, deadline_s=10.0)
        await until_async(lambda: _listed(client, set()), "the engine is out")
        await client.close()
        await engine.join()
        await until_async(lambda: _renewed(engine), "it may come back")
        await engine.close()


async def _out(engine: RoutedEngine) -> bool:
    assert await engine.renew() == "", "nothing to tell an operator"
    return not engine.leaving


async def test_a_router_that_never_lets_an_engine_go_is_told_of_once(engines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_module, "LEAVES_S", 0.0)
    monkeypatch.setattr(routed_module, "RENEW_S", 0.0)
    engine = RoutedEngine(engines[1], f"http://127.0.0.1:{free_port()}", **DEADLINES)
    await engine.join()
    await engine.leave()
    [said, *more] = [await engine.renew() for _ in range(3)]
    assert "may be sent requests: router http://127.0.0.1:" in said and "cannot be reached" in said
    assert more == ["", ""] and not engine.leaving
    await engine.close()


async def _left(client: RouterClient, url: str) -> bool:
    try:
        await client.deregister(url)
    except RouterGone:
        return False
    return True


async def test_a_router_that_was_never_there_leaves_the_worker_on_its_engine(engines: list[str]) -> None:
    engine = RoutedEngine(engines[1], f"http://127.0.0.1:{free_port()}", **DEADLINES)
    try:
        await engine.join()
        assert not engine.routed
        assert await served_by(engine, "alone") == "2"
    finally:
        await engine.close()
    client = RouterClient("http://127.0.0.1:9", deadline_s=2.0)
    with pytest.raises(RouterGone, match="cannot be reached"):
        await client.workers()
    await client.close()


async def test_the_room_keeps_its_router_alive(redis_url: str, run_name: str, tmp_path: Path) -> None:
    port = free_port(successors=1)
    spec = RouterSpec(port=port, prometheus_port=port + 1, args={"policy": "round_robin"})
    before = set(psutil.Process().children())
    async with open_bus(redis_url, run_name) as bus, running(bus, "router", run, spec, run_dir=str(tmp_path)):
        await until_async(lambda: _told(bus, "router ready", 1), "the router is ready", BOOT_DEADLINE_S)
        [router] = set(psutil.Process().children()) - before
        router.send_signal(signal.SIGKILL)
        await until_async(lambda: _told(bus, "router ready", 2), "the router is back", BOOT_DEADLINE_S)
        assert await _told(bus, "router ended", 1)
        assert await answers("127.0.0.1", port)
    assert not await answers("127.0.0.1", port)


async def test_flags_that_the_router_does_not_know_end_the_room(redis_url: str, run_name: str, tmp_path: Path) -> None:
    spec = RouterSpec(port=free_port(), prometheus_port=1, args={"polcy": "random"})
    refused = asyncio.Event()

    async def body(context: Context, given: RouterSpec) -> None:
        with pytest.raises(Refused, match=r"sglang-router refuses its flags: .*polcy"):
            await run(context, given)
        refused.set()

    async with open_bus(redis_url, run_name) as bus, running(bus, "router", body, spec, run_dir=str(tmp_path)):
        await asyncio.wait_for(refused.wait(), 20.0)


async def _told(bus: Bus, kind: str, times: int) -> bool:
    events = [m for m in await messages(bus, EVENTS) if isinstance(m, Event) and m.kind == kind]
    return len(events) >= times


async def test_an_engine_is_out_while_it_is_aside_for_the_trainer(
    router: RealRouter, redis_url: str, run_name: str, tmp_path: Path, models: Callable[[str], tuple[Path, Path]]
) -> None:
    client = RouterClient(router.url, deadline_s=10.0)
    first, second = models("qwen3")
    async with sharing(redis_url, run_name, first, tmp_path, router_url=router.url) as (bus, worker):

        async def listed(n: int) -> bool:
            return len([url for url, (_, healthy) in (await client.workers()).items() if healthy]) == n

        for turn, comes in ((2, None), (3, second)):  # back with the version it had; with the next one
            await until_async(lambda: listed(1), "the router uses it")
            await tell(bus, "trainer", turn)
            await until(lambda turn=turn: released(bus, turn))
            assert await client.workers() == {}, "the router would find it at rest, and hold it for dead"
            if comes is not None:
                await bus.append([Out(ACTIVE, order(2, comes))])
            await tell(bus, "engines", turn, publishes=comes is not None)
        await until(lambda: told(bus, "activated", 2))
        await until_async(lambda: listed(1), "the router uses it again")
        assert worker._link.routed
        assert await events(bus, "router") == [], "there is nothing to warn of"
    await client.close()


async def test_a_drained_worker_takes_its_engine_out(router: RealRouter, routed: list[RoutedEngine], engines: list[str]) -> None:
    client = RouterClient(router.url, deadline_s=10.0)
    await routed[1].leave()
    await until_async(lambda: _listed(client, {engines[0]}), "the engine is out")
    assert await served_by(routed[0], "rest", key="any") == "1"
    await client.close()
