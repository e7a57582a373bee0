"""What every way of weights must do, asked through its record: of those that ship, and of one of a user's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from actors.generation.activation import Loader, TransportFailed, WeightsUnusable
from actors.generation.engine import RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from actors.publisher.members import Members
from actors.runtime.host import shared_memory_name
from actors.trainer.spec import CourierSpec
from actors.trainer.transports.flat import NamedTensors, bucketed
from actors.trainer.transports.senders import Senders
from bus.messages.active import Seat
from bus.messages.control import Event
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from tests.actors.house import open_bus
from tests.engine.conftest import CONTROL_DEADLINE_S, engine_process
from tests.engine.models import Oracle
from tests.engine.scripted import ScriptedEngine
from tests.engine.test_kinds import N, asked, tokens
from tests.engine.workers import PROMPT
from tests.trainer import own_transport

OWN = f"{own_transport.__file__}:KIND"
KINDS = ("ipc", "nccl", OWN)
BUCKET = 20_000  # bytes: several of them


class Pair(NamedTuple):
    """A trainer's senders with the weights of `second`, and an engine that was booted with `first`."""

    senders: Senders
    engine: SGLangClient
    first: Path
    second: Path
    name: str


@pytest.fixture(params=KINDS, ids=["ipc", "nccl", "own"])
async def pair(
    request: pytest.FixtureRequest, redis_url: str, run_name: str, tmp_path: Path, models: Callable[[str], tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch, warm: Path | None,
) -> AsyncIterator[Pair]:  # fmt: skip
    first, second = models("qwen3-endless")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")  # which a record sets for good

    def export() -> Generator[NamedTensors]:
        yield from bucketed(load_file(second / "model.safetensors").items(), BUCKET)

    spec = CourierSpec(transport=request.param, deadline_s=20.0)
    with engine_process(first, warm=warm) as (url, _):
        async with open_bus(redis_url, run_name) as bus:
            senders = Senders(bus, spec, tmp_path / "flat", export)
            engine = SGLangClient(url, request_deadline_s=60, token_deadline_s=30, control_deadline_s=CONTROL_DEADLINE_S)
            await engine.info()
            yield Pair(senders, engine, first, second, request.param)
            await engine.close()
            senders.close()


SEATS = (Seat("w", 1, shared_memory_name()),)


def plan_of(pair: Pair, version: int = 2) -> WeightPlan:
    manifest = pair.senders.take()
    assert manifest.transport == pair.name and manifest.n_tensors > 5
    plan = pair.senders.plan(SEATS, "", version=version)
    assert plan.transport == pair.name and plan.workers == ("w",)
    return plan


async def loaded(pair: Pair, plan: WeightPlan, label: str) -> None:
    """What trainer and worker do once all are ready."""
    loader, sender = Loader("w", pair.name), pair.senders.sender
    assert sender is not None
    loader.check(plan)
    opening = asyncio.create_task(asyncio.to_thread(sender.open)) if not sender.is_open else None
    await loader.join(pair.engine, plan)
    if opening is not None:
        await opening
    await pair.engine.pause("retract")
    sending = asyncio.create_task(asyncio.to_thread(sender.send))
    await loader.load(pair.engine, WeightManifest(), plan, label)
    await sending
    await pair.engine.resume()


async def test_a_version_arrives_whole_and_is_named(pair: Pair) -> None:
    await loaded(pair, plan_of(pair), "2")
    ids, logprobs, versions, _ = await tokens(pair.engine, asked("a"))
    oracle = Oracle(pair.second)
    assert ids == oracle.greedy(PROMPT, N) and versions == {"2"}
    assert logprobs == pytest.approx(oracle.logprobs(PROMPT, ids), abs=1e-4)


async def test_only_whom_a_plan_names_takes_it_and_only_a_named_transport_is_loaded(pair: Pair) -> None:
    plan = plan_of(pair)
    with pytest.raises(WeightsUnusable, match="not in group"):
        Loader("another", pair.name).check(plan)
    if pair.name == OWN:
        with pytest.raises(WeightsUnusable, match="unknown to this worker"):
            Loader("w", "disk").check(plan)


def test_the_publisher_sends_to_whom_the_record_says() -> None:
    members = Members(10.0, own=OWN)
    for worker, host in (("a", "here"), ("b", "there")):
        members.fold(Event(actor=worker, kind="activated", text="", wall=0.0, data={"version": 1, "gpus": 1, "host": host}), 0.0)
    assert set(members.able(OWN, "here", 0.0)) == set(members.able("ipc", "here", 0.0)) == {"a"}
    assert set(members.able("nccl", "here", 0.0)) == {"a", "b"}
    assert Members(10.0).able(OWN, "here", 0.0) == members.able("disk", "here", 0.0) == {}


@pytest.mark.parametrize("pair", [OWN], ids=["own"], indirect=True)
async def test_what_comes_damaged_is_not_given_to_the_engine(pair: Pair) -> None:
    plan = plan_of(pair)
    file = Path(plan.buckets[0].handles[0])
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    with pytest.raises(TransportFailed, match="came damaged"):
        await loaded(pair, plan, "2")
    await pair.engine.resume()
    ids, _, versions, _ = await tokens(pair.engine, asked("a"))
    assert ids == Oracle(pair.first).greedy(PROMPT, N) and "2" not in versions


class Joins(ScriptedEngine):
    """Tells which groups it joined; one of them never meets."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[str] = []

    async def init_weights_update_group(self, *, group: str, **more: Any) -> None:
        if group == "broken":
            raise RequestRefused("the others did not come")
        self.joined.append(group)


async def test_an_engine_that_left_its_group_for_one_that_broke_is_in_none() -> None:
    engine, loader = Joins(), Loader("w")

    def plan(group: str) -> WeightPlan:
        return WeightPlan(transport="nccl", buckets=(), group=group, ranks={"w": 1})

    for group in ("a", "a", "b"):
        await loader.join(engine, plan(group))
    with pytest.raises(TransportFailed, match="did not come"):
        await loader.join(engine, plan("broken"))
    await loader.join(engine, plan("b"))
    assert engine.joined == ["a", "b", "b"]
