"""A batch that the backend cannot train: refused with its reason, nothing changed, and the entries at fault are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.trainer.backend import BatchRefused, StepBatch
from actors.trainer.torch_backend import TorchBackend
from tests.trainer.conftest import VOCAB, BackendMaker, BatchMaker


def _token(value: int) -> Callable[[Any], None]:
    def bend(sample: Any) -> None:
        sample.response_tokens = np.full_like(sample.response_tokens, value)

    return bend


@pytest.mark.parametrize("bend", [_token(VOCAB), _token(-1)], ids=["above", "below"])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_sample_that_fits_nothing_is_refused_and_found(
    bend: Callable[[Any], None], steps: int, make_backend: BackendMaker, make_batch: BatchMaker
) -> None:
    backend: TorchBackend = make_backend(num_steps_per_rollout=steps)
    batch = make_batch(3)
    bend(batch.samples[-1])
    before = backend.weights_hash()
    with pytest.raises(BatchRefused) as caught:
        backend.train_step(batch)
    assert caught.value.half_done == (backend.weights_hash() != before)
    assert "\n" not in str(caught.value)
    before = backend.weights_hash()
    groups: dict[Any, list[Any]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.train.group, []).append(sample)
    refused = {name: backend.refuses(replace(batch, samples=samples)) for name, samples in groups.items()}
    assert [name for name, why in refused.items() if why] == [batch.samples[-1].train.group]
    assert backend.weights_hash() == before, "to look changes nothing"
    rest = [s for s in batch.samples if s.train.group != batch.samples[-1].train.group]
    assert not backend.train_step(StepBatch(rest, 0, 0, batch.knobs)).skipped


def test_a_mask_or_log_probs_of_another_length_cost_their_sample_its_gradient_only(
    make_backend: BackendMaker, make_batch: BatchMaker
) -> None:
    batch = make_batch(3)
    batch.samples[-1].train.loss_mask = np.ones(99, dtype=np.uint8)
    batch.samples[0].train.rollout_logp = np.zeros(99, dtype=np.float32)
    result = make_backend().train_step(batch)
    assert (result.trained_tokens[0], result.trained_tokens[-1]) == (0, 0) and not result.skipped
    assert {"g0/0", "g3/3"} <= {name for names in result.flags.values() for name in names}
