"""The Megatron backend's training: the torch backend's numbers on one rank, one rank's numbers on every layout."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.torch_backend.core import Core
from actors.trainer.training.ranked import _load
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


def interrupted(path: str, settings: dict[str, Any], directory: str, broken: bool = True) -> list[dict[str, float]]:
    """Four steps; if `broken`, the last two by a rank that knows the checkpoint alone."""
    torch.set_num_threads(1)
    ranks, made = Ranks(dist.get_rank(), dist.get_world_size()), []
    for steps in ((0, 1), (2, 3)) if broken else ((0, 1, 2, 3),):
        core = MegatronCore(config_of(path, **settings), ranks)
        try:
            if made:
                core.load(Path(directory), None)
            made += [train_batch(core, batch_of(step)).metrics for step in steps]
            if len(made) == 2:
                core.save(Path(directory)).write()
        finally:
            core.close()
    return made


@pytest.mark.parametrize("layout", ["recomputed", "tp2_sp", "pp2_vpp2"])
def test_a_reference_moves_as_on_the_torch_backend_and_is_in_the_checkpoint(
    layout: str, model_dirs: dict[str, str], pool: Pool, tmp_path: Path
) -> None:
    settings = {"lr": 1e-2, "adam_eps": 1e-5, "ref_update_interval": 2}
    ranks, own = LAYOUTS[layout]
    results = pool.run(ranks, interrupted, model_dirs["tied"], {**settings, "own": own}, str(tmp_path))
    torch_backend = Core(config_of(model_dirs["tied"], library="torch", **settings), Ranks())
    for step in range(4):
        want = train_batch(torch_backend, batch_of(step)).metrics
        for got in results:
            assert got[step]["train/kl_loss"] == pytest.approx(want["train/kl_loss"], rel=1e-3, abs=1e-6), step
    apart = Core(config_of(model_dirs["tied"], library="torch", **{**settings, "ref_update_interval": None}), Ranks())
    fixed = [train_batch(apart, batch_of(step)).metrics["train/kl_loss"] for step in range(4)]
    assert abs(fixed[2] - results[0][2]["train/kl_loss"]) > 0.01 * fixed[2], "a reference that stays would show"


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


def set_up(path: str, settings: dict[str, Any]) -> str:
    """What this rank is told when the model cannot be loaded."""
    with pytest.raises(Refused) as told:
        _load("megatron", config_of(path, **settings), Ranks(dist.get_rank(), dist.get_world_size()))
    return str(told.value)


def test_what_one_stage_alone_finds_when_it_loads_is_refused_by_all(model_dirs: dict[str, str], pool: Pool, tmp_path: Path) -> None:
    """A weight of the last layer, which the second stage reads, has another shape than config.json says."""
    shutil.copytree(model_dirs["apart"], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] = torch.zeros(32, 40)
    save_file(weights, tmp_path / "model.safetensors")
    results = pool.run(2, set_up, str(tmp_path), {"own": {"pipeline_model_parallel_size": 2}})
    assert len(set(results)) == 1, "the ranks are told the same"
    assert results[0].startswith("rank 1 on ") and "down_proj.weight make a part of shape [32, 40]" in results[0]
