"""Published files that are damaged or gone: publisher, the trainer's courier, worker and engine on a real bus. They are written
anew until they can be loaded, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from actors.generation.spec import GenerationSpec
from actors.publisher.actor import Publisher, PublisherSpec
from actors.publisher.plan import TRIES
from actors.runtime.context import Context
from actors.runtime.run import RunEnds
from actors.trainer.backends import NoTraining
from actors.trainer.courier import Courier
from actors.trainer.spec import CourierSpec
from actors.trainer.transports import files
from actors.trainer.transports.files import VersionWriter
from actors.trainer.transports.flat import NamedTensors, bucketed
from bus import Bus
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from bus.plans import version_dir
from tests.actors.house import open_bus, running, until
from tests.engine.workers import at_work, events, told

Models = Callable[[str], tuple[Path, Path]]
V1, V2 = PolicyVersion(id=1, step=0), PolicyVersion(id=2, step=1, parent=1)
PLAIN = CourierSpec()
PASSING = CourierSpec(transport="nccl", copy=False, buffer_bytes=20_000, check_equal=True)
pytestmark = pytest.mark.timeout(120)


class Weights(NoTraining):
    """A backend that publishes one model and has nothing to train. `beside` gives the small files of each writing."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def export(self, limit_bytes: int) -> Iterator[NamedTensors]:
        return bucketed(load_file(self._model / "model.safetensors").items(), limit_bytes)

    def beside(self) -> dict[str, bytes]:
        return {"config.json": (self._model / "config.json").read_bytes()}


def flip(directory: Path) -> None:
    """Two bytes of the last tensor."""
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    data[-1] ^= 128
    file.write_bytes(data)


def drop(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def drop_all(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


@asynccontextmanager
async def published(
    bus: Bus, folder: Path, backend: Weights, spec: CourierSpec = PLAIN, *, moves_on: bool = False
) -> AsyncIterator[Courier]:
    """The trainer's part, once version 1 is announced. `moves_on`: the next step has begun by then, and a copy was kept."""
    announced, made = asyncio.Event(), list[Courier]()

    async def in_thread(call: Any, *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    async def body(context: Context, _: None) -> None:
        courier = Courier(context, spec, backend, in_thread, folder)
        made.append(courier)
        async with asyncio.TaskGroup() as tasks:
            await courier.open()
            tasks.create_task(courier.follow())
            await courier.publish(tasks, V1)
            await courier.wait()
            if moves_on:
                await courier.let_go()
                backend.export = None  # type: ignore[assignment,method-assign] # nobody may ask for them now
            context.version = V1.id
            announced.set()
            while not context.draining.is_set():
                await context.beat()
                await context.clock.sleep(0.2)
            courier.stop()
        courier.close()

    async with running(bus, "trainer", body, None):
        await asyncio.wait_for(announced.wait(), 40.0)
        yield made[0]


@asynccontextmanager
async def publishing(bus: Bus, folder: Path, ended: list[RunEnds]) -> AsyncIterator[None]:
    async def body(context: Context, spec: PublisherSpec) -> None:
        try:
            await Publisher(context, spec).run()
        except* RunEnds as group:
            ended.extend(error for error in group.exceptions if isinstance(error, RunEnds))

    async with running(bus, "publisher", body, PublisherSpec(weights_dir=str(folder), worker_timeout_s=600.0)):
        yield


@pytest.mark.parametrize(
    ("damage", "refused", "moves_on"), [(flip, 1, False), (drop, 1, True), (drop_all, 0, False)], ids=["flip", "drop", "drop_all"]
)
async def test_the_trainer_writes_the_version_anew_and_it_is_served(
    damage: Callable[[Path], None], refused: int, moves_on: bool, redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    model, _ = models("qwen3")
    folder, ended = tmp_path / "weights", list[RunEnds]()
    spec = GenerationSpec(model_path=str(model))
    kept = CourierSpec(keep_copy=moves_on)
    async with open_bus(redis_url, run_name) as first, published(first, folder, Weights(model), kept, moves_on=moves_on):
        damage(version_dir(folder, 1))
        async with (
            publishing(first, folder, ended),
            at_work(redis_url, run_name, spec, run_dir=str(tmp_path / "run")) as (bus, worker),
        ):
            await until(lambda: told(bus, "activated", 1), deadline_s=60)
            assert worker._link.serving == V1 and not ended
            assert await told(bus, "weights refused", refused) and await told(bus, "files anew", 1)


async def test_files_that_are_damaged_each_time_end_the_run_with_the_reason(
    redis_url: str, run_name: str, tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaging(VersionWriter):
        def finish(self) -> WeightManifest:
            manifest = super().finish()
            flip(Path(manifest.path))
            return manifest

    monkeypatch.setattr(files, "VersionWriter", Damaging)
    model, _ = models("qwen3")
    folder, ended = tmp_path / "weights", list[RunEnds]()
    spec = GenerationSpec(model_path=str(model))
    async with (
        at_work(redis_url, run_name, spec, run_dir=str(tmp_path / "run")) as (bus, _),
        published(bus, folder, Weights(model)),
        publishing(bus, folder, ended),
    ):

        async def over() -> bool:
            return bool(ended)

        await until(over, deadline_s=60)
        assert len(await events(bus, "weights refused")) == TRIES + 1 and await told(bus, "files anew", TRIES)
    assert f"no engine can load version 1, whose files were written anew {TRIES} times" in str(ended[0])
    assert "do not match their checksum" in str(ended[0])


async def test_without_a_copy_the_weights_wait_until_engines_have_them(
    redis_url: str, run_name: str, tmp_path: Path, models: Models
) -> None:
    """The first version comes to an engine in files, the next by a broadcast."""
    model, _ = models("qwen3")
    folder, spec, backend = tmp_path / "weights", GenerationSpec(model_path=str(model), check_equal=True), Weights(model)
    async with (
        at_work(redis_url, run_name, spec, run_dir=str(tmp_path / "run")) as (bus, worker),
        publishing(bus, folder, []),
        published(bus, folder, backend, PASSING) as courier,
    ):
        await until(lambda: told(bus, "activated", 1), deadline_s=60)
        async with asyncio.TaskGroup() as tasks:
            await courier.let_go()
            await courier.publish(tasks, V2)
            await courier.let_go()
            backend.export = None  # type: ignore[assignment,method-assign] # they are others from here on
        await until(lambda: told(bus, "activated", 2), deadline_s=60)
        event = (await events(bus, "activated"))[-1]
        assert (event.data["transport"], worker._link.serving) == ("nccl", V2) and event.data["compared"] > 5
        assert not await events(bus, "transfer failed")
