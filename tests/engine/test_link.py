"""A worker's bond with its engine: what it serves is certain, and no request meets weights that change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from actors.generation.engine import EngineUnavailable, RequestRefused
from actors.generation.link import EngineLink, State
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from bus import Bus
from bus.messages.active import Activate
from bus.messages.control import Event
from bus.messages.policy import WeightManifest
from bus.messages.samples import RolloutDone
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, EVENTS, PROMPTS, ROLLOUTS
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.scripted import ScriptedEngine, sample, workers


def order(number: int, path: str = "", checksum: str = "") -> Activate:
    manifest = WeightManifest(path=path or f"scripted-{number}", checksum=checksum)
    return Activate(version=PolicyVersion(number, number - 1), manifest=manifest)


class Loads(ScriptedEngine):
    """Tells which files it loaded, and how often it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.closed = 0

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        self.loads.append(path)
        await super().update_weights_from_disk(path, version)

    async def close(self) -> None:
        self.closed += 1


Case = Callable[[EngineLink, Loads, Context], Awaitable[None]]


async def linked(
    redis_url: str, run_name: str, case: Case, *, engine: Loads | None = None, kind: type[EngineLink] = EngineLink
) -> list[Event]:
    """The case in a worker's place, on an engine that has joined; what was told."""
    engine, over = engine or Loads(), asyncio.Event()

    async def body(context: Context, given: None) -> None:
        try:
            link = kind(context, GenerationSpec(), lambda url, inside: engine)
            await link.boot()
            await case(link, engine, context)
        finally:
            over.set()

    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "w0", body, None):
            await asyncio.wait_for(over.wait(), 10.0)
        return await told(bus)


async def told(bus: Bus) -> list[Event]:
    return [m for m in await messages(bus, EVENTS) if isinstance(m, Event)]


async def is_open(link: EngineLink) -> bool:
    try:
        await asyncio.wait_for(link.until_open(), 0.01)
    except TimeoutError:
        return False
    return True


async def test_while_weights_load_nothing_is_served_and_no_request_is_sent(redis_url: str, run_name: str) -> None:
    async def case(link: EngineLink, engine: Loads, context: Context) -> None:
        assert (link.state, link.serving) == (State.READY, None)
        for number in (1, 2):
            engine.gate.clear()
            loading = asyncio.create_task(link.activate(order(number)))
            while link.state is not State.LOADING or len(engine.loads) < number:  # noqa: ASYNC110 - the test looks again
                await asyncio.sleep(0)
            assert link.serving is None and not await is_open(link)
            assert link.salt == ("" if number == 1 else "1"), "keys and values of the old weights are not shared with the new"
            engine.gate.set()
            await loading
            assert (link.state, link.serving, link.salt) == (
                State.SERVING,
                PolicyVersion(number, number - 1),
                str(number),
            )
            assert await is_open(link) and context.version == number

    events = await linked(redis_url, run_name, case)
    assert [e.data["version"] for e in events if e.kind == "activated"] == [1, 2]


async def test_the_files_that_it_holds_are_a_new_version_without_a_load(redis_url: str, run_name: str) -> None:
    async def case(link: EngineLink, engine: Loads, context: Context) -> None:
        await link.activate(order(1, "same"))
        assert link.has(order(1, "same")) and not link.has(order(2, "same")) and not link.has(order(1, "other"))
        await link.activate(order(2, "same"))
        await link.activate(order(3, "other"))
        await link.activate(order(4, "same"))
        assert engine.loads == ["same", "other", "same"] and engine.version == "4"
        assert {label: v.id for label, v in link.versions.items()} == {"1": 1, "2": 2, "3": 3, "4": 4}

    await linked(redis_url, run_name, case)


@pytest.mark.parametrize("there", [True, False])
async def test_files_that_are_not_what_they_should_be_are_refused_and_the_old_weights_serve_on(
    redis_url: str, run_name: str, tmp_path: Path, there: bool
) -> None:
    if there:
        (tmp_path / "model.safetensors").write_bytes(b"other")

    async def case(link: EngineLink, engine: Loads, context: Context) -> None:
        await link.activate(order(1))
        bad = order(2, str(tmp_path), "0123")
        await link.activate(bad)
        assert (link.state, link.serving, engine.version) == (State.SERVING, PolicyVersion(1, 0), "1")
        assert await is_open(link) and not link.has(bad), "the same order may come again"

    [refused] = [e for e in await linked(redis_url, run_name, case) if e.kind == "weights refused"]
    assert refused.data == {"version": 2, "path": str(tmp_path)}


