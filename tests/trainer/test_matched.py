"""The policy in the order of SGLang's operations: the same function as the plain one, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.runtime.run import Refused
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.torch_backend.matched import FORMULAS, MatchedPolicy, sglang_kernels
from actors.trainer.torch_backend.model import load_policy
from actors.trainer.torch_backend.policy import Policy

Batch = Callable[..., Any]


def answers(policy: Policy, batch: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, entropies, and the gradient of a mixture of both."""
    packed = PackedBatch(batch.samples).micro_batch(range(len(batch.samples)), torch.device("cpu"))
    logp, entropy = policy(packed, True)
    (logp * torch.linspace(-1, 1, logp.numel()) + 0.3 * entropy).sum().backward()
    return logp.detach(), entropy.detach(), {n: p.grad.clone() for n, p in policy.named_weights().items() if p.grad is not None}


@pytest.mark.parametrize(("temperatures", "again"), [((1.0,), False), ((0.7, 1.3), False), ((1.0,), True)])
def test_it_is_the_same_function(models: dict[str, Path], make_batch: Batch, temperatures: tuple[float, ...], again: bool) -> None:
    batch = make_batch(3, temperatures=temperatures)
    plain = load_policy(str(models["qwen3"]), trainable=True)
    matched = MatchedPolicy(load_policy(str(models["qwen3"]), trainable=True, gradient_checkpointing=again).hf, FORMULAS)
    (logp, entropy, grads), (same, its, theirs) = answers(plain, batch), answers(matched, batch)
    torch.testing.assert_close(same, logp, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(its, entropy, atol=2e-5, rtol=1e-5)
    assert grads.keys() == theirs.keys() and len(grads) == len(plain.named_weights())
    for name, grad in grads.items():
        torch.testing.assert_close(theirs[name], grad, atol=2e-4, rtol=2e-4, msg=name)


def test_other_families_and_machines_without_the_kernels_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(Refused, match="implemented for qwen3, not for 'llama'"):
        MatchedPolicy(load_policy(str(models["llama"]), trainable=False).hf, FORMULAS)
    with pytest.raises(Refused, match="need SGLang's kernels"):
        sglang_kernels()
