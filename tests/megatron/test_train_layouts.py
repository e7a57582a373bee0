"""The Megatron backend's training: the torch backend's numbers on one rank, one rank's numbers on every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.torch_backend.core import Core
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import BatchFault, train_batch
from tests.megatron.pool import Pool
from tests.megatron.tiny import NUMBERS, batch_of, config_of, trained

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("model", ["tied", "apart"])
def test_one_rank_trains_as_the_torch_backend(model: str, model_dirs: dict[str, str], pool: Pool) -> None:
    """Loss, gradient norm and weights of three steps, from the same recorded batches. AdamW as users have it."""
    settings = {"lr": 1e-3, "adam_eps": 1e-5}
    [(got, weights)] = pool.run(1, trained, model_dirs[model], 3, settings)
    torch_backend = Core(config_of(model_dirs[model], library="torch", **settings), Ranks())
    for step in range(3):
        want = train_batch(torch_backend, batch_of(step)).metrics
        for name in NUMBERS:
            assert got[step][name] == pytest.approx(want[f"train/{name}"], rel=1e-5, abs=1e-6), (step, name)
    named = torch_backend.policy.named_weights()
    assert weights.keys() == named.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, named[name].detach(), rtol=1e-5, atol=1e-5, msg=name)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2_vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2_distributed": (2, {"megatron": {"use_distributed_optimizer": True}}),
    "recomputed": (1, {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}),
    "tp2_sp_dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2_cp2": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "pp2_cp2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "tp2_sp_pp2_vpp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
                            "virtual_pipeline_model_parallel_size": 2}),
}  # fmt: skip


@cache
def one_rank(pool: Pool, path: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    [found] = pool.run(1, trained, path, 2, {})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_rank(layout: str, model_dirs: dict[str, str], pool: Pool) -> None:
    """Numbers of two steps, and the first's and second's updates, which are multiples of the gradients."""
    ranks, own = LAYOUTS[layout]
    model = "tied" if ranks == 2 else "apart"
    want, after = one_rank(pool, model_dirs[model])
    results = pool.run(ranks, trained, model_dirs[model], 2, {"own": own})
    for got, _ in results:
        for step in range(2):
            for name in NUMBERS:
                assert got[step][name] == pytest.approx(want[step][name], rel=1e-4, abs=1e-6), (step, name)
    found: dict[str, Tensor] = {}
    for _, weights in results:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, found.setdefault(name, weight), rtol=0, atol=0, msg=f"ranks differ in {name}")
    assert found.keys() == after.keys()
    before = AutoModelForCausalLM.from_pretrained(model_dirs[model]).state_dict()
    for name, weight in found.items():
        moved, wanted = weight - before[name], after[name] - before[name]
        assert float((moved - wanted).norm()) <= 1e-3 * float(wanted.norm()), name


def saving(path: str, settings: dict[str, Any], end: str) -> None:
    trained(path, 1, settings, end=end)


def resumed(path: str, settings: dict[str, Any], begin: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return trained(path, 1, settings, begin=begin, first=1)


def test_a_run_goes_on_under_another_layout(model_dirs: dict[str, str], pool: Pool, tmp_path: Path) -> None:
    """Weights, masters and moments of two tensor-parallel ranks, taken over by one rank and by two stages."""
    path, directory = model_dirs["apart"], tmp_path / "tp2"
    directory.mkdir()
    want, after = one_rank(pool, path)
    pool.run(2, saving, path, {"own": LAYOUTS["tp2_sp"][1]}, str(directory))
    for own in ({}, LAYOUTS["pp2"][1]):
        results = pool.run(2 if own else 1, resumed, path, {"own": own}, str(directory))
        for got, weights in results:
            for name in NUMBERS:
                assert got[0][name] == pytest.approx(want[1][name], rel=1e-4, abs=1e-6), (own, name)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, after[name], rtol=1e-4, atol=1e-5, msg=name)


def faulty(path: str, settings: dict[str, Any]) -> tuple[str, float]:
    """What a step says in which one sample's loss cannot be made, and the next step's loss."""
    core = MegatronCore(config_of(path, **settings), Ranks(dist.get_rank(), dist.get_world_size()))
    long = {k: sum(s.train.response_length == 13 for s in batch_of(k).samples) for k in range(40)}
    bad, good = (next(k for k, n in long.items() if n == wanted) for wanted in (1, 0))
    try:
        with pytest.raises(BatchFault) as told:
            train_batch(core, batch_of(bad))
        return str(told.value), train_batch(core, batch_of(good)).metrics["train/loss"]
    finally:
        core.close()


def test_a_fault_of_one_rank_is_heard_by_all_and_none_waits(model_dirs: dict[str, str], pool: Pool) -> None:
    """Two pipelines of two stages; one micro-batch of one of them meets a function of the user's that fails."""
    objective = {"custom_loss_function_path": "tests.trainer.hook_samples.picky", "use_kl_loss": False, "kl_loss_coef": 0.0}
    results = pool.run(4, faulty, model_dirs["apart"], {"own": {"pipeline_model_parallel_size": 2}, "objective": objective})
    assert len(set(results)) == 1, "the ranks are told the same, and go on alike"
    assert "raised ValueError: 13 tokens are too many" in results[0][0]
