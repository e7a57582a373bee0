"""Experts that are chosen again on Megatron: the torch backend's numbers on every layout, from experts that no router takes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from actors.trainer.backend import StepBatch
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.torch_backend.core import Core
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import train_batch
from tests.megatron.models import make
from tests.megatron.pool import Pool
from tests.megatron.tiny import NUMBERS, batch_of, config_of

pytestmark = pytest.mark.timeout(180)
LAYERS, TOP_K, EXPERTS = 4, 2, 8  # the second layer has no experts
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (1, {"megatron": FULL}),
    "cp2_ep2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "pp2_recomputed": (2, {"pipeline_model_parallel_size": 2, "megatron": FULL}),
    "tp2_sp_pp2_vpp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
                            "virtual_pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}  # fmt: skip
ENGINE = {"use_rollout_routing_replay": True}
OWN = {"use_routing_replay": True, "num_steps_per_rollout": 2}


def batch(*, told: bool) -> StepBatch:
    """Of some samples the engine says nothing, of one less than all, of one what cannot be."""
    made, rng = batch_of(1), np.random.default_rng(0)
    for k, s in enumerate(made.samples if told else ()):
        tokens = len(s.prompt_tokens) + len(s.response_tokens) - 1
        drawn = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].reshape(tokens, -1).astype(np.uint8)
        s.experts = [drawn, None, drawn[: tokens // 2], np.minimum(drawn, 0)][3 if k == 5 else k % 3]
    return made


def trained(path: str, own: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """This rank's numbers of two steps over the same samples."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    core = MegatronCore(config_of(path, own=own, **settings), Ranks(rank, size))
    try:
        train_batch(core, batch(told=settings == ENGINE))
        return train_batch(core, batch(told=settings == ENGINE)).metrics
    finally:
        core.close()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("moe")
    make("qwen3_moe", directory)  # its token 0 is one to pad with, and is trained here as any other
    return str(directory)


@cache
def wanted(path: str, replay: str) -> dict[str, float]:
    settings = ENGINE if replay == "engine" else OWN
    core = Core(config_of(path, library="torch", **settings), Ranks())
    train_batch(core, batch(told=settings == ENGINE))
    return train_batch(core, batch(told=settings == ENGINE)).metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engines_experts_are_taken_on_every_layout(layout: str, moe: str, pool: Pool) -> None:
    ranks, own = LAYOUTS[layout]
    want = wanted(moe, "engine")
    for got in pool.run(ranks, trained, moe, own, ENGINE):
        for name in (*NUMBERS, "routing_tokens", "routing_fallback_tokens", "routing_missing"):
            assert got[f"train/{name}"] == pytest.approx(want[f"train/{name}"], rel=1e-4, abs=1e-6), name
        assert got["train/routing_mismatch"] > 0.5


@pytest.mark.parametrize("layout", ["cp2_ep2", "tp2_sp_pp2_vpp2"])
def test_experts_of_the_pass_before_are_taken_on_every_layout(layout: str, moe: str, pool: Pool) -> None:
    ranks, own = LAYOUTS[layout]
    want = wanted(moe, "own")
    for got in pool.run(ranks, trained, moe, own, OWN):
        for name in NUMBERS:
            assert got[f"train/{name}"] == pytest.approx(want[f"train/{name}"], rel=1e-4, abs=1e-6), name
