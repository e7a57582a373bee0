"""Checkpoints and versions of the Megatron backend, through the front that the trainer calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.runtime.run import Refused
from actors.trainer.training.ranked import RankedBackend
from bus.errors import CheckpointRefused
from tests.megatron.test_train_layouts import batch_of, config_of, model_dirs  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def backend() -> Iterator[RankedBackend]:
    made = RankedBackend("megatron")
    yield made
    made.close()


def steps(backend: RankedBackend, *numbers: int) -> list[float]:
    return [backend.train_step(batch_of(step)).metrics["train/loss"] for step in numbers]


def saved(backend: RankedBackend, directory: Path) -> None:
    directory.mkdir()
    checkpoint = backend.save(directory)
    checkpoint.write()
    checkpoint.finish()


def test_a_resumed_run_goes_on_to_the_last_bit(
    backend: RankedBackend, model_dirs: dict[str, str], tmp_path: Path  # noqa: F811
) -> None:
    """Four steps are two, saved, loaded in a new backend, and two more; a damaged copy is refused and changes nothing."""
    settings = {"lr": 1e-3, "adam_eps": 1e-8}
    backend.setup(config_of(model_dirs["tied"], **settings))
    whole = steps(backend, 0, 1)
    saved(backend, tmp_path / "two")
    whole += steps(backend, 2, 3)
    end = backend.weights_hash()

    backend.setup(config_of(model_dirs["tied"], **settings))
    backend.load(tmp_path / "two")
    assert steps(backend, 2, 3) == whole[2:]
    assert backend.weights_hash() == end

    shard = next((tmp_path / "two").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointRefused, match="it is cut or overwritten"):
        backend.load(tmp_path / "two")
    assert backend.weights_hash() == end


def test_a_version_is_the_model_and_memory_comes_back(
    backend: RankedBackend, model_dirs: dict[str, str], tmp_path: Path  # noqa: F811
) -> None:
    backend.setup(config_of(model_dirs["apart"], offload_train_target="disk", offload_dir=str(tmp_path)))
    steps(backend, 0)
    before = backend.weights_hash()
    backend.sleep()
    with pytest.raises(RuntimeError, match="its memory is away"):
        backend.weights_hash()
    backend.wake()
    assert backend.weights_hash() == before
    copied = backend.copy_weights()
    assert "lm_head.weight" in copied.tensors and "config.json" in copied.beside
    bucket = [t for bucket in backend.export(1 << 12) for t in bucket]
    assert {name for name, _ in bucket} == copied.tensors.keys()
    assert all(torch.equal(t, copied.tensors[name]) for name, t in bucket)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"own": {"tensor_model_parallel_size": 3}}, "tensor_model_parallel_size=3: 4 attention heads"),
        ({"own": {"megatron": {"recompute_granulation": "full"}}}, "recompute_granulation: megatron-core has no such field"),
        ({"optimizer": "muon"}, "optimizer=muon: the Megatron backend has adam"),
        ({"own": {"megatron": {"num_layers": 3}}}, "num_layers=3: config.json and the layout say 4"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    settings: dict[str, Any], said: str, backend: RankedBackend, model_dirs: dict[str, str]  # noqa: F811
) -> None:
    with pytest.raises(Refused, match=said):
        backend.setup(config_of(model_dirs["tied"], **settings))
