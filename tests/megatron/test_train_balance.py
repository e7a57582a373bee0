"""Losses of routers on Megatron: the gradient that their formulas have, the same on every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.weights import export_hf
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import train_batch
from tests.megatron.models import make
from tests.megatron.pool import Pool
from tests.megatron.test_train_experts import EXPERTS, LAYOUTS, TOP_K
from tests.megatron.tiny import batch_of, config_of

pytestmark = pytest.mark.timeout(180)
AUX, Z = 0.3, 0.02
LOSSES: dict[str, dict[str, Any]] = {
    "aux": {"moe_aux_loss_coeff": AUX},
    "global": {"moe_aux_loss_coeff": AUX, "moe_router_load_balancing_type": "global_aux_loss"},
    "z": {"moe_z_loss_coeff": Z},
    "both": {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z},
}
BY_COUNT = {"use_dynamic_batch_size": False, "micro_batch_size": 4}  # the same micro-batches on each layout
PAD = 0  # the other library gives its embedding no gradient


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("balanced")
    make("qwen3_moe", directory)
    return str(directory)


def gradients(path: str, own: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics of one step, its gradient of each weight of this stage)"""
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    core = MegatronCore(config_of(path, own=own, **{"clip_grad": 1e9, **settings}), Ranks(rank, size))
    try:
        metrics = train_batch(core, batch_of(1)).metrics
        for weight in (p for chunk in core.model.bare for p in chunk.parameters()):
            weight.data.copy_(weight.main_grad)  # what leaves then is the gradient, under its weight's name
        return metrics, {name: t.clone() for name, t in export_hf(core.model.bare, core.model.architecture)}
    finally:
        core.close()


def asked(own: dict[str, Any], losses: str) -> dict[str, Any]:
    return {**own, "megatron": {**own.get("megatron", {}), **LOSSES.get(losses, {})}}


@cache
def one_rank(pool: Pool, path: str, losses: str, micro: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    [found] = pool.run(1, gradients, path, asked({}, losses), {**BY_COUNT, "micro_batch_size": micro})
    return found


def by_hand(path: str) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Each loss over the whole batch as one, with its gradients, out of another library's router logits."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits: list[list[Tensor]] = []
    for sample in batch_of(1).samples:
        ids = np.concatenate((sample.prompt_tokens, sample.response_tokens))[:-1].astype(np.int64)
        logits.append(model(torch.from_numpy(ids)[None], output_router_logits=True).router_logits)
    layers = [torch.cat(layer) for layer in zip(*logits, strict=True)]
    weights = {name: p for name, p in model.named_parameters() if name.endswith(("mlp.gate.weight", "embed_tokens.weight"))}
    out = {}
    for name in ("aux", "z"):
        total = torch.zeros(())
        for layer in layers:
            if name == "aux":
                scores = layer.float().softmax(-1)
                used = torch.zeros(EXPERTS).index_add(0, scores.topk(TOP_K).indices.flatten(), torch.ones(len(layer) * TOP_K))
                total = total + EXPERTS * (used / used.sum() * scores.mean(0)).sum()
            else:
                total = total + layer.float().logsumexp(-1).square().mean()
        grads = torch.autograd.grad(total, list(weights.values()), retain_graph=True)
        out[name] = float(total.detach()) / len(layers), dict(zip(weights, grads, strict=True))
    return out


def test_the_gradient_is_what_the_formulas_say(moe: str, pool: Pool) -> None:
    """All samples in one micro-batch. The difference that a loss makes to the gradient, against its own."""
    _, without = one_rank(pool, moe, "", 16)
    for name, (value, own) in by_hand(moe).items():
        metrics, with_it = one_rank(pool, moe, name, 16)
        metric, coefficient = {"aux": ("load_balancing_loss", AUX), "z": ("router_z_loss", Z)}[name]
        assert metrics[f"train/{metric}"] == pytest.approx(value, rel=1e-4), name
        for weight, gradient in own.items():
            made, wanted = with_it[weight] - without[weight], gradient * coefficient
            if "embed" in weight:
                made[PAD] = wanted[PAD] = 0.0
            assert float((made - wanted).norm()) < 1e-3 * float(wanted.norm()), (name, weight)


@pytest.mark.parametrize(("layout", "losses"), [*((layout, "both") for layout in LAYOUTS), ("cp2_ep2", "global")])
def test_every_layout_has_one_ranks_gradient(layout: str, losses: str, moe: str, pool: Pool) -> None:
    ranks, own = LAYOUTS[layout]
    metrics, want = one_rank(pool, moe, losses, 4)
    assert metrics["train/load_balancing_loss"] > 1
    _compare(pool.run(ranks, gradients, moe, asked(own, losses), BY_COUNT), metrics, want)


def test_data_parallel_ranks_share_the_steps_tokens(tmp_path: Path, pool: Pool) -> None:
    """A loss that is a sum over tokens: how they lie in micro-batches makes no difference. Routers with biases."""
    make("deepseek_v3", tmp_path)
    [(metrics, want)] = pool.run(1, gradients, str(tmp_path), asked({}, "z"), {})
    _compare(pool.run(2, gradients, str(tmp_path), asked({}, "z"), {}), metrics, want)


def _compare(results: list[Any], metrics: dict[str, float], want: dict[str, Tensor]) -> None:
    found: dict[str, Tensor] = {}
    for got, step in results:
        found |= step
        for name in metrics:
            if name.rpartition("/")[2] in ("load_balancing_loss", "router_z_loss", "loss", "grad_norm"):
                assert got[name] == pytest.approx(metrics[name], rel=1e-4), name
    assert found.keys() == want.keys()
    for name, step in found.items():
        assert float((step - want[name]).norm()) <= 1e-3 * float(want[name].norm()), name


def test_a_model_without_experts_has_none(model_dirs: dict[str, str]) -> None:
    config = config_of(model_dirs["tied"], own={"megatron": LOSSES["aux"]})
    with pytest.raises(Refused, match=r"moe_aux_loss_coeff: .* has no experts; leave it out"):
        MegatronCore.look(config, Ranks())
