"""A version as what changed of the one before: the same bytes in the end, or all of it comes."""

from __future__ import annotations

import asyncio
import math
import socket
from pathlib import Path
from random import Random

import pytest

from actors.generation import supply as supply_module
from actors.generation.supply import Supply
from actors.publisher.elsewhere import Elsewhere
from actors.runtime import delta as delta_module
from actors.runtime.context import Context
from actors.runtime.delta import XOR, apply_delta, make_delta
from actors.runtime.fetch import LEAST_PIECE, Damaged, pack_parcel
from bus.knobs.live import LiveKnobs
from bus.messages.active import Activate
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from bus.messages.weights import Parcel
from tests.actors.house import open_bus
from tests.actors.parcels import SIZE, Serve, fetching, same
from tests.declared import actor_of


@pytest.fixture(autouse=True)
def large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "LEAST_BYTES", SIZE)


def stepped(folder: Path, to: Path, share: float) -> Path:
    """The version after that in `folder`: so many of its bytes have another last bit."""
    to.mkdir()
    body, chance = bytearray((folder / "model.safetensors").read_bytes()), Random(2)
    for i in range(len(body)):
        body[i] ^= chance.random() < share
    (to / "model.safetensors").write_bytes(body)
    for name in ("config.json", "empty.txt"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def test_what_changed_is_small_and_makes_the_same_version(version: Path, tmp_path: Path) -> None:
    new = stepped(version, tmp_path / "v2", 0.01)
    parcel = pack_parcel(new)
    delta = make_delta(version, new, parcel, fetch_s=math.inf)
    assert delta is not None and delta.n_bytes < 0.1 * parcel.n_bytes and pack_parcel(new) == parcel
    made = tmp_path / "made"
    made.mkdir()
    (made / f"model.safetensors{XOR}").write_bytes((new / f"model.safetensors{XOR}").read_bytes())
    apply_delta(version, made, parcel, delta)
    assert (made / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("share", "fetch_s"), [(0.5, math.inf), (0.01, 0.0)], ids=["too much changed", "a quick link"])
def test_nothing_is_made_where_it_does_not_pay(version: Path, tmp_path: Path, share: float, fetch_s: float) -> None:
    new = stepped(version, tmp_path / "v2", share)
    (new / "model.safetensors").write_bytes(Random(3).randbytes(SIZE) if share > 0.1 else (new / "model.safetensors").read_bytes())
    assert make_delta(version, new, pack_parcel(new), fetch_s=fetch_s) is None
    assert not list(new.glob(f"*{XOR}"))


def test_nothing_is_made_of_a_small_version(version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "LEAST_BYTES", SIZE + 1)
    new = stepped(version, tmp_path / "v2", 0.01)
    assert make_delta(version, new, pack_parcel(new), fetch_s=math.inf) is None


def test_nothing_is_made_of_a_file_of_another_size(version: Path, tmp_path: Path) -> None:
    new = stepped(version, tmp_path / "v2", 0.0)
    (version / "model.safetensors").write_bytes(b"0" * LEAST_PIECE)
    assert make_delta(version, new, pack_parcel(new), fetch_s=math.inf) is None


@pytest.mark.parametrize("what", ["another base", "damaged", "cut"])
def test_what_does_not_make_the_version_is_told(version: Path, tmp_path: Path, what: str) -> None:
    new = stepped(version, tmp_path / "v2", 0.01)
    parcel = pack_parcel(new)
    delta = make_delta(version, new, parcel, fetch_s=math.inf)
    changes = new / f"model.safetensors{XOR}"
    if what == "another base":
        (version / "model.safetensors").write_bytes(Random(4).randbytes(SIZE))
    else:
        body = bytearray(changes.read_bytes())
        body[20] ^= 255
        changes.write_bytes(body if what == "damaged" else body[:-5])
    (new / "model.safetensors").unlink()
    assert delta is not None
    with pytest.raises(Damaged):
        apply_delta(version, new, parcel, delta)
    assert not (new / "model.safetensors").exists()


def order_of(number: int, parcel: Parcel, *sources: str, delta: Parcel | None = None, base: str = "") -> Activate:
    manifest = WeightManifest(transport="network", path="", checksum="", n_tensors=1, n_bytes=parcel.n_bytes)
    return Activate(
        version=PolicyVersion(number, number), manifest=manifest, parcel=parcel, sources=sources, delta=delta, base=base
    )


@pytest.mark.parametrize("what", ["it has the base", "it has not", "the base is damaged", "the changes are gone"])
async def test_a_host_fetches_what_changed_or_else_all(
    version: Path, serve: Serve, tmp_path: Path, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(supply_module, "SHARED", tmp_path / "shm")
    new = stepped(version, tmp_path / "v2", 0.01)
    old, parcel = pack_parcel(version), pack_parcel(new)
    delta = make_delta(version, new, parcel, fetch_s=math.inf)
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        supply = Supply(context, token="secret", serves=True, address="127.0.0.1", deadline_s=5.0)
        supply.open()
        first = order_of(1, old, serve(version).url)
        second = order_of(2, parcel, serve(new).url, delta=delta, base=old.id)
        if what != "it has not":
            base = await supply.bring(first)
            assert supply.fetched["fetched"] == old.n_bytes
            if what == "the base is damaged":
                (base / "model.safetensors").write_bytes(bytes(SIZE))
        if what == "the changes are gone":
            (new / f"model.safetensors{XOR}").unlink()
        here = await supply.bring(second)
        assert all((here / p.name).read_bytes() == p.read_bytes() for p in new.iterdir() if p.suffix != XOR)
        assert not list(here.glob("*.part")) or what == "the changes are gone"
        assert (supply.fetched["fetched"] < 0.1 * parcel.n_bytes) == (what == "it has the base")
        failed = what in ("the base is damaged", "the changes are gone")
        assert context.counters.get("deltas_failed", 0) == failed
        if what == "it has the base":
            passed_on, _ = fetching(delta, tmp_path / "next", context.depot)
            await asyncio.to_thread(passed_on.run)
            assert same(tmp_path / "next", new), "the next host has them of this one"
        await supply.close()


async def test_a_host_that_fetches_all_says_at_once_that_it_has_not_what_changed(
    version: Path, tmp_path: Path, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(supply_module, "SHARED", tmp_path / "shm")
    new = stepped(version, tmp_path / "v2", 0.01)
    parcel = pack_parcel(new)
    delta = make_delta(version, new, parcel, fetch_s=math.inf)
    assert delta is not None
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        supply = Supply(context, token="secret", serves=True, address="127.0.0.1", deadline_s=5.0)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            order = order_of(2, parcel, f"http://127.0.0.1:{silent.getsockname()[1]}", delta=delta, base="0" * 32)
            supply.know(order)
            assert supply._find(delta.id) is not None, "it may come"
            async with asyncio.TaskGroup() as tasks:
                bringing = tasks.create_task(supply.bring(order, lambda: True))
                await asyncio.wait_for(context.news.wait(), 5.0)
                assert supply._find(delta.id) is None and supply._find(parcel.id) is not None
                bringing.cancel()
                silent.close()
                supply.stop()
        await supply.close()


async def test_what_changed_is_made_once_a_whole_version_came_slowly(
    version: Path, tmp_path: Path, redis_url: str, run_name: str
) -> None:
    folders = [version, stepped(version, tmp_path / "v2", 0.01), stepped(version, tmp_path / "v3", 0.02)]
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="p", role="publisher", bus=bus.config), bus, LiveKnobs(bus))
        elsewhere = Elsewhere(context, token="t", address="", ours=str(tmp_path))
        packed = [await elsewhere.parcel(WeightManifest(path=str(folder))) for folder in folders[:2]]
        assert packed[0] is not None and packed[1] is not None and packed[1].delta is None, "nobody has told how long it takes"
        elsewhere.heard(packed[1].parcel.n_bytes, 600.0)
        elsewhere.heard(10, 1e-12)  # of changes: no measure
        third = await elsewhere.parcel(WeightManifest(path=str(folders[2])))
        assert third is not None and third.delta is not None and third.base == packed[1].parcel.id
        assert elsewhere._find(third.delta.id) == folders[2]
        await elsewhere.close()
