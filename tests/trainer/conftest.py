"""Tiny random models on disk and batches from a seed. One thread, float32, CPU."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.utils import logging as hf_logging

from actors.trainer.backend import BackendConfig, BatchSample, StepBatch
from actors.trainer.objective import TrainSample
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.training.ranked import RankedBackend
from actors.trainer.training.saving import RankedCheckpoint
from actors.trainer.training.state import TrainingState
from actors.trainer.transports.files import copied
from bus.messages.policy import WeightManifest
from tests.declared import backend_of, objective_of
from tests.warm.launched import Warmed, open_warm

VOCAB = 40
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}

BatchMaker = Callable[..., StepBatch]
BackendMaker = Callable[..., TorchBackend]
STOP_DEADLINE_S = 20


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    hf_logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of a Qwen3 with tied embeddings, a second one of another width, and a Llama with a head of its own."""
    wide = {**SHAPE, "intermediate_size": 64}
    made: dict[str, Any] = {
        "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
        "qwen3_wide": Qwen3Config(**wide, tie_word_embeddings=True),
        "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    }
    root = tmp_path_factory.mktemp("models")
    for k, (name, config) in enumerate(made.items()):
        torch.manual_seed(k)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return {name: root / name for name in made}


@pytest.fixture(scope="session")
def critic_dir(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as reward models have it: qwen3's backbone and a head [1, 32] of its own."""
    directory = tmp_path_factory.mktemp("critic")
    torch.manual_seed(5)
    tensors = load_file(models["qwen3"] / "model.safetensors") | {"score.weight": torch.randn(1, 32) * 0.5}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((models["qwen3"] / "config.json").read_bytes())
    return directory


@pytest.fixture
def make_batch() -> BatchMaker:
    """(seed, groups=4, siblings=4, step=0, temperatures=(1.0,), knobs={}) -> a batch of uneven samples."""

    def make(
        seed: int,
        *,
        groups: int = 4,
        siblings: int = 4,
        step: int = 0,
        temperatures: tuple[float, ...] = (1.0,),
        **knobs: Any,
    ) -> StepBatch:
        rng = np.random.default_rng(seed)
        samples = []
        for g in range(groups):
            prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).astype(np.int32)
            for i in range(siblings):
                n = int(rng.integers(1, 14))
                mask = (rng.random(n) < 0.9).astype(np.uint8)
                train = TrainSample(
                    sample_id=f"g{g}/{i}",
                    group=f"g{g}",
                    response_length=n,
                    reward=float(rng.random()),
                    prompt_length=len(prompt),
                    loss_mask=mask,
                    rollout_logp=(-3.7 + 0.1 * rng.standard_normal(n)).astype(np.float32),
                    spans=[(step, n)],
                )
                response = rng.integers(0, VOCAB, n).astype(np.int32)
                samples.append(BatchSample(prompt, response, temperatures[(g + i) % len(temperatures)], train))
        return StepBatch(samples, step=step, seed=seed, knobs=knobs)

    return make


@pytest.fixture
def make_backend(models: dict[str, Path]) -> BackendMaker:
    """(model name, objective={}, **settings) -> a backend after setup."""

    def make(model: str = "qwen3", *, objective: dict[str, Any] | None = None, **settings: Any) -> TorchBackend:
        backend = TorchBackend()
        backend.setup(backend_config(models[model], objective=objective, **settings))
        return backend

    return make


@pytest.fixture(scope="module")
def follower(warm: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warmed | subprocess.Popen[bytes]]:
    """Rank 1 of two, a process of its own. For the tests of a file this one is rank 0."""
    with socket.socket() as port, pytest.MonkeyPatch.context() as env:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))  # not listening: rank 0 can, and nobody else is given it
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "RANK": "0"}
        for name, value in {**shared, "MASTER_PORT": str(port.getsockname()[1])}.items():
            env.setenv(name, value)
        printed = tmp_path_factory.mktemp("rank") / "printed"
        with open_warm(warm, ["actors.trainer.follower"], printed, {**os.environ, "RANK": "1"}) as process:
            yield process


@pytest.fixture(scope="module")
def pair(follower: Warmed | subprocess.Popen[bytes]) -> Iterator[TorchBackend]:
    """A backend of two ranks over gloo, to be set up by each test of a file."""
    backend = TorchBackend()
    yield backend
    backend.close()
    assert follower.wait(STOP_DEADLINE_S) == 0


def alone(make_backend: BackendMaker, *args: object, **settings: object) -> TorchBackend:
    """The same in one process, whatever the environment says."""
    with pytest.MonkeyPatch.context() as env:
        env.setenv("WORLD_SIZE", "1")
        return make_backend(*args, **settings)


def published(backend: RankedBackend, directory: Path, limit_bytes: int = 1 << 20) -> WeightManifest:
    """Its weights as files of a version."""
    return copied(backend.export(limit_bytes), backend.beside(), directory).finish()


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a version."""
    return {name: t for file in sorted(directory.glob("model*.safetensors")) for name, t in load_file(file).items()}


def served(backend: RankedBackend) -> dict[str, torch.Tensor]:
    """A copy of its weights as engines load them."""
    return {name: t.clone() for bucket in backend.export(1 << 20) for name, t in bucket}


def saved(backend: RankedBackend, directory: Path) -> RankedCheckpoint:
    """A complete checkpoint in `directory`."""
    directory.mkdir(exist_ok=True)
    checkpoint = backend.save(directory)
    checkpoint.write()
    checkpoint.finish()
    return checkpoint


def state_of(backend: RankedBackend) -> dict[str, dict[str, torch.Tensor]]:
    """All its training state, whole, by file."""
    with TemporaryDirectory() as directory:
        state = saved(backend, Path(directory)).saving.state
    assert isinstance(state, TrainingState)
    return state.tensors


def backend_config(path: Path, *, objective: dict[str, Any] | None = None, **settings: Any) -> BackendConfig:
    chosen = {"eps_clip_high": 0.28, "correction": "tis"} | (objective or {})
    defaults = {"device": "cpu", "lr": 1e-3, "max_tokens_per_gpu": 96, "weight_decay": 0.1}
    return backend_of(hf_checkpoint=str(path), objective=objective_of(**chosen), **(defaults | settings))


@pytest.fixture
def make_config(models: dict[str, Path]) -> Callable[..., BackendConfig]:
    """(model name, objective={}, **settings) -> settings of a backend."""
    return lambda model="qwen3", **settings: backend_config(models[model], **settings)
