"""Versions that are adapters alone: an engine that has the base serves each as it serves merged weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.generation.activation import Loader
from actors.generation.engine import GenerateRequest, RequestRefused
from actors.generation.engines.sglang.client import SGLangClient
from actors.runtime.lora import PREFIX, matrix_of
from actors.trainer.backend import BatchSample, StepBatch
from actors.trainer.lora.peft import ADAPTER_CONFIG
from actors.trainer.objective import TrainSample
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.transports.flat import FlatBuffers
from actors.trainer.transports.ipc import IpcSender
from actors.trainer.transports.nccl import NcclSender
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan
from tests.engine.conftest import engine_process
from tests.trainer.conftest import alone, files_of, published, served

Batch = Callable[..., StepBatch]
Backend = Callable[..., TorchBackend]
pytestmark = pytest.mark.timeout(300)  # each boots an engine
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "weight_decay": 0.0, "lr": 0.02}
FLAGS = ("--served-version", "0", "--lora-rank", "4", "--lora-alpha", "8")
PROMPT = [7, 12, 30, 3]
BUCKET = 2048  # bytes: the two parts of some adapters come apart


@pytest.fixture
async def client(models: dict[str, Path]) -> AsyncIterator[SGLangClient]:
    with engine_process(models["qwen3"], *FLAGS) as (url, _):
        client = SGLangClient(url, request_deadline_s=60, token_deadline_s=60, control_deadline_s=60)
        yield client
        await client.close()


def publisher(make_backend: Backend, **settings: Any) -> TorchBackend:
    return alone(make_backend, **(LORA | {"lora_publish": "adapters"} | settings))


async def answer(client: SGLangClient, n: int = 20) -> tuple[list[int], list[float], list[str]]:
    """Tokens, log-probs and the version of each token."""
    request = GenerateRequest(rid="r", input_ids=PROMPT, max_new_tokens=n, ignore_eos=True, sampling_seed=3)
    chunks = [chunk async for chunk in client.generate(request)]
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        [value for chunk in chunks for value in chunk.logprobs],
        [chunk.weight_version for chunk in chunks for _ in chunk.token_ids],
    )


def trainers(backend: TorchBackend, response: list[int]) -> list[float]:
    """Log-probs of an answer to PROMPT as the trainer computes them."""
    n = len(response)
    about = TrainSample(
        sample_id="g/0", group="g", response_length=n, reward=1.0, prompt_length=len(PROMPT),
        loss_mask=np.ones(n, np.uint8), rollout_logp=np.zeros(n, np.float32), spans=[(0, n)],
    )  # fmt: skip
    sample = BatchSample(np.array(PROMPT, np.int32), np.array(response, np.int32), 1.0, about)
    with torch.no_grad():
        logp, _ = backend.core.policy(PackedBatch([sample]).micro_batch([0], torch.device("cpu")))
    return [float(value) for value in logp]


async def sent(client: SGLangClient, backend: TorchBackend, way: str, version: str, folder: Path) -> None:
    """A version of the trainer's, as a worker takes it."""
    loader = Loader("w")
    if way == "disk":
        directory = folder / version
        manifest = published(backend, directory)
        await client.pause("retract")
        await loader.load(client, WeightManifest(path=manifest.path), None, version)
        await client.resume()
        return

    async def take(plan: WeightPlan) -> None:
        await loader.join(client, plan)
        await client.pause("retract")
        await loader.load(client, WeightManifest(), plan, version)
        await client.resume()

    buffers = FlatBuffers(shared=folder / f"flat-{version}") if way == "ipc" else FlatBuffers()
    buffers.fill(backend.export(BUCKET))
    assert len(buffers.buckets) > 1
    if way == "ipc":
        await take(IpcSender(buffers=buffers).plan())
        return
    sender = NcclSender({"w": 1}, name=f"g{version}", backend="gloo", deadline_s=20.0, buffers=buffers)
    plan = sender.plan()

    def send() -> None:
        sender.open()
        sender.send()

    await asyncio.gather(asyncio.to_thread(send), take(plan))
    sender.close()


