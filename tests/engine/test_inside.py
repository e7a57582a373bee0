"""Our function inside SGLang, asked by the real client over HTTP and letters: what it counts, what it receives, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from actors.generation.activation import Loader, TransportFailed
from actors.generation.engine import RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.inside import TESTED, VARIABLE, Answer, Order, read, run, send
from actors.runtime.transports.kind import NotCounted
from actors.trainer.transports.flat import FlatBuffers, bucketed
from actors.trainer.transports.nccl import NcclSender
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from tests.engine.processes import until
from tests.engine.test_quick_load import tensors
from tests.warm.launched import open_warm

BUCKET = 64  # bytes: the model's four tensors make three buckets
Engine = tuple[SGLangClient, str]
MANIFEST = WeightManifest(transport="nccl")


@pytest.fixture
def gpus() -> int:
    return 1


@pytest.fixture
def peer(tmp_path: Path, gpus: int, warm: Path | None) -> Iterator[str]:
    """Address of a process that stands for SGLang's scheduler."""
    port = tmp_path / "port"
    env = {**os.environ, VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1"}
    with open_warm(warm, ["tests.engine.inside_peer", str(port), str(gpus)], tmp_path / "printed", env):
        until(lambda: port.exists() and bool(port.read_text()), "the peer listens", 30.0)
        yield f"http://127.0.0.1:{port.read_text()}"


@pytest.fixture
async def engine(peer: str, tmp_path: Path) -> AsyncIterator[Engine]:
    """A client that reaches its inside."""
    client = SGLangClient(peer, request_deadline_s=20, token_deadline_s=20, control_deadline_s=20, inside=tmp_path)
    await client.info()
    yield client, peer
    await client.close()


async def state(url: str) -> dict[str, object]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/state") as answer:
        return dict(await answer.json())


def holds(found: dict[str, object], seed: int) -> bool:
    wanted = tensors(seed)
    fused = torch.cat([wanted["q"], wanted["k"], wanted["v"]])
    return found["qkv"] == fused.tolist() and found["norm"] == [*wanted["norm"].tolist(), 7, 7]


async def prepared(client: SGLangClient, sender: NcclSender, seed: int, *, join: bool) -> WeightPlan:
    """The plan of a version that is ready to be sent, to a group that was joined."""
    sender._buffers.fill(bucketed(tensors(seed).items(), BUCKET))
    plan = sender.plan()
    if join:
        joining = asyncio.create_task(asyncio.to_thread(sender.open))
        await client.init_weights_update_group(
            address=plan.address, port=plan.port, rank_offset=1, world_size=2, group=plan.group, backend="gloo"
        )
        await joining
    return plan


def test_the_sglang_that_our_scripts_install_is_one_that_the_function_was_tested_with() -> None:
    script = (Path(__file__).parents[2] / "scripts" / "sglang_cpu.sh").read_text("utf-8")
    [installed] = re.findall(r"\bsglang==(\S+)", script)
    assert installed in TESTED


async def test_versions_are_received_in_the_engine_and_only_the_first_asks_the_model(engine: Engine, tmp_path: Path) -> None:
    client, url = engine
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    for seed in (1, 2, 3):
        plan = await prepared(client, sender, seed, join=seed == 1)
        assert len(plan.buckets) > 1
        sending = asyncio.create_task(asyncio.to_thread(sender.send))
        await Loader("w").load(client, MANIFEST, plan, str(seed))
        await sending
        found = await state(url)
        assert holds(found, seed) and found["version"] == str(seed)
    assert found["asked"] == len(plan.buckets)  # once each, though all land in one place
    sender.close()


async def test_requests_are_counted_in_the_call_that_brings_the_weights_or_nothing_is_received(
    engine: Engine, tmp_path: Path
) -> None:
    client, url = engine
    assert client.counts_when_receiving
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan = await prepared(client, sender, 1, join=True)
    await client.resume()
    with pytest.raises(NotCounted):  # tokens are being made
        await Loader("w").load(client, MANIFEST, plan, "1", "0")
    found = await state(url)
    assert found["asked"] == 0 and found["version"] == "default"
    await client.pause("in_place")
    sending = asyncio.create_task(asyncio.to_thread(sender.send))
    await Loader("w").load(client, MANIFEST, plan, "1", "0")
    await sending
    assert json.loads((tmp_path / "answer.json").read_bytes())["counts"] == {"r": 4}
    found = await state(url)
    assert holds(found, 1) and found["version"] == "1"
    sender.close()


async def test_a_group_that_nobody_joined_is_told_and_nothing_is_touched(engine: Engine, tmp_path: Path) -> None:
    client, url = engine
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan = await prepared(client, sender, 1, join=False)
    assert not await client.receive(plan.buckets, "g", "1")
    found = await state(url)
    assert found["asked"] == 0 and found["version"] == "default"
    sender.close()


async def test_a_version_that_breaks_off_is_refused_and_not_named(engine: Engine, tmp_path: Path) -> None:
    client, url = engine
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan = await prepared(client, sender, 1, join=True)
    sender.close()  # the trainer is gone before it sent anything
    with pytest.raises(TransportFailed, match="did not receive version 1"):
        await Loader("w").load(client, MANIFEST, plan, "1")
    assert (await state(url))["version"] == "default"


async def test_requests_are_counted_with_the_step_kept_back(engine: Engine) -> None:
    client, _ = engine
    assert await client.pause_counted("1") == 1


async def test_without_a_folder_of_letters_nothing_is_asked(engine: Engine, tmp_path: Path) -> None:
    _, url = engine
    client = SGLangClient(url, request_deadline_s=20, token_deadline_s=20, control_deadline_s=20)
    await client.info()
    assert await client.pause_counted("1") is None
    assert not await client.receive((), "g", "1")
    await client.close()


async def test_an_order_that_cannot_be_written_leaves_the_engine_as_it_was(engine: Engine, tmp_path: Path) -> None:
    client, _ = engine
    (tmp_path / "order.part").mkdir()
    assert await client.pause_counted("1") is None
    assert not await client.receive((), "g", "1")


@pytest.mark.parametrize("gpus", [2])
async def test_each_gpu_of_an_engine_tells_the_checksums_of_its_part(engine: Engine, tmp_path: Path) -> None:
    client, url = engine
    sums = await client.weights_checksum()
    assert set(sums) == {"0/qkv", "0/norm", "1/qkv", "1/norm"}
    assert sums["0/norm"] != sums["1/norm"], "each has weights of its own"
    assert await client.weights_checksum() == sums
    (tmp_path / "answer.1.json").unlink()
    (tmp_path / "answer.1.json").mkdir()  # the second one cannot answer
    with pytest.raises(RequestRefused, match="GPU 1 of the engine told no checksums"):
        await client.weights_checksum()
    away = SGLangClient(url, request_deadline_s=20, token_deadline_s=20, control_deadline_s=20, inside=None)
    await away.info()
    with pytest.raises(RequestRefused, match=r"engine of 2 GPUs .* checksums of the first only"):
        await away.weights_checksum()
    await away.close()


def test_an_order_that_cannot_be_read_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    run(object(), [])
    (tmp_path / "order.json").write_text("{")
    run(object(), [])
    assert not (tmp_path / "answer.json").exists()


def test_an_answer_to_another_order_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    first, second = (Order(number=n, what="count") for n in (1, 2))
    assert "no answer in" in read(tmp_path, first).unknown
    send(tmp_path, first)
    run(object(), [])  # nobody who called has a scheduler
    assert read(tmp_path, first) == Answer(number=1, unknown="SGLang's scheduler was not found")
    assert "no answer in" in read(tmp_path, second).unknown


async def test_after_a_lost_answer_to_receive_the_weights_are_damaged(engine: Engine, tmp_path: Path) -> None:
    client, url = engine
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan = await prepared(client, sender, 1, join=True)
    (tmp_path / "answer.part").mkdir()  # as on a full disk: the weights come, the answer does not
    sending = asyncio.create_task(asyncio.to_thread(sender.send))
    with pytest.raises(TransportFailed, match="no answer in"):
        await Loader("w").load(client, MANIFEST, plan, "1", "0")
    await sending
    assert (await state(url))["version"] == "default"
    sender.close()


@pytest.mark.parametrize(
    ("gpus", "sampler", "said"),
    [(1, "PlainSampler", ""), (2, "object", "the engine could not draw its own way: tp_size is set")],
)
async def test_tokens_are_drawn_by_us_in_an_engine_of_one_gpu_alone(
    peer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, sampler: str, said: str
) -> None:
    client = SGLangClient(peer, request_deadline_s=20, token_deadline_s=20, control_deadline_s=20, inside=tmp_path, draws=True)
    try:
        await client.info()
        assert (await state(peer))["sampler"] == sampler
        assert "".join(record.message for record in caplog.records) == said
    finally:
        await client.close()
