"""What tests of the Megatron backend train: a tiny Qwen3, its settings, batches from a seed, numbers of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.trainer.backend import BackendConfig, BatchSample, StepBatch
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.weights import export_hf
from actors.trainer.objective import TrainSample
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import train_batch
from tests.declared import backend_of, megatron_of, objective_of

VOCAB = 45
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip
OBJECTIVE = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "eps_clip_high": 0.28, "correction": "tis"}
NUMBERS = ("loss", "grad_norm", "entropy_loss", "kl_loss", "pg_loss", "trained_tokens")


def config_of(path: str, *, library: str = "megatron", **settings: Any) -> BackendConfig:
    # A large eps makes Adam's first update the gradient's multiple, not its sign: weights then tell gradients.
    plain = {"device": "cpu", "lr": 1.0, "adam_eps": 10.0, "max_tokens_per_gpu": 60, "weight_decay": 0.1, "clip_grad": 2.0}
    own = {"own": megatron_of(data_pad_size_multiplier=4, **settings.pop("own", {}))} if library == "megatron" else {}
    objective = objective_of(**OBJECTIVE | settings.pop("objective", {}))
    return backend_of(hf_checkpoint=path, objective=objective, **plain | settings | own)


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


def trained(
    path: str, steps: int, settings: dict[str, Any], *, begin: str = "", first: int = 0, end: str = ""
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """(numbers of each step, this stage's weights afterwards under their Hugging Face names) of this rank. `begin`: checkpoint to
    go on from, at step `first`; `end`: directory to save to."""
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    core = MegatronCore(config_of(path, **settings), Ranks(rank, size))
    try:
        if begin:
            core.load(Path(begin), None)
        metrics = [train_batch(core, batch_of(step)).metrics for step in range(first, first + steps)]
        weights = {name: t.clone() for name, t in export_hf(core.model.bare, core.model.architecture)}
        if end:
            core.save(Path(end)).write()
    finally:
        core.close()
    return [{name: m[f"train/{name}"] for name in NUMBERS} for m in metrics], weights