@pytest.mark.parametrize("way", ["disk", "ipc", "nccl"])
async def test_an_engine_with_the_base_serves_each_versions_adapters(
    way: str, client: SGLangClient, make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    backend, seen = publisher(make_backend), []
    for version in range(1, 4):
        await sent(client, backend, way, str(version), tmp_path)
        tokens, logprobs, versions = await answer(client)
        assert set(versions) == {str(version)}
        assert logprobs == pytest.approx(trainers(backend, tokens), abs=1e-5)
        seen.append(await client.weights_checksum())
        backend.train_step(make_batch(version, step=version))
    assert all(a != b for a, b in pairwise(seen))


async def test_the_numbers_are_those_of_merged_weights(
    client: SGLangClient, models: dict[str, Path], make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    """To the last bit, after several versions: each is made from the base, not from the version before."""
    adapters, whole = publisher(make_backend), publisher(make_backend, lora_publish="merged")
    for step in range(3):
        await sent(client, adapters, "disk", str(step + 1), tmp_path)
        for backend in (adapters, whole):
            backend.train_step(make_batch(step, step=step))
    await sent(client, adapters, "disk", "9", tmp_path)
    mine = await client.weights_checksum()
    published(whole, tmp_path / "whole")
    with engine_process(models["qwen3"]) as (url, _):
        other = SGLangClient(url, request_deadline_s=60, token_deadline_s=60, control_deadline_s=60)
        await other.update_weights_from_disk(str(tmp_path / "whole"), "9")
        assert await other.weights_checksum() == mine
        with pytest.raises(RequestRefused, match="start it with --lora-rank"):
            await other.update_weights_from_disk(str(tmp_path / "9"), "10")
        await other.close()
    with engine_process(models["qwen3"], *FLAGS) as (url, _):  # one that comes late, or starts anew
        late = SGLangClient(url, request_deadline_s=60, token_deadline_s=60, control_deadline_s=60)
        await late.update_weights_from_disk(str(tmp_path / "9"), "9")
        assert await late.weights_checksum() == mine
        await late.close()


def test_the_base_does_not_travel(models: dict[str, Path], make_backend: Backend, make_batch: Batch, tmp_path: Path) -> None:
    backend = publisher(make_backend)
    backend.train_step(make_batch(0))
    manifest = published(backend, tmp_path / "v")
    tensors = files_of(tmp_path / "v")
    assert tensors.keys() == served(backend).keys() and all(map(matrix_of, tensors))
    assert manifest.n_tensors == len(tensors) == 2 * 7 * 2
    base = load_file(models["qwen3"] / "model.safetensors")
    assert manifest.n_bytes < sum(t.nbytes for t in base.values())
    assert (tmp_path / "v" / ADAPTER_CONFIG).is_file() and not (tmp_path / "v" / "config.json").exists()
    assert {t.dtype for t in served(publisher(make_backend, model_dtype="bfloat16")).values()} == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_answer_that_meets_a_new_version_tells_which_tokens_are_whose(
    mode: Any, client: SGLangClient, make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    backend = publisher(make_backend)
    published(backend, tmp_path / "1")
    for step in range(2):
        backend.train_step(make_batch(step, step=step))
    published(backend, tmp_path / "2")
    await client.update_weights_from_disk(str(tmp_path / "1"), "1")
    request = GenerateRequest(rid="r", input_ids=PROMPT, max_new_tokens=56, ignore_eos=True, sampling_seed=3)
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    async for chunk in client.generate(request):
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        versions += [chunk.weight_version] * len(chunk.token_ids)
        if versions[-1] == "1":
            await client.pause(mode)
            await client.update_weights_from_disk(str(tmp_path / "2"), "2")
            await client.resume()
    first = versions.count("1")
    assert versions == ["1"] * first + ["2"] * (len(tokens) - first) and 0 < first < len(tokens) == 56
    want = trainers(backend, tokens)
    assert logprobs[:first] == pytest.approx(trainers(publisher(make_backend), tokens)[:first], abs=1e-5)
    assert (logprobs[first:] == pytest.approx(want[first:], abs=1e-5)) is (mode == "retract")  # else keys are the older version's


async def test_what_is_no_version_of_this_base_changes_nothing(client: SGLangClient, make_backend: Backend, tmp_path: Path) -> None:
    backend = publisher(make_backend)
    published(backend, tmp_path / "v")
    before, tensors = await client.weights_checksum(), files_of(tmp_path / "v")
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    for n, (said, wrong) in enumerate(
        (
            ("has shape", tensors | {name: torch.zeros(5, 32)}),
            ("one part", {k: t for k, t in tensors.items() if k != name}),
            ("no matrix", tensors | {f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)}),
            ("no matrix", tensors | {"model.norm.weight": torch.zeros(32)}),
            ("floats", tensors | {name: torch.zeros(4, 32, dtype=torch.int32)}),
        )
    ):
        (tmp_path / str(n)).mkdir()
        save_file(wrong, tmp_path / str(n) / "model.safetensors")
        with pytest.raises(RequestRefused, match=said):
            await client.update_weights_from_disk(str(tmp_path / str(n)), "7")
    assert await client.weights_checksum() == before
    assert (await client.health()).weight_version == "0"


async def test_the_base_is_back_with_the_weights_after_memory_was_given_away(
    client: SGLangClient, make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    backend = publisher(make_backend)
    for step in range(2):
        backend.train_step(make_batch(step, step=step))
    await sent(client, backend, "disk", "1", tmp_path)
    await client.pause("abort")
    await client.release_memory()
    await client.resume_memory()
    await client.resume()
    backend.train_step(make_batch(5, step=2))
    await sent(client, backend, "disk", "2", tmp_path)
    tokens, logprobs, _ = await answer(client)
    assert logprobs == pytest.approx(trainers(backend, tokens), abs=1e-5)
