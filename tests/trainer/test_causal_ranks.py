"""A class of transformers on two ranks: the same numbers as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.implementations.generic import GenericPolicy
from actors.trainer.torch_backend.implementations.kind import SampleFeed
from scripts.bench.causal_classes import make_causal
from tests.trainer.conftest import backend_config, files_of, served

pytestmark = pytest.mark.timeout(120)  # the first of them starts a process that loads torch


@pytest.mark.parametrize("fsdp_shard", ["all", "optimizer"])
@pytest.mark.parametrize(
    ("family", "feed"), [("mixtral", SampleFeed.PACKED), ("qwen3_next", SampleFeed.ROWS), ("gemma2", SampleFeed.MASKED)]
)
def test_two_ranks_train_as_one(
    fsdp_shard: str, family: str, feed: SampleFeed, pair: TorchBackend, tmp_path: Path, make_batch: Callable[..., StepBatch]
) -> None:
    """Experts that are fused, a recurrent class with rows of unlike lengths, a head with a cap."""
    make_causal(family, tmp_path)
    one = TorchBackend()
    with pytest.MonkeyPatch.context() as env:
        env.setenv("WORLD_SIZE", "1")
        one.setup(backend_config(tmp_path))
    pair.setup(backend_config(tmp_path, fsdp_shard=fsdp_shard))
    policy = pair.core.policy
    assert isinstance(policy, GenericPolicy) and policy.feed is feed
    for step in range(2):
        want, got = (backend.train_step(make_batch(step, step=step)).metrics for backend in (one, pair))
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-6), (step, name)
    found, alone = served(pair), served(one)
    assert found.keys() == alone.keys() == files_of(tmp_path).keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-3)
