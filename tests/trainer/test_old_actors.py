"""keep_old_actor: old log-probs are those of the weights that made each token, also after a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.training.old_actors import OldActors
from tests.trainer.conftest import saved

Backend = Callable[..., TorchBackend]
Batch = Callable[..., StepBatch]
STALE = {"keep_old_actor": True, "max_staleness": 2, "correction": "tis", "tis_clip": 1e6}


def behaved(backend: TorchBackend, batch: StepBatch) -> None:
    """Give the samples, from the first token on or from the middle, the log-probs of the present weights."""
    packed = PackedBatch(batch.samples)
    everyone = tuple(range(len(batch.samples)))
    work: Any = [[(everyone, packed.micro_batch(everyone, backend.core.device))]]
    values = backend.core.score("old_logp", packed, work).numpy()
    for i, sample in enumerate(batch.samples):
        first, n = packed.first_response[i], packed.response[i]
        version = np.repeat(*np.array(sample.train.spans).T)
        mine = version == backend.core.optimizer.steps
        sample.train.rollout_logp = np.where(mine, values[first : first + n], sample.train.rollout_logp).astype(np.float32)


def stale_batch(make_batch: Batch, *, step: int) -> StepBatch:
    """Samples made by the versions step-2, step-1 and step, some across two of them."""
    batch = make_batch(7, step=step)
    for i, sample in enumerate(batch.samples):
        n = sample.train.response_length
        cut = (i % 3) * n // 2
        spans = [(step - 2, n - cut), (step - 1 + i % 2, cut)]
        sample.train.spans = [(version, tokens) for version, tokens in spans if tokens]
    return batch


@pytest.mark.parametrize("extra", [{}, {"model_dtype": "bfloat16"}])
def test_tokens_meet_the_weights_that_made_them(extra: dict[str, Any], make_backend: Backend, make_batch: Batch) -> None:
    """Then engine and old log-probs are equal, and every weight of truncated importance sampling is 1."""
    seen = {}
    for keep in (True, False):
        backend = make_backend(objective=STALE | {"keep_old_actor": keep}, lr=0.02, **extra)
        batch = stale_batch(make_batch, step=2)
        for step in (0, 1):
            behaved(backend, batch)
            backend.train_step(make_batch(step, step=step))
        behaved(backend, batch)
        result = backend.train_step(batch)
        assert "old_actor_gone" not in result.flags
        seen[keep] = result.metrics["train/tis_abs"]
    assert seen[True] < (1e-5 if not extra else 2e-2) and seen[False] > 20 * seen[True]


def test_resumed_from_a_checkpoint_it_trains_the_same(tmp_path: Path, make_backend: Backend, make_batch: Batch) -> None:
    first = make_backend(objective=STALE, lr=0.02)
    for step in (0, 1):
        first.train_step(make_batch(step, step=step))
    saved(first, tmp_path / "c")
    second = make_backend(objective=STALE, lr=0.02)
    second.load(tmp_path / "c")
    assert first.core.old_actors.steps == second.core.old_actors.steps == (0, 1)
    for backend in (first, second):
        backend.train_step(stale_batch(make_batch, step=2))
    assert first.weights_hash() == second.weights_hash()


def test_a_token_whose_weights_are_gone_is_counted(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective=STALE)
    batch = stale_batch(make_batch, step=2)
    result = backend.train_step(batch)
    made_before = [s.train.sample_id for s in batch.samples if any(version < 2 for version, _ in s.train.spans or ())]
    assert result.flags["old_actor_gone"] == made_before


def test_as_many_weights_are_kept_as_the_live_bound_reaches_back(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective=STALE | {"max_staleness": None})
    for step, (bound, kept) in enumerate(((2, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (1, (3,)), (0, ()))):
        backend.train_step(make_batch(step, step=step, max_weight_staleness=bound))
        assert backend.core.old_actors.steps == kept


def test_tokens_of_weights_that_were_not_kept_take_the_newest_before_them(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective=STALE | {"max_staleness": 3}, lr=0.02)
    batch = make_batch(7, step=3)
    for sample in batch.samples:
        sample.train.spans = [(0, sample.train.response_length)]
    behaved(backend, batch)  # the weights of step 0 made them
    for step in (0, 2):
        backend.train_step(make_batch(step, step=step))
    assert backend.core.old_actors.steps == (0, 2)
    for sample in batch.samples:
        sample.train.spans = [(1, sample.train.response_length)]
    result = backend.train_step(batch)
    assert result.flags["old_actor_gone"] == [s.train.sample_id for s in batch.samples]
    assert result.metrics["train/tis_abs"] < 1e-5


def test_weights_of_a_lost_future_are_forgotten_when_its_steps_are_made_again() -> None:
    kept, weights = OldActors(on_host=False), {"w": torch.zeros(2)}
    for step, steps in ((4, (4,)), (5, (4, 5)), (3, (3,)), (4, (3, 4))):
        kept.keep(step, weights, depth=2)
        assert kept.steps == steps
