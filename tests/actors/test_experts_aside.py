"""Experts of large models' tokens (R3) go beside the stream: written once, read once by the trainer, gone when nothing names them;
one that is lost costs its sample the replay, and is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.partial.actor import PartialSpec
from actors.partial.actor import run as run_partial
from actors.trainer.convert import to_samples
from actors.trainer.training.routes import Routes, RouteShape
from bus import Bus, Commit, Out, Reader
from bus.asides import put_aside, response_aside, response_whole
from bus.dead import drop, letter_of, read_letters
from bus.messages.groups import GroupKept
from bus.messages.samples import Episode, Parked, RolloutDone, Routed, Scored, Strand
from bus.sweep import sweep_orphans
from bus.topology import DEAD, GROUPS, PARKED, PREFIXES, ROLLOUTS, SCORED, Stream
from tests.actors.house import open_bus, running, until
from tests.actors.test_trainer_parts import SPLIT, TOKENS, arrive, member, trainer_of

SHAPE = RouteShape(layers=4096, top_k=8, experts=128)  # as many bytes for few tokens as a large model has for many
ROW, READ = SHAPE.layers * SHAPE.top_k, 3 + TOKENS - 1  # bytes a token; tokens of prompt and response but the last


def table(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, SHAPE.experts, (READ, ROW), np.uint8)


def made(index: int) -> RolloutDone:
    """A rollout of group 1 as a worker has it; that of index 2 has a second trajectory."""
    rollout = member(1, index).rollout
    found = Routed(data=memoryview(table(index).tobytes()), n=READ)
    response = msgspec.structs.replace(rollout.response, experts=found)
    episode = Episode(earlier=(Strand(rollout.task.prompt_tokens, response),)) if index == 2 else rollout.episode
    return msgspec.structs.replace(rollout, response=response, episode=episode)


async def blobs(bus: Bus) -> set[str]:
    return {ref for ref, _ in await bus.blobs.list_ids()}


async def one_on(bus: Bus, stream: Stream, n: int = 1) -> list[Any]:
    """The stream's next entries, taken by its readers."""
    reader = Reader(bus, [stream], stream.readers[0], "a")
    try:
        return [entry for _ in range(n) for entry in await reader.read(1, 1.0)]
    finally:
        await reader.close()


@pytest.fixture(params=["files", "redis"])
async def bus(request: pytest.FixtureRequest, redis_url: str, run_name: str, tmp_path: Path) -> AsyncIterator[Bus]:
    place = {"blob_dir": str(tmp_path / "blobs")} if request.param == "files" else {}
    async with open_bus(redis_url, run_name, knobs=SPLIT | {"staleness_policy": "whole"}, **place) as bus:
        yield bus


async def onward(bus: Bus) -> GroupKept:
    """Three rollouts go through reward and filter, hop by hop as the rooms do it; nothing but small bodies is on the streams."""
    await bus.append([Out(ROLLOUTS, await put_aside(bus, made(i))) for i in range(3)])
    before = await blobs(bus)
    assert len(before) == 4, "one for each trajectory"
    for entry in await one_on(bus, ROLLOUTS, 3):
        assert not entry.blob and len(entry.body) < 2000 and entry.size > READ * ROW
        scored = Scored(rollout=await bus.message(entry), reward=float(entry.fields["id"][-1]))
        assert (await bus.commit(Commit(ack=(entry,), append=(Out(SCORED, scored),)))).done
    entries = await one_on(bus, SCORED, 3)
    group = GroupKept(group_id="g1", prompt_id="p1", samples=tuple([await bus.message(e) for e in entries]))
    assert (await bus.commit(Commit(ack=entries, append=(Out(GROUPS, group),)))).done
    assert await blobs(bus) == before, "written once, and not again by any room"
    assert await sweep_orphans(bus, older_s=-1.0) == 0
    return group


async def test_they_are_written_once_read_by_the_trainer_and_gone_when_it_acknowledges(bus: Bus) -> None:
    group = await onward(bus)
    [entry] = await bus.scan_all(GROUPS)
    assert not entry.blob and len(entry.body) < 4000
    async with trainer_of(bus) as trainer:
        await bus.commit(Commit(ack=await one_on(bus, GROUPS)))  # as the registry and the accounts have it, it arrives here
        assert await blobs(bus) == set(), "what no entry names any more is deleted"
        again = msgspec.structs.replace(group, samples=tuple([
            msgspec.structs.replace(scored, rollout=await put_aside(bus, made(i))) for i, scored in enumerate(group.samples)
        ]))  # fmt: skip
        await arrive(bus, again)
        [lost] = [scored.rollout.routed[0].ref for scored in again.samples[:1]]
        assert isinstance(lost, str)
        await bus.blobs.delete([lost])
        await trainer.intake.fetch(64, 0.0, step=0)
        samples = to_samples([trainer.intake.ready["g1"].group])
        assert [s.train.sample_id for s in samples] == ["g1/0", "g1/1", "g1/2#0", "g1/2#1"]
        for sample, index in zip(samples[1:], (1, 2, 2), strict=True):
            assert sample.experts is not None and np.array_equal(sample.experts, table(index))
        routes = Routes(samples, SHAPE, records=False)
        assert routes.flags == {"routing_lost": ["g1/0"]}
        assert routes.metrics(lambda x: x)["routing_fallback_tokens"] == READ
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")
        assert len(await blobs(bus)) == 3, "until the checkpoint is durable"
        await trainer.intake.acknowledge(1, None)
        assert await blobs(bus) == set()
        used = await bus.hash_of(bus.keys.in_flight_bytes)
        assert {name: int(n) for name, n in used.items() if int(n)} == {}


async def test_a_group_that_is_dropped_takes_them_along_and_a_dead_letter_keeps_them(bus: Bus) -> None:
    await bus.append([Out(ROLLOUTS, await put_aside(bus, made(i))) for i in range(2)])
    first, second = await one_on(bus, ROLLOUTS, 2)
    await bus.commit(Commit(ack=(first,)))
    assert await blobs(bus) == {":".join([*ref.split(":")[:2], "0"]) if "redis" in ref else ref for ref in second.asides}
    letter = letter_of(second, actor="reward", error="poison", wall=0.0)
    await bus.commit(Commit(ack=(second,), append=(Out(DEAD, letter),)))
    assert len(await blobs(bus)) == 1 and await sweep_orphans(bus, older_s=-1.0) == 0
    [item] = await read_letters(bus)
    await drop(bus, item)
    assert await blobs(bus) == set()


async def test_a_parked_sample_passes_the_partial_room_without_them_and_its_next_worker_has_them(bus: Bus) -> None:
    rollout = made(0)
    parked = Parked(task=rollout.task, response=await response_aside(bus, rollout.response), reason="drain")
    before = await blobs(bus)
    assert len(before) == 1
    await bus.append([Out(PARKED, parked)])
    async with running(bus, "partial", run_partial, PartialSpec()):
        [entry] = await until(lambda: bus.scan_all(PREFIXES))
    assert not entry.blob and len(entry.body) < 2000
    assert await blobs(bus) == before, "not written again"
    resumed = await response_whole(bus, (await bus.message(entry)).response)
    assert bytes(resumed.experts.data) == table(0).tobytes() and not resumed.aside
    [leased] = await one_on(bus, PREFIXES)
    await bus.commit(Commit(ack=(leased,), append=(Out(ROLLOUTS, await put_aside(bus, rollout)),)))
    assert len(await blobs(bus)) == 1 and not before & await blobs(bus), "the finished sample has its own"
