"""Weights into a server that takes them only within an update session: the protocol of SGLang 0.5.21 to 0.5.23, its faults, and a
server without sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from actors.generation.activation import Loader, TransportFailed
from actors.generation.engine import EngineUnavailable
from actors.generation.engines.sglang.client import SGLangClient
from actors.trainer.transports.flat import FlatBuffers
from actors.trainer.transports.ipc import IpcSender
from actors.trainer.transports.nccl import NcclSender
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from tests.engine.conftest import engine_process
from tests.engine.session_server import Gate, gated, said
from tests.engine.test_receive import planned, serves, take, weights

pytestmark = pytest.mark.timeout(300)  # each boots an engine
BEGIN, END, TENSOR, DISK, LABEL = (
    "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor", "/update_weights_from_disk",
    "/update_weight_version",
)  # fmt: skip
Given = tuple[SGLangClient, Gate, Path, Path, Callable[[Path], WeightPlan]]


def client_of(url: str) -> SGLangClient:
    return SGLangClient(url, request_deadline_s=30, token_deadline_s=30, control_deadline_s=30)


@pytest.fixture
async def given(models: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> AsyncIterator[Given]:
    """A client of a server with sessions that serves the first of two models as version 1, the gate, both directories, and what
    makes a plan by ipc of one of them."""
    first, second = models("qwen3")
    senders: list[IpcSender] = []

    def plan(model: Path) -> WeightPlan:
        senders.append(IpcSender(buffers=FlatBuffers(shared=tmp_path / str(len(senders)) / "flat")))
        return planned(senders[-1], weights(model))

    with engine_process(first, "--served-version", "1") as (engine_url, _):
        async with gated(engine_url) as gate:
            client = client_of(gate.url)
            yield client, gate, first, second, plan
            await client.close()
    for sender in senders:
        sender.close()


async def load(client: SGLangClient, plan: WeightPlan, version: str) -> None:
    await Loader("w").load(client, WeightManifest(), plan, version)


async def test_all_buckets_of_a_version_lie_in_one_session_and_its_name_comes_after_the_end(given: Given) -> None:
    client, gate, first, second, plan = given
    new = plan(second)
    assert len(new.buckets) > 2
    await take(client, new, "2")
    assert gate.calls == [(BEGIN, 200), *[(TENSOR, 200)] * len(new.buckets), (END, 200), (LABEL, 200)]
    assert set(gate.labels) == {None}, "an end that fails must leave the server at the version before"
    await serves(client, second, "2")
    await take(client, plan(first), "3")
    await serves(client, first, "3")
    assert not gate.open


async def test_a_version_over_a_group_takes_a_session_too(given: Given) -> None:
    client, gate, _, second, _ = given
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan = planned(sender, weights(second))

    def send() -> None:
        sender.open()
        sender.send()

    await asyncio.gather(asyncio.to_thread(send), take(client, plan, "2"))
    sender.close()
    await serves(client, second, "2")
    assert gate.count()[BEGIN] == gate.count()[END] == 1 and not gate.open


async def test_a_session_that_a_dead_client_left_is_ended_by_the_next_version(given: Given) -> None:
    """Its worker died between two buckets."""
    client, gate, _, second, plan = given
    await client.pause("retract")
    half = plan(second).buckets[0]
    await client.update_weights_from_tensor(half.handles, None)
    assert gate.open
    successor = client_of(gate.url)
    await take(successor, plan(second), "2")
    await serves(successor, second, "2")
    assert not gate.open and [call for call in gate.calls if call[1] != 200] == [(BEGIN, 400)]
    await successor.close()


async def test_whole_files_never_come_into_a_session_that_somebody_left(given: Given) -> None:
    client, gate, first, second, plan = given
    await client.pause("retract")
    await client.update_weights_from_tensor(plan(second).buckets[0].handles, None)
    successor = client_of(gate.url)
    for version in ("2", "3"):
        await successor.update_weights_from_disk(str(first), version)
    await successor.resume()
    assert gate.open_at_files == [False, False] and gate.count()[END] == 1, "asked once: nobody else opens one"
    await serves(successor, first, "3")
    await successor.close()


@pytest.mark.parametrize(
    ("path", "answer", "failure", "told"),
    [
        (BEGIN, [(400, said("derived weights cannot be restored", False))] * 2, TransportFailed, "derived weights"),
        (BEGIN, [(200, said("not now", False))] * 2, TransportFailed, "opened no update session: not now"),
        (BEGIN, [(500, {"error": {"message": "scheduler died"}})], EngineUnavailable, "scheduler died"),
        (TENSOR, [(400, said("shape mismatch", False))], TransportFailed, "shape mismatch"),
        (END, [(400, said("post-processing failed", False))], TransportFailed, "post-processing failed"),
        (END, [(200, said("post-processing failed", False))], TransportFailed, "did not end its update session"),
        (END, [(200, b"<html>")], TransportFailed, "cannot be read"),
        (END, [(404, {"detail": "Not Found"})], TransportFailed, "Not Found"),
        (END, [(500, {"error": {"message": "out of memory"}})], EngineUnavailable, "out of memory"),
    ],
)
async def test_what_fails_in_a_session_names_no_version_and_files_repair_it(
    given: Given, path: str, answer: list[Any], failure: type[Exception], told: str
) -> None:
    client, gate, first, second, plan = given
    await client.pause("retract")
    gate.answers[path] = list(answer)
    with pytest.raises(failure, match=told) as raised:
        await load(client, plan(second), "2")
    assert "\n" not in str(raised.value)
    assert (await client.health()).weight_version == "1"
    gate.answers.clear()
    await client.update_weights_from_disk(str(first), "3")
    await client.resume()
    await serves(client, first, "3")
    assert gate.open_at_files == [False]
    await take(client, plan(second), "4")
    await serves(client, second, "4")


async def test_a_server_that_forgets_its_session_fails_that_version_alone(given: Given) -> None:
    client, gate, _, second, plan = given
    await client.pause("retract")
    gate.forgets_after = 2
    with pytest.raises(TransportFailed, match="must run between"):
        await load(client, plan(second), "2")
    assert (await client.health()).weight_version == "1"
    await take(client, plan(second), "3")
    await serves(client, second, "3")


async def test_a_server_without_sessions_is_asked_once_and_names_the_version_with_the_last_bucket(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, gate, first, second, plan = given
    gate.open = True  # takes weights at any time
    gate.answers[BEGIN] = gate.answers[END] = [(404, {"detail": "Not Found"})]
    for version, model in (("2", second), ("3", first)):
        await take(client, plan(model), version)
        await serves(client, model, version)
    await client.update_weights_from_disk(str(second), "4")
    assert [path for path, status in gate.calls if status == 404] == [BEGIN]
    assert gate.count()[LABEL] == gate.count()[END] == 0
    assert gate.labels[-1] == "3" and gate.labels.count(None) == len(gate.labels) - 2
