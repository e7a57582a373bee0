"""Training state that leaves the device between steps. On a CPU it goes to a file; the memory is given up all the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.training.offload import Offload

Batch = Callable[..., StepBatch]
Backend = Callable[..., TorchBackend]
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "critic": {"advantage_estimator": "ppo", "lambd": 0.9},
    "old-actors": {"keep_old_actor": True, "max_staleness": 2},
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_trainer_that_slept_trains_as_if_it_had_not(
    objective: dict[str, Any], optimizer: str, make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    away = {"offload_train_target": "disk", "offload_dir": str(tmp_path)}
    sleeper, other = (make_backend(objective=objective, optimizer=optimizer, **more) for more in (away, {}))
    for step in range(3):
        batch = make_batch(step, step=step)
        a, b = sleeper.train_step(batch), other.train_step(batch)
        assert a.metrics["train/loss"] == b.metrics["train/loss"]
        assert sleeper.weights_hash() == other.weights_hash()
        sleeper.sleep()
        sleeper.wake()
    assert not list(tmp_path.iterdir()), "the file has a name"


def test_memory_is_given_up_and_a_sleeping_trainer_answers_nothing(
    make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    backend = make_backend(offload_train_target="disk", offload_dir=str(tmp_path))
    backend.train_step(make_batch(0))
    moments = backend.core.optimizer.state().values()
    held = sum(t.untyped_storage().nbytes() for t in moments)
    backend.sleep()
    assert held > 10_000 and all(t.untyped_storage().nbytes() == 0 for t in moments)
    for verb in (partial(backend.export, 1), partial(backend.save, tmp_path), backend.weights_hash):
        with pytest.raises(RuntimeError, match=r"call wake\(\) first"):
            verb()
    backend.wake()
    assert sum(t.untyped_storage().nbytes() for t in moments) == held


def test_tensors_that_share_memory_share_it_again(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    row, before = base[2], base.clone()
    offload = Offload("disk", str(tmp_path))
    assert offload.store([base, row]) == 24 * 4
    assert base.untyped_storage().nbytes() == 0
    offload.fetch()
    assert torch.equal(base, before)
    row += 1
    assert torch.equal(base[2], before[2] + 1)


def test_a_trainer_on_a_cpu_keeps_its_memory_unless_told_to_use_the_disk() -> None:
    x = torch.ones(8)
    offload = Offload("cpu")
    assert offload.store([x]) == 0 and not offload.away
    offload.fetch()
    assert torch.equal(x, torch.ones(8))
