"""The publisher room: a version is ordered until it is served, in waves if asked to, and who is late says why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.publisher import members as members_module
from actors.publisher.actor import PublisherSpec, run
from actors.publisher.plan import next_wave, worth_saying
from actors.runtime.fetch import Fetch, pack_parcel
from bus import Bus
from bus.messages.active import Activate, PolicyActive, Send
from bus.messages.control import Event, Vitals
from bus.messages.policy import PolicyAnnounced, Restored, StepDone, WeightManifest, WeightsReady
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.plans import version_dir
from bus.topology import ACTIVE, EVENTS, POLICY
from tests.actors.house import messages, open_bus, put, running, until


@asynccontextmanager
async def publishing(bus: Bus, **spec: Any) -> AsyncIterator[None]:
    """A publisher that listens already: what was said before it came it would read elsewhere."""
    async with running(bus, "publisher", run, PublisherSpec(worker_timeout_s=600.0, **spec)) as context:

        async def listens() -> bool:
            return bool(context.vitals().waits_for)

        await until(listens)
        yield


async def orders(bus: Bus, at_least: int) -> list[Activate]:
    """All orders, once there are so many."""
    found = [m for m in await messages(bus, ACTIVE) if isinstance(m, Activate)]
    return found if len(found) >= at_least else []


async def told(bus: Bus, kind: str = "activation late", part: str = "") -> list[str]:
    """Texts of such events with this part."""
    return [m.text for m in await messages(bus, EVENTS) if isinstance(m, Event) and m.kind == kind and part in m.text]


async def served(bus: Bus, serving: dict[str, int]) -> list[Any]:
    return [m for m in await messages(bus, ACTIVE) if isinstance(m, PolicyActive) and m.serving == serving]


def says(name: str, version: int = -1, waits_for: str = "") -> Vitals:
    """Signs of life."""
    wall = time.time()
    return Vitals(actor=name, role="generation", pid=1, host="h", state="running", wall=wall, version=version, waits_for=waits_for)


def activated(name: str, version: int) -> Event:
    return Event(actor=name, kind="activated", text="", wall=time.time(), data={"version": version})


def announced(version: int, directory: Path) -> PolicyAnnounced:
    manifest = WeightManifest(path=str(directory))
    return PolicyAnnounced(version=PolicyVersion(version, version - 1), manifest=manifest)


@pytest.mark.parametrize("skew_s", [-30.0, 30.0])
async def test_a_worker_is_ordered_whatever_its_clock_says(redis_url: str, run_name: str, tmp_path: Path, skew_s: float) -> None:
    async with open_bus(redis_url, run_name) as bus:
        off = msgspec.structs.replace(says("w"), wall=time.time() + skew_s)
        await bus.set_vitals("w", off)  # one that was there before the publisher
        async with running(bus, "publisher", run, PublisherSpec()):
            await put(bus, POLICY, announced(1, tmp_path))
            await put(bus, EVENTS, msgspec.structs.replace(off, actor="x"))
            await until(lambda: both(bus))


async def both(bus: Bus) -> bool:
    return {name for order in await orders(bus, 1) for name in order.workers} == {"w", "x"}


@pytest.mark.parametrize(
    ("waits_for", "why"),
    [("activation of version 1", "it waits for activation of version 1"), ("", "it does not say why")],
)
async def test_a_worker_that_is_late_is_told_with_its_reason_and_ordered_again(
    redis_url: str, run_name: str, tmp_path: Path, waits_for: str, why: str
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus, activation_deadline_s=0.2):
            await put(bus, POLICY, announced(1, tmp_path))
            await put(bus, EVENTS, says("w", waits_for=waits_for))
            found = await until(lambda: orders(bus, 2))
            assert {(o.version.id, o.workers, o.manifest.transport) for o in found} == {(1, ("w",), "disk")}
            assert (await told(bus))[0] == f"w has not served version 1 within 0.2 s: {why}; ordered again, in files"
            await put(bus, EVENTS, activated("w", 1))
            await until(lambda: served(bus, {"w": 1}))


async def test_the_deadline_of_an_activation_begins_when_the_engine_is_there(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus, activation_deadline_s=0.2):
            await put(bus, POLICY, announced(1, tmp_path))
            await put(bus, EVENTS, says("w", waits_for=Wait.BOOTING))
            await until(lambda: orders(bus, 1))
            for _ in range(6):  # several deadlines long
                await asyncio.sleep(0.2)
                await put(bus, EVENTS, says("w", waits_for=Wait.BOOTING))
            assert len(await orders(bus, 1)) == 1 and not await told(bus)
            await put(bus, EVENTS, says("w", waits_for="activation"))
            await until(lambda: told(bus))


# -- other hosts ---------------------------------------------------------------------------------------------------


async def test_who_sees_another_memory_is_told_where_to_fetch_the_files_host_by_host(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    far = [msgspec.structs.replace(says(n), memory=f"m{n[0]}", depot=f"http://{n}:1") for n in ("b0", "b1", "c0")]
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus, activation_deadline_s=0.4, weights_token="t"):
            await put(bus, EVENTS, says("near"), *far)
            await put(bus, POLICY, announced(1, tmp_path))
            near, *others = await until(lambda: orders(bus, 3))
            assert (near.workers, near.manifest.path, near.parcel) == (("near",), str(tmp_path), None)
            assert [(o.workers, o.manifest.transport, o.manifest.path) for o in others] == [
                (("b0", "b1"), "network", ""),
                (("c0",), "network", ""),
            ]
            root = others[0].sources[0]
            assert others[1].sources == ("http://b0:1", root), "the next host of the chain"
            assert others[0].parcel == others[1].parcel == pack_parcel(tmp_path)
            await put(bus, EVENTS, *(activated(name, 1) for name in ("near", "b0", "b1")))
            for received in range(1, 7):  # several deadlines long: it is slow, but it comes
                await asyncio.sleep(0.2)
                await put(bus, EVENTS, msgspec.structs.replace(far[2], received=received))
            assert not await told(bus)
            await until(lambda: told(bus))


async def test_a_host_finds_what_it_began_to_fetch_however_many_versions_follow(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "UNHEARD_S", 0.0)  # what it may begin with is another test's
    for number in range(1, 13):
        folder = version_dir(tmp_path, number)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(f"weights {number}".encode())
    far = [msgspec.structs.replace(says(n), memory=n, depot=f"http://{n}:1") for n in "bc"]
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus, weights_token="t", weights_dir=str(tmp_path), keep_versions=2):
            await put(bus, EVENTS, says("near"), *far)
            for number in range(1, 11):
                await put(bus, POLICY, announced(number, version_dir(tmp_path, number)))
                await until(lambda n=number: orders(bus, 3 * n))
            first = next(order for order in await orders(bus, 30) if order.parcel)
            url = first.sources[-1].replace("//:", "//127.0.0.1:")
            fetch = Fetch(first.parcel, tmp_path / "here", [url], token="t", deadline_s=10.0, came=lambda _: None)
            await asyncio.to_thread(fetch.run)
            assert (tmp_path / "here" / "model.safetensors").read_bytes() == b"weights 1"
            assert await _left(tmp_path, 1, 9, 10, 11, 12)
            await put(bus, EVENTS, activated("near", 10), activated("b", 1))
            await put(bus, EVENTS, Event(actor="c", kind="transport failed", text="", wall=time.time(), data={"version": 1}))
            await put(bus, POLICY, announced(11, version_dir(tmp_path, 11)))
            await until(lambda: _left(tmp_path, 10, 11, 12))
            await put(bus, EVENTS, activated("b", 10), activated("c", 10))  # what they had been told last
            await put(bus, POLICY, announced(12, version_dir(tmp_path, 12)))
            await until(lambda: _left(tmp_path, 11, 12))


async def test_what_hosts_may_still_be_fetching_is_given_up_before_the_trainer_has_no_room(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """A trainer that cannot write a version ends."""
    far = msgspec.structs.replace(says("b"), memory="b", takes=1)
    async with open_bus(redis_url, run_name) as bus, publishing(bus, weights_token="t", weights_dir=str(tmp_path)):
        await put(bus, EVENTS, far)
        for number, n_bytes in ((1, 10), (2, 10), (3, 1 << 60)):  # so much has no disk
            folder = version_dir(tmp_path, number)
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(f"weights {number}".encode())
            manifest = WeightManifest(path=str(folder), n_bytes=n_bytes)
            await put(bus, POLICY, PolicyAnnounced(version=PolicyVersion(number, number), manifest=manifest))
            await until(lambda n=number: orders(bus, n))
        await until(lambda: _left(tmp_path, 3))  # the newest is never deleted
        await until(lambda: told(bus, "no space for old versions", "version 1 is deleted although b may be fetching it"))


async def _left(folder: Path, *versions: int) -> bool:
    return tuple(n for n in range(1, 13) if version_dir(folder, n).exists()) == versions


async def test_damaged_files_are_written_anew_before_anybody_fetches_them(redis_url: str, run_name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus):
            await put(bus, EVENTS, msgspec.structs.replace(says("far"), memory="elsewhere"))
            bad = WeightManifest(path=str(tmp_path), checksum="00" * 16)
            await put(bus, POLICY, PolicyAnnounced(version=PolicyVersion(1, 0), manifest=bad))
            await until(lambda: asked_anew(bus))
            assert not await orders(bus, 1)


async def asked_anew(bus: Bus) -> list[Send]:
    return [m for m in await messages(bus, ACTIVE) if isinstance(m, Send) and m.transport == "disk" and m.attempt == 1]


# -- waves ---------------------------------------------------------------------------------------------------------


@given(
    serving=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(-1, 2), min_size=1),
    fraction=st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]),
    on_the_way=st.sets(st.sampled_from("abcdefgh")),
    late=st.sets(st.sampled_from("abcdefgh")),
)
def test_a_wave_leaves_its_share_of_engines_at_work(
    serving: dict[str, int], fraction: float, on_the_way: set[str], late: set[str]
) -> None:
    gone = {n for n in on_the_way if serving.get(n, 2) < 2}
    wave = next_wave(serving=serving, target=2, fraction=fraction, in_progress=gone, late=late)
    behind = {n for n, version in serving.items() if version < 2} - gone
    assert len(set(wave)) == len(wave) and set(wave) <= behind
    assert {n for n in behind if serving[n] < 0} <= set(wave), "nobody misses who serves nothing"
    allowed = len(serving) if fraction == 1.0 else max(1, int(sum(v >= 0 for v in serving.values()) * fraction))
    at_work = [n for n in wave if serving[n] >= 0]
    away = [n for n in gone if serving[n] >= 0]
    assert len(at_work) + len(away) <= max(allowed, len(away)), "no more than the share"
    assert len(at_work) == min(len([n for n in behind if serving[n] >= 0]), max(0, allowed - len(away))), "and no fewer"
    assert not any(n in late for n in at_work) or not [n for n in behind - set(wave) if n not in late], "the slow ones last"


async def test_rolling_the_others_serve_on(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus, wave_fraction=0.5):
            for name, version in (("a", 1), ("b", 1), ("c", 1), ("d", 1), ("new", -1)):
                await put(bus, EVENTS, says(name, version))
            await put(bus, POLICY, announced(2, tmp_path))
            [first] = await until(lambda: orders(bus, 1))
            assert first.workers == ("new", "a", "b")
            await put(bus, EVENTS, activated("b", 2))
            assert (await until(lambda: orders(bus, 2)))[1].workers == ("c",)


async def test_rolling_a_slow_engine_holds_nobody_back(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus, wave_fraction=0.5, activation_deadline_s=0.2):
            for name in "ab":
                await put(bus, EVENTS, says(name, 1))
            await put(bus, POLICY, announced(2, tmp_path))
            assert [o.workers for o in await until(lambda: orders(bus, 2))][:2] == [("a",), ("b",)]
            await put(bus, EVENTS, activated("b", 2))
            await until(lambda: served(bus, {"a": 1, "b": 2}))


# -- slots and the masked share ------------------------------------------------------------------------------------


async def of_step(bus: Bus, step: int) -> bool:
    return any(isinstance(m, PolicyActive) and m.masked_step == step for m in await messages(bus, ACTIVE))


def state(**slots: int) -> PolicyActive:
    return PolicyActive(version=PolicyVersion(1, 0), serving=dict.fromkeys(slots, 1), slots=slots)


def test_slots_are_said_when_they_moved_by_more_than_a_tenth() -> None:
    said = state(a=100, b=8)
    for quiet in (state(a=100, b=8), state(a=110, b=8), state(a=90, b=8)):
        assert not worth_saying(quiet, said)
    for told in (state(a=111, b=8), state(a=89, b=8), state(a=100, b=9), state(a=100), state(a=100, b=8, c=5)):
        assert worth_saying(told, said)
    assert worth_saying(said, None)


async def test_slots_that_a_worker_reports_are_said_for_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus):
            await put(bus, POLICY, announced(1, tmp_path))
            for slots in (100, 50):
                await put(bus, EVENTS, msgspec.structs.replace(says("w", 1), slots=slots))
                await until(lambda: served(bus, {"w": 1}))
                await until(lambda: of_slots(bus, {"w": slots}))  # noqa: B023 - waited for at once


async def of_slots(bus: Bus, slots: dict[str, int]) -> bool:
    return any(isinstance(m, PolicyActive) and m.slots == slots for m in await messages(bus, ACTIVE))


async def test_the_masked_share_of_a_batch_is_passed_on_once(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        async with publishing(bus):
            await put(bus, POLICY, announced(1, tmp_path))
            await put(bus, EVENTS, says("w", 1))
            await until(lambda: served(bus, {"w": 1}))
            version = PolicyVersion(1, 0)
            for step, metrics in ((1, {"rollout/masked_fraction": 0.25}), (2, {})):
                await put(bus, POLICY, StepDone(step=step, version=version, trained_on=version, groups=(), metrics=metrics))
                await until(lambda: of_step(bus, step))  # noqa: B023 - waited for at once
            said = [(m.masked_step, m.masked_fraction) for m in await served(bus, {"w": 1})]
    assert said == [(-1, 0.0), (1, 0.25), (2, 0.0)]


# -- what is said, and what is kept ----------------------------------------------------------------------------------------


async def newest_said(bus: Bus, serving: dict[str, int]) -> PolicyVersion:
    """The version said to be active once these serve."""
    return (await until(lambda: served(bus, serving)))[-1].version


async def test_the_active_version_does_not_fall_when_its_engines_go_one_by_one(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with open_bus(redis_url, run_name) as bus, publishing(bus):
        await put(bus, POLICY, announced(1, tmp_path), announced(2, tmp_path))
        await put(bus, EVENTS, says("a", 2), says("b", 1))
        assert (await newest_said(bus, {"a": 2, "b": 1})).id == 2
        await put(bus, EVENTS, msgspec.structs.replace(says("a", 2), state="stopped"))
        assert (await newest_said(bus, {"b": 1})).id == 2, "samples issued for it would be born stale otherwise"
        await put(bus, EVENTS, msgspec.structs.replace(says("b", 1), state="stopped"))
        assert (await newest_said(bus, {})).id == 2, "who looks at the run would be told that b serves"


async def test_versions_of_a_lost_future_are_active_no_more(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus, publishing(bus):
        await put(bus, POLICY, *(announced(n, tmp_path) for n in (1, 2, 3)))
        await put(bus, EVENTS, says("a", 3), says("b", 1))
        assert (await newest_said(bus, {"a": 3, "b": 1})).id == 3
        back = PolicyVersion(4, 1)
        await put(bus, EVENTS, says("c", 2))
        manifest = WeightManifest(path=str(tmp_path))
        await put(bus, POLICY, Restored(step=1, version=back), PolicyAnnounced(version=back, manifest=manifest))

        async def said() -> bool:
            return (await newest_said(bus, {"a": 3, "b": 1, "c": 2})).id == 2

        await until(said)
        found = await until(lambda: orders(bus, 1))
        assert found[-1].version == back and set(found[-1].workers) == {"a", "b", "c"}, "none serves the future that is left"


async def test_weights_of_the_run_are_deleted_when_nobody_needs_them_and_those_of_a_user_never(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    ours, users = tmp_path / "weights", tmp_path / "checkpoint"
    users.mkdir()
    for number in range(2, 7):
        version_dir(ours, number).mkdir(parents=True)
    async with open_bus(redis_url, run_name) as bus, publishing(bus, weights_dir=str(ours), keep_versions=2):
        await put(bus, EVENTS, says("a", 3))
        await put(bus, POLICY, announced(1, users), *(announced(n, version_dir(ours, n)) for n in range(2, 7)))

        async def swept() -> bool:
            return not version_dir(ours, 4).exists()

        await until(swept)
        left = [number for number in range(2, 7) if version_dir(ours, number).exists()]
        assert left == [5, 6] and users.exists(), "one that is served is loaded by nobody any more"
        await put(bus, EVENTS, says("b", 3))
        await until(lambda: served(bus, {"a": 3, "b": 3}))


async def test_a_version_that_the_trainer_sends_goes_to_all_together(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus, publishing(bus, wave_fraction=0.5):
        await put(bus, EVENTS, says("a", 1), says("b", 1), activated("a", 1), activated("b", 1), says("new", -1))
        manifest = WeightManifest(transport="nccl", host="h")
        await put(bus, POLICY, PolicyAnnounced(version=PolicyVersion(2, 1), manifest=manifest))

        async def sends() -> list[Send]:
            return [m for m in await messages(bus, ACTIVE) if isinstance(m, Send)]

        async def both() -> list[Send]:
            return found if len(found := await sends()) == 2 else []

        sent, files = await until(both)
        assert (sent.transport, sorted(seat.worker for seat in sent.seats)) == ("nccl", ["a", "b"])
        assert files.transport == "disk", "for the one that is new"
        await put(bus, POLICY, WeightsReady(version=PolicyVersion(2, 1), manifest=manifest))
        [order] = await until(lambda: orders(bus, 1))
        assert (order.workers, order.manifest.transport) == (("a", "b"), "nccl")