async def test_a_version_that_was_fetched_and_is_refused_is_told_as_refused_until_one_is_taken(
    redis_url: str, run_name: str
) -> None:
    """The engine that starts anew because of it takes no cause away."""

    class Other(Loads):
        async def update_weights_from_disk(self, path: str, version: str) -> None:
            if path == "scripted-1":
                raise RequestRefused("embed_tokens has shape (20, 32), the model has (20, 64)")
            await super().update_weights_from_disk(path, version)

    class Here(EngineLink):
        async def _fetch(self, order: Activate, given_up: Callable[[], bool]) -> WeightManifest:
            self.enter(State.WAITING)
            return order.manifest

    async def case(link: EngineLink, engine: Loads, context: Context) -> None:
        first = order(1)
        way = msgspec.structs.replace(first.manifest, transport="network")
        with pytest.raises(RequestRefused) as refused:
            await link.activate(msgspec.structs.replace(first, manifest=way))
        await link.fail(refused.value)
        await link.boot()
        assert "the model has (20, 64)" in context.note
        await link.activate(order(2))
        assert "64" not in context.note

    kinds = [e.kind for e in await linked(redis_url, run_name, case, engine=Other(), kind=Here)]
    assert "weights refused" in kinds and "transport failed" not in kinds, "it counts against this worker"


async def test_the_failure_of_an_engine_that_was_replaced_changes_nothing(redis_url: str, run_name: str) -> None:
    async def case(link: EngineLink, engine: Loads, context: Context) -> None:
        await link.activate(order(1))
        await link.fail(EngineUnavailable("late news"), of=Loads())
        assert link.serving is not None and not link.absent and engine.closed == 0
        await link.fail(EngineUnavailable("it is gone"), of=engine)
        assert (link.state, link.serving, context.version) == (State.BROKEN, None, -1) and link.absent and engine.closed == 1
        assert await is_open(link), "who waits for it looks again, and finds it broken"
        await link.fail(EngineUnavailable("once more"))
        await link.boot()
        assert (link.state, link.absent) == (State.READY, False)
        await link.activate(order(1))
        assert link.serving is not None and len(engine.loads) == 2, "a new engine has no weights, whatever the order"

    events = await linked(redis_url, run_name, case)
    assert [e.text for e in events if e.kind == "engine stalled"] == ["it is gone"]


async def test_no_lease_without_a_version_during_an_order_or_on_an_engine_that_is_gone(redis_url: str, run_name: str) -> None:
    engine = Loads()
    async with open_bus(redis_url, run_name) as bus, workers(bus, [engine]) as ([worker], [context]):
        leases, link, slots = worker._leases, worker._link, 8
        assert leases.free() == 0, "no version yet"
        link.enter(State.SERVING)
        link.serving = PolicyVersion(1, 0)
        assert leases.free() == slots
        worker._order = order(2)
        assert leases.free() == 0, "an order waits"
        worker._order = None
        link.state = State.BROKEN
        assert leases.free() == 0, "the engine is to be booted again"
        link.state = State.SERVING
        link.released = ("kv_cache",)
        assert leases.free() == 0, "its memory is away"
        link.released = ()
        for taken in (3, slots, slots + 2):
            context.in_flight = taken
            assert leases.free() == max(0, slots - taken)
        context.in_flight = 0


async def test_every_sample_gives_its_slot_back(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus, workers(bus, [Loads()]) as ([worker], [context]):
        await put(bus, ACTIVE, order(1))
        await put(bus, PROMPTS, *(sample(f"g{n}", 0, tokens=2) for n in range(20)))

        async def over() -> bool:
            return await bus.length(ROLLOUTS) == 20 and context.in_flight == 0

        await until(over)
        assert all(isinstance(m, RolloutDone) for m in await messages(bus, ROLLOUTS)) and worker._leases.free() == 8
