"""Versions on a worker's host: fetched for all of its workers, kept while one is at them, and gone afterwards."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

from actors.generation import supply as supply_module
from actors.generation.supply import Supply
from actors.runtime import depot as depot_module
from actors.runtime.context import Context
from actors.runtime.fetch import FetchFailed, pack_parcel
from actors.runtime.run import _heartbeat
from bus.knobs.live import LiveKnobs
from bus.messages.active import Activate
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from tests.actors.house import open_bus, until
from tests.actors.parcels import Serve, fetching, same
from tests.declared import actor_of


async def test_a_relay_says_at_once_that_a_version_will_not_come_to_it_any_more(
    version: Path, tmp_path: Path, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was away goes on with the order that it had: what it waits for there keeps it from the newest one."""
    monkeypatch.setattr(depot_module, "PATIENCE_S", 3600.0)  # as long as for one that is on its way
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        supply = Supply(context, token="secret", serves=True, address="127.0.0.1", deadline_s=5.0)
        supply.open()
        parcels = [msgspec.structs.replace(pack_parcel(version), id=f"{n:032x}") for n in (1, 2)]
        for n, parcel in enumerate(parcels, start=1):
            manifest = WeightManifest(transport="network", path="", checksum="", n_tensors=1, n_bytes=1)
            supply.know(Activate(version=PolicyVersion(id=n, step=n), manifest=manifest, mode="retract", parcel=parcel))
        try:
            old, _ = fetching(parcels[0], tmp_path / "here", context.depot, deadline_s=0.0)
            with pytest.raises(FetchFailed, match="does not have it"):
                await asyncio.to_thread(old.run)
            assert supply._find(parcels[1].id) is not None, "the newest is waited for"
            assert supply._find("f" * 32) is not None, "as is one that nobody told of yet"
        finally:
            await supply.close()


async def test_a_host_says_at_once_which_version_it_fetches(
    version: Path, serve: Serve, tmp_path: Path, redis_url: str, run_name: str
) -> None:
    """Its files are kept for it: the publisher cannot know which of its orders it heard when it had time for the next."""
    parcel = pack_parcel(version)
    manifest = WeightManifest(transport="network", path="", checksum="", n_tensors=1, n_bytes=parcel.n_bytes)
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        supply = Supply(context, token="secret", serves=False, address="", deadline_s=5.0)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            sources = (f"http://127.0.0.1:{silent.getsockname()[1]}", serve(version).url)
            order = Activate(version=PolicyVersion(7, 6), manifest=manifest, parcel=parcel, sources=sources)
            async with asyncio.TaskGroup() as tasks:
                bringing = tasks.create_task(supply.bring(order))
                await asyncio.wait_for(context.news.wait(), 5.0)
                assert context.vitals().takes == 7
                silent.close()
        assert same(version, bringing.result()) and context.vitals().takes == -1
        await supply.close()


def order_of(folder: Path, number: int, *sources: str) -> Activate:
    parcel = msgspec.structs.replace(pack_parcel(folder), id=f"{number:032x}")
    manifest = WeightManifest(transport="network", path="", checksum="", n_tensors=1, n_bytes=parcel.n_bytes)
    return Activate(version=PolicyVersion(number, number), manifest=manifest, parcel=parcel, sources=sources)


async def test_a_version_stays_while_a_worker_of_the_host_is_at_it_however_many_its_peers_fetch(
    version: Path, serve: Serve, tmp_path: Path, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply_module, "SHARED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    source = serve(version).url
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        slow, quick = (Supply(context, token="secret", serves=False, address="", deadline_s=5.0) for _ in range(2))
        first = await slow.bring(order_of(version, 1, source))
        for number in range(2, 6):
            await quick.bring(order_of(version, number, source))
        assert same(version, first), "its engine may still be loading it"
        await slow.bring(order_of(version, 6, source))
        await quick.bring(order_of(version, 7, source))
        left = {int(p.name, 16) for p in first.parent.iterdir() if p.is_dir()}
        assert left == {6, 7}, "one at hand for each, and one for the next host"
        await slow.close()
        assert first.parent.is_dir()
        await quick.close()
        assert not first.parent.exists()


async def test_what_a_host_fetches_is_told_at_once(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        spec = msgspec.structs.replace(actor_of(name="c", role="generation", bus=bus.config), heartbeat_s=3600.0)
        context, over = Context(spec, bus, LiveKnobs(bus)), asyncio.Event()

        async def takes(version: int) -> bool:
            told = (await bus.vitals()).get("c")
            return told is not None and told.takes == version

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_heartbeat(context, over, context.draining.set))
            await until(lambda: takes(-1))
            context.takes = 7
            context.news.set()
            await until(lambda: takes(7))
            over.set()
            context.news.set()
