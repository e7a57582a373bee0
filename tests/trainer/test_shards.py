"""What two ranks of FSDP hold whole, and when: the same numbers either way, and everything sharded between passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from actors.trainer.backend import BackendConfig, StepBatch
from actors.trainer.batch.memory import gathers
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.core import Core
from actors.trainer.training.state import MODEL, REFERENCE
from tests.trainer.conftest import alone, served, state_of

Batch = Callable[..., StepBatch]
Config = Callable[..., BackendConfig]
Backend = Callable[..., TorchBackend]
pytestmark = pytest.mark.timeout(120)  # the first of them starts a process that loads torch
GIB = 1 << 30


@pytest.mark.parametrize(
    "objective", [{"use_kl_loss": True, "kl_loss_coef": 0.1}, {"advantage_estimator": "ppo"}], ids=["kl", "ppo"]
)
def test_what_is_sharded_changes_no_number(
    objective: dict[str, Any], pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch
) -> None:
    """Several micro-batches a step, one with each layer recomputed; against one process."""
    settings = {"objective": objective, "max_tokens_per_gpu": 48, "gradient_checkpointing": True}
    one = alone(make_backend, **settings)
    want = [one.train_step(make_batch(step, step=step)).metrics for step in range(2)]
    assert want[0]["train/micro_batches"] > 4
    for fsdp_shard in ("all", "optimizer", "auto"):
        pair.setup(make_config(**settings, fsdp_shard=fsdp_shard))
        assert core_of(pair).shards.gathers == (fsdp_shard != "all")
        for step in range(2):
            got = pair.train_step(make_batch(step, step=step)).metrics
            for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
                assert got[name] == pytest.approx(want[step][name], rel=1e-4, abs=1e-6), (fsdp_shard, step, name)
        found = state_of(pair)[MODEL]
        for name, p in state_of(one)[MODEL].items():
            torch.testing.assert_close(found[name], p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fsdp_shard", ["all", "optimizer"])
def test_between_passes_every_parameter_is_a_shard(
    fsdp_shard: str, pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch
) -> None:
    """A pass without a backward after it too: of the reference, and of a policy that only the critic learns from."""
    settings = {"objective": {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.1},
                "num_critic_only_steps": 1, "model_dtype": "bfloat16", "lr": 0.02}  # fmt: skip
    pair.setup(make_config(**settings, fsdp_shard=fsdp_shard))
    before = served(pair)
    pair.train_step(make_batch(0))
    core = core_of(pair)
    assert core.reference is not None and core.critic is not None
    for module in (core.policy, core.reference, core.critic.model):
        for name, p in module.named_parameters():
            assert isinstance(p, DTensor) and p.dtype == torch.float32, name
    after = served(pair)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())  # the critic alone has learned
    pair.train_step(make_batch(1, step=1))
    assert any(not torch.equal(served(pair)[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("fsdp_shard", ["all", "optimizer"])
def test_a_reference_that_moves_does_so_on_every_rank(
    fsdp_shard: str, pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch
) -> None:
    """What was gathered for the reference's pass once stood where its shards belong, and the copy raised."""
    settings = {"objective": {"use_kl_loss": True, "kl_loss_coef": 0.1}, "lr": 0.02, "ref_update_interval": 1}
    pair.setup(make_config(**settings, fsdp_shard=fsdp_shard))
    one = alone(make_backend, **settings)
    for step in range(3):
        got, want = (backend.train_step(make_batch(step, step=step)).metrics for backend in (pair, one))
        for name in ("train/kl_loss", "train/grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-6), (step, name)
    found = state_of(pair)[REFERENCE]
    for name, p in state_of(one)[REFERENCE].items():
        torch.testing.assert_close(found[name], p, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fsdp_shard", "billions", "ranks", "activations", "gpu", "whole"),
    [  # 6 bytes a parameter whole and 12 shared, beside the activations, in 0.8 of the GPU
        ("auto", 0.6, 2, 24, 80, True),
        ("auto", 4, 2, 60, 140, True),
        ("auto", 4, 2, 80, 140, False),
        ("auto", 8, 8, 0, 80, True),
        ("auto", 12, 8, 0, 80, False),
        ("auto", 100, 2, 0, None, True),
        ("optimizer", 100, 2, 0, 80, True),
        ("all", 0.6, 2, 0, 80, False),
        ("optimizer", 0.6, 1, 0, 80, False),
    ],
)
def test_weights_are_held_whole_where_they_fit(
    fsdp_shard: str, billions: float, ranks: int, activations: int, gpu: int | None, whole: bool
) -> None:
    found = gathers(fsdp_shard, int(billions * 10**9), ranks, activations * GIB, gpu * GIB if gpu else None)
    assert found is whole


def core_of(backend: TorchBackend) -> Core:
    core = backend.core
    assert isinstance(core, Core)
    return core
