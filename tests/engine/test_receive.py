"""The embedded engine receives weights without files: over a gloo group, from a shared file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.generation.activation import Loader, TransportFailed
from actors.generation.engine import GenerateRequest, RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from actors.trainer.transports.flat import FlatBuffers, bucketed
from actors.trainer.transports.ipc import IpcSender
from actors.trainer.transports.nccl import NcclSender
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from tests.engine.conftest import engine_process
from tests.engine.models import Oracle

pytestmark = pytest.mark.timeout(300)  # each boots an engine
PROMPT = [7, 12, 40, 3]
BUCKET = 4096  # bytes: several buckets, so that a version is a sequence of calls


@pytest.fixture
async def pair(models: Callable[[str], tuple[Path, Path]]) -> AsyncIterator[tuple[SGLangClient, Path, Path]]:
    """An engine that serves the first of two models, and both directories."""
    first, second = models("qwen3")
    with engine_process(first, "--served-version", "1") as (url, _):
        client = SGLangClient(url, request_deadline_s=30, token_deadline_s=30, control_deadline_s=30)
        yield client, first, second
        await client.close()


async def serves(client: SGLangClient, model: Path, version: str) -> None:
    """The engine computes with these weights and says so."""
    request = GenerateRequest(rid="r", input_ids=PROMPT, max_new_tokens=20, ignore_eos=True, sampling_seed=3)
    chunks = [chunk async for chunk in client.generate(request)]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    assert {chunk.weight_version for chunk in chunks} == {version}
    assert logprobs == pytest.approx(Oracle(model).logprobs(PROMPT, tokens), abs=1e-4)


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def planned(sender: IpcSender | NcclSender, tensors: dict[str, torch.Tensor]) -> WeightPlan:
    """The plan of a version that lies in the sender's buffers."""
    sender._buffers.fill(bucketed(tensors.items(), BUCKET))
    return sender.plan()


async def take(client: SGLangClient, plan: WeightPlan, version: str) -> None:
    """What a worker does once the trainer sends."""
    loader = Loader("w")
    await loader.join(client, plan)
    await client.pause("retract")
    await loader.load(client, WeightManifest(), plan, version)
    await client.resume()


async def test_a_version_over_a_group(pair: tuple[SGLangClient, Path, Path], tmp_path: Path) -> None:
    client, _, second = pair
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan = planned(sender, weights(second))

    def send() -> None:
        sender.open()
        sender.send()

    await asyncio.gather(asyncio.to_thread(send), take(client, plan, "2"))
    await serves(client, second, "2")
    came = await client.weights_checksum()
    await client.update_weights_from_disk(str(second), "2")
    assert await client.weights_checksum() == came
    sender.close()


async def test_a_group_whose_trainer_leaves_is_told_and_files_repair_it(
    pair: tuple[SGLangClient, Path, Path], tmp_path: Path
) -> None:
    client, first, second = pair
    sender = NcclSender({"w": 1}, name="g", backend="gloo", deadline_s=20.0, buffers=FlatBuffers())
    plan, loader = planned(sender, weights(second)), Loader("w")
    await asyncio.gather(asyncio.to_thread(sender.open), loader.join(client, plan))
    sender.close()
    await client.pause("retract")
    with pytest.raises(TransportFailed, match="partially updated"):
        await loader.load(client, WeightManifest(), plan, "2")
    assert (await client.health()).weight_version == "1", "a version is named with its last bucket"
    await client.update_weights_from_disk(str(first), "3")
    await client.resume()
    await serves(client, first, "3")


async def test_a_version_from_shared_memory(pair: tuple[SGLangClient, Path, Path], tmp_path: Path) -> None:
    client, first, second = pair
    sender = IpcSender(buffers=FlatBuffers(shared=tmp_path / "flat"))
    await take(client, planned(sender, weights(second)), "2")
    await serves(client, second, "2")
    await take(client, planned(sender, weights(first)), "3")
    await serves(client, first, "3")
    sender.close()


async def test_what_does_not_fit_is_refused_and_changes_nothing(pair: tuple[SGLangClient, Path, Path], tmp_path: Path) -> None:
    client, first, second = pair
    await client.pause("retract")
    tensors = weights(second)
    for name, wrong in (
        ("unknown", {"model.layers.77.mlp.up_proj.weight": torch.zeros(2, 2)}),
        ("shape", {"model.norm.weight": torch.zeros(3)}),
        ("type", {"model.norm.weight": tensors["model.norm.weight"].to(torch.int32)}),
    ):
        sender = IpcSender(buffers=FlatBuffers(shared=tmp_path / name / "flat"))
        plan = planned(sender, wrong)
        with pytest.raises(TransportFailed, match=next(iter(wrong))):
            await Loader("w").load(client, WeightManifest(), plan, "2")
        sender.close()
    with pytest.raises(RequestRefused, match="not in group nowhere"):
        await client.update_weights_from_distributed((), "nowhere", "2")
    with pytest.raises(RequestRefused, match="body refused"):
        await client.update_weights_from_tensor(("gASVBwAAAAAAAAB9lC4=",), "2")  # a pickle is no handle
    with pytest.raises(RequestRefused, match="cannot be mapped"):
        await client.update_weights_from_tensor(('{"path": "/nowhere", "tensors": []}',), "2")
    await client.resume()
    await serves(client, first, "1")
