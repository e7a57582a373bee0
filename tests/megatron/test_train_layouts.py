"""The Megatron backend's training: the torch backend's numbers on one rank, one rank's numbers on every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from actors.trainer.backend import BackendConfig, BatchSample, StepBatch
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.weights import export_hf
from actors.trainer.objective import TrainSample
from actors.trainer.torch_backend.core import Core
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import train_batch
from tests.declared import backend_of, objective_of
from tests.megatron.pool import Pool

VOCAB = 45
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip
OBJECTIVE = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "eps_clip_high": 0.28, "correction": "tis"}
NUMBERS = ("loss", "grad_norm", "entropy_loss", "kl_loss", "pg_loss", "trained_tokens")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for k, tied in enumerate((True, False)):
        torch.manual_seed(k)
        AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).save_pretrained(root / str(tied))
    return {"tied": str(root / "True"), "apart": str(root / "False")}


def config_of(path: str, *, library: str = "megatron", **settings: Any) -> BackendConfig:
    # A large eps makes Adam's first update the gradient's multiple, not its sign: weights then tell gradients.
    plain = {"device": "cpu", "lr": 1.0, "adam_eps": 10.0, "max_tokens_per_gpu": 60, "weight_decay": 0.1, "clip_grad": 2.0}
    own = {"own": MegatronConfig(data_pad_size_multiplier=4, **settings.pop("own", {}))} if library == "megatron" else {}
    return backend_of(hf_checkpoint=path, objective=objective_of(**OBJECTIVE), **plain | settings | own)


def batch_of(step: int) -> StepBatch:
    """16 uneven samples of two temperatures; tokens without gradient in the middle of some."""
    rng = np.random.default_rng(step)
    samples = []
    for k in range(16):
        prompt, n = rng.integers(0, VOCAB, rng.integers(2, 9)).astype(np.int32), int(rng.integers(1, 14))
        train = TrainSample(
            sample_id=f"g{k // 4}/{k % 4}", group=f"g{k // 4}", response_length=n, reward=float(rng.random()),
            prompt_length=len(prompt), loss_mask=(rng.random(n) < 0.9).astype(np.uint8), spans=[(step, n)],
            rollout_logp=(-3.7 + 0.1 * rng.standard_normal(n)).astype(np.float32),
        )  # fmt: skip
        samples.append(BatchSample(prompt, rng.integers(0, VOCAB, n).astype(np.int32), (1.0, 0.8)[k % 2], train))
    return StepBatch(samples, step=step, seed=step)


def trained(path: str, steps: int, settings: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """(numbers of each step, this stage's weights afterwards under their Hugging Face names) of this rank."""
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    core = MegatronCore(config_of(path, **settings), Ranks(rank, size))
    try:
        metrics = [train_batch(core, batch_of(step)).metrics for step in range(steps)]
        weights = {name: t.clone() for name, t in export_hf(core.model.bare, core.model.architecture)}
    finally:
        core.close()
    return [{name: m[f"train/{name}"] for name in NUMBERS} for m in metrics], weights


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
