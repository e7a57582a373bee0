"""Optimizers and float32 masters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend, muon
from actors.trainer.torch_backend.muon import Muon, like_jordan, orthogonalise

Backend = Callable[..., TorchBackend]
Batch = Callable[..., StepBatch]


def test_weight_decay_is_decoupled_and_spares_gains(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(lr=1e-2, weight_decay=0.5, adam_eps=1e20)  # the gradient's share of the update vanishes
    before = {n: p.detach().clone() for n, p in backend.core.weights.params.items()}
    backend.train_step(make_batch(0))
    for name, p in backend.core.weights.params.items():
        factor = 1.0 if "norm" in name else 1 - 1e-2 * 0.5
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-6, atol=0)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(3, *shape, generator=g)))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert torch.equal(orthogonalise(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_muon_takes_matrices_of_a_shape_together_and_moves_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the published form, W -= lr s (G + mu B made orthogonal) after W -= lr d W, s by shape, for two steps."""
    g = torch.Generator().manual_seed(1)
    start = [torch.randn(*shape, generator=g) for shape in ((8, 4), (8, 4), (4, 8), (8, 4))]
    pulls = [[torch.randn(w.shape, generator=g) for w in start] for _ in range(2)]
    for together in (1, 1 << 20):
        monkeypatch.setattr(muon, "TOGETHER", together)
        params = [torch.nn.Parameter(w.clone()) for w in start]
        optimizer = Muon(params, lr=0.1, weight_decay=0.5, scale=like_jordan)
        want, momentum = [w.clone() for w in start], [torch.zeros_like(w) for w in start]
        for pull in pulls:
            for n, (p, gradient) in enumerate(zip(params, pull, strict=True)):
                p.grad = gradient.clone()
                momentum[n] = 0.95 * momentum[n] + gradient
                rows, columns = gradient.shape
                turned = orthogonalise(gradient + 0.95 * momentum[n])
                want[n] = want[n] * (1 - 0.1 * 0.5) - 0.1 * max(1.0, rows / columns) ** 0.5 * turned
            optimizer.step()
        for p, w in zip(params, want, strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-6)


def test_muon_moves_hidden_matrices_and_adam_the_rest(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(optimizer="muon")
    before = {n: p.detach().clone() for n, p in backend.core.weights.params.items()}
    backend.train_step(make_batch(0))
    state = backend.core.optimizer.state()
    assert state.keys() == backend.core.optimizer.expected(1)
    assert "momentum_buffer/model.layers.0.self_attn.q_proj.weight" in state
    assert "exp_avg/model.embed_tokens.weight" in state and "exp_avg/model.norm.weight" in state
    assert all(not torch.equal(p, before[n]) for n, p in backend.core.weights.params.items())


def test_an_unknown_optimizer_is_refused(make_backend: Backend) -> None:
    with pytest.raises(Refused, match="optimizer='sgd'"):
        make_backend(optimizer="sgd")


def test_masters_keep_updates_that_a_bf16_weight_would_lose(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(model_dtype="bfloat16", lr=1e-6, weight_decay=0.0)
    start = {n: p.detach().clone() for n, p in backend.core.weights.params.items()}
    for k in range(2):
        result = backend.train_step(make_batch(k, step=k))
        assert not result.skipped and result.metrics["train/grad_norm"] > 0
    model = backend.core.policy.named_weights()
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in model.values())
    for name, master in backend.core.weights.params.items():
        assert master.dtype == torch.float32 and not torch.equal(master, start[name])
        assert torch.equal(model[name], master.to(torch.bfloat16))


def test_bf16_gradients_are_near_float32_gradients(make_backend: Backend, make_batch: Batch) -> None:
    batch = make_batch(3)
    narrow, wide = (make_backend(model_dtype=t, lr=0.0, clip_grad=0.0) for t in ("bfloat16", "float32"))
    for backend in (narrow, wide):
        backend.train_step(batch)
    for name, p in narrow.core.weights.params.items():
        want = wide.core.weights.params[name].grad
        assert p.grad is not None and want is not None
        assert torch.nn.functional.cosine_similarity(p.grad.flatten(), want.flatten(), dim=0) > 0.98, name
