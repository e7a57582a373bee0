"""The vocabulary-parallel head: the torch backend's numbers and gradients, with the vocabulary on one rank or cut over two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from actors.trainer.megatron_backend.head import vocab_parallel_head
from actors.trainer.torch_backend.head import token_head
from tests.megatron.pool import Pool

VOCAB, PADDED, ROWS, WIDTH = 13, 16, 7, 5
pytestmark = pytest.mark.timeout(120)


def inputs(dtype: torch.dtype, mixed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(ROWS, WIDTH, generator=g, dtype=dtype), torch.randn(PADDED, WIDTH, generator=g, dtype=dtype)
    warm = torch.linspace(0.5, 2.0, ROWS) if mixed else 0.7
    return hidden * 3, weight, torch.tensor([0, 12, 7, 8, 3, 11, 5]), warm


def one_share(mixed: bool, chunk: int) -> tuple[torch.Tensor, ...]:
    """(log-probs, entropies, this rank's gradients of hidden and weight) on a rank of two."""
    hidden, weight, targets, warm = inputs(torch.float32, mixed)
    rank = dist.get_rank()
    h, w = hidden.requires_grad_(), weight.chunk(2)[rank].clone().requires_grad_()
    logp, entropy = vocab_parallel_head(
        h, w, targets, warm, dist.group.WORLD, vocab=VOCAB, entropy_gradient=True, chunk_elements=chunk
    )
    (logp @ torch.arange(1.0, 8.0) + 0.3 * entropy.sum()).backward()
    assert h.grad is not None and w.grad is not None
    return logp.detach(), entropy.detach(), h.grad, w.grad


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("chunk", [1 << 20, 3 * PADDED // 2])
def test_a_vocabulary_cut_in_two_gives_the_torch_backends_numbers(pool: Pool, mixed: bool, chunk: int) -> None:
    hidden, weight, targets, warm = inputs(torch.float32, mixed)
    h, w = hidden.requires_grad_(), weight[:VOCAB].clone().requires_grad_()
    want, want_entropy = token_head(h, w, targets, warm, entropy_gradient=True)
    (want @ torch.arange(1.0, 8.0) + 0.3 * want_entropy.sum()).backward()
    assert h.grad is not None and w.grad is not None
    a, b = pool.run(2, one_share, mixed, chunk)
    for rank in (a, b):
        torch.testing.assert_close(rank[0], want.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank[1], want_entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a[2] + b[2], h.grad, rtol=1e-5, atol=1e-5)
    got = torch.cat([a[3], b[3]])
    torch.testing.assert_close(got[:VOCAB], w.grad, rtol=1e-5, atol=1e-5)
    assert (got[VOCAB:] == 0).all()


@pytest.mark.parametrize("chunk", [1 << 20, 33])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradients_of_one_rank_are_true(chunk: int, entropy_gradient: bool) -> None:
    hidden, weight, targets, _ = inputs(torch.float64, False)
    warm = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)

    def head(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = vocab_parallel_head(h, w, targets, warm, vocab=VOCAB, entropy_gradient=entropy_gradient, chunk_elements=chunk)
        return out if entropy_gradient else out[:1]

    assert torch.autograd.gradcheck(head, (hidden.requires_grad_(), weight.requires_grad_()))
