"""The oracle: transformers' own eager attention on a right-padded batch, one sample per row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.trainer.backend import StepBatch
from actors.trainer.objective import policy_loss, prepare_batch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.layout import PackedBatch
from tests.objective.reference import token_logprobs


def padded_logprobs(model: torch.nn.Module, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all response tokens, in sample order."""
    longest = max(len(s.prompt_tokens) + len(s.response_tokens) for s in batch.samples)
    ids = torch.zeros(len(batch.samples), longest, dtype=torch.int64)
    seen = torch.zeros_like(ids)
    for row, s in enumerate(batch.samples):
        tokens = torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens])).long()
        ids[row, : len(tokens)], seen[row, : len(tokens)] = tokens, 1
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    logps, entropies = [], []
    for row, s in enumerate(batch.samples):
        a, b = len(s.prompt_tokens), len(s.prompt_tokens) + len(s.response_tokens)
        logp, entropy = token_logprobs(logits[row, a - 1 : b - 1], ids[row, a:b], temperature=s.temperature, with_entropy=True)
        assert entropy is not None
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dynamic_batch_size": False, "micro_batch_size": 3},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_layers": 1},
    ],
)
def test_gradient_of_packed_equals_gradient_of_padded(
    family: str,
    settings: dict[str, object],
    models: dict[str, Path],
    make_backend: Callable[..., TorchBackend],
    make_batch: Callable[..., StepBatch],
) -> None:
    batch = make_batch(5, temperatures=(1.0, 0.8))
    backend = make_backend(family, objective={"entropy_coef": 0.01}, lr=0.0, clip_grad=0.0, **settings)
    result = backend.train_step(batch)
    assert result.metrics["train/micro_batches"] > 2

    oracle = AutoModelForCausalLM.from_pretrained(models[family], attn_implementation="eager")
    cfg = backend.core.objective
    prepared = prepare_batch(cfg, [s.train for s in batch.samples], current_step=batch.step)
    logp, entropy = padded_logprobs(oracle, batch)
    loss, _ = policy_loss(cfg, prepared.micro_batch(range(len(batch.samples)), logp, entropy=entropy), prepared.norm())
    loss.backward()

    assert result.metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    wanted = dict(oracle.named_parameters())
    assert wanted.keys() == backend.core.weights.params.keys()
    for name, p in backend.core.weights.params.items():
        grad, want = p.grad, wanted[name].grad
        assert grad is not None and want is not None and want.abs().max() > 1e-4, name
        assert (grad - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max())), name


def test_samples_do_not_see_each_other(make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]) -> None:
    batch = make_batch(8)
    policy = make_backend().core.policy
    packed = PackedBatch(batch.samples)
    cpu = torch.device("cpu")
    with torch.no_grad():
        together, _ = policy(packed.micro_batch(range(len(batch.samples)), cpu))
        alone = torch.cat([policy(packed.micro_batch([i], cpu))[0] for i in range(len(batch.samples))])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_no_mask_of_the_size_of_the_packed_sequence_is_built(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    policy = make_backend().core.policy
    packed = PackedBatch(make_batch(1, groups=32).samples)
    micro = packed.micro_batch(range(128), torch.device("cpu"))
    total = micro.input_ids.numel()

    class Largest(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                Largest.seen = max(Largest.seen, out.numel())
            return out

    with Largest(), torch.no_grad():
        policy(micro)
    assert 0 < Largest.seen < total * total


def test_odd_samples_are_packed_like_all_others(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    batch = make_batch(3, groups=2)
    nothing = np.zeros(0, dtype=np.int32)
    no_prompt, no_response, single = batch.samples[0], batch.samples[1], batch.samples[2]
    no_prompt.prompt_tokens, no_prompt.train.prompt_length = nothing, 0
    for s, n in ((no_response, 0), (single, 1)):
        s.response_tokens = s.response_tokens[:n]
        s.train.response_length = n
        s.train.loss_mask, s.train.rollout_logp = np.ones(n, np.uint8), np.full(n, -3.0, np.float32)
        s.train.spans = [(0, n)]
    single.prompt_tokens, single.train.prompt_length = single.prompt_tokens[:1], 1
    result = make_backend().train_step(batch)
    assert "empty_response" in result.flags and result.metrics["train/nonfinite_tokens"] == 0
    assert result.trained_tokens[1] == 0 and not result.skipped
