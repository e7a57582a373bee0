"""The vocabulary head: same values as the objective's definition, true gradients, in chunks or at once."""

from __future__ import annotations

import pytest
import torch

from actors.trainer.torch_backend.head import token_head
from tests.objective.reference import token_logprobs


def rows(dtype: torch.dtype, n: int = 7, d: int = 5, v: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, d, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, generator=g, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, v, (n,), generator=g)


@pytest.mark.parametrize("chunk", [1 << 20, 33])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_are_those_of_the_objective(chunk: int, temperature: float) -> None:
    hidden, weight, targets = rows(torch.float64)
    logp, entropy = token_head(hidden, weight, targets, temperature, chunk_elements=chunk)
    want, want_entropy = token_logprobs(hidden @ weight.T, targets, temperature=temperature, with_entropy=True)
    torch.testing.assert_close(logp, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad


@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("chunk", [1 << 20, 33])
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_are_true(keep: int, chunk: int, mixed: bool) -> None:
    hidden, weight, targets = rows(torch.float64)
    warm = torch.linspace(0.5, 2.0, 7, dtype=torch.float64) if mixed else 0.9

    def head(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_head(h, w, targets, warm, entropy_gradient=True, chunk_elements=chunk, keep_elements=keep)

    assert torch.autograd.gradcheck(head, (hidden, weight))


def test_no_rows_give_no_values_and_zero_gradient() -> None:
    hidden, weight, targets = rows(torch.float32, n=0)
    logp, _ = token_head(hidden, weight, targets, 1.0)
    logp.sum().backward()
    assert logp.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_bf16_rows_are_widened_before_the_softmax() -> None:
    hidden, weight, targets = rows(torch.float32)
    narrow = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    logp, _ = token_head(*narrow, targets, 1.0)
    want, _ = token_logprobs((narrow[0] @ narrow[1].T).float(), targets)
    logp.sum().backward()
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, want, rtol=1e-5, atol=1e-5)
    assert narrow[1].grad is not None and narrow[1].grad.dtype == torch.bfloat16
