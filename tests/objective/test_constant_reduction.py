"""Dr. GRPO's reduction: token sums over a constant. The loss is that sum; every other metric stays a mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.objective import (
    ObjectiveConfig,
    TrainSample,
    check,
    finish,
    policy_loss,
    prepare_batch,
)
from actors.trainer.objective.loss import token_terms
from tests.declared import objective_of

LOSSES = {"loss", "pg_loss"}


def batch(lengths: list[int], seed: int = 0) -> tuple[list[TrainSample], torch.Tensor]:
    """Two samples per prompt, rewards that differ, engine log-probs near the policy's; and new log-probs [T]."""
    gen = torch.Generator().manual_seed(seed)

    def logp(n: int) -> torch.Tensor:
        return -1.5 + 0.3 * torch.randn(n, generator=gen, dtype=torch.float64)

    samples = [
        TrainSample(f"{i}", i // 2, n, float(i % 2), rollout_logp=logp(n), old_logp=logp(n), ref_logp=logp(n))
        for i, n in enumerate(lengths)
    ]
    return samples, logp(sum(lengths))


def reduced(cfg: ObjectiveConfig, lengths: list[int], seed: int = 0):
    """(loss, gradient [T], reported metrics, per-token loss [T])."""
    samples, new = batch(lengths, seed)
    prepared = prepare_batch(check(cfg), samples, dtype=torch.float64)
    leaf = new.clone().requires_grad_()
    mb, norm = prepared.micro_batch(range(len(samples)), leaf, entropy=leaf * leaf), prepared.norm()
    loss, sums = policy_loss(cfg, mb, norm)
    loss.backward()
    return loss.item(), leaf.grad, finish(sums, norm), token_terms(cfg, mb, norm).loss.detach()


def config(**fields: object) -> ObjectiveConfig:
    return objective_of(correction="tis", eps_clip_high=0.28, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("reduction", "shares"), [("per_sample", [1 / 3] * 3), ("per_token", [0.25, 0.25, 0.5])])
def test_a_samples_share_of_the_loss_follows_from_the_reduction(reduction, shares):
    prepared = prepare_batch(check(config(reduction=reduction)), batch([2, 2, 4, 3])[0], dtype=torch.float64)
    assert prepared.shares([(0, 1, 2), (3,)]) == pytest.approx([*shares, 1.0])
    assert prepared.shares([(1,)]) == [0.0, 1.0, 0.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    constant=st.floats(0.5, 4096),
    seed=st.integers(0, 10**6),
    kl=st.booleans(),
)
def test_the_loss_is_the_token_sum_over_the_constant_and_metrics_stay_means(lengths, constant, seed, kl):
    extra = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01} if kl else {}
    summed = config(reduction="constant", loss_constant=constant, **extra)
    loss, gradient, metrics, per_token = reduced(summed, lengths, seed)
    _, _, means, _ = reduced(config(**extra), lengths, seed)
    assert metrics["pg_loss"] == pytest.approx(float(per_token.sum()) / constant / len(lengths), rel=1e-9, abs=1e-12)
    assert loss == pytest.approx(metrics["loss"], rel=1e-12)
    assert metrics.keys() == means.keys()
    for name in metrics.keys() - LOSSES:
        assert metrics[name] == pytest.approx(means[name], rel=1e-9, abs=1e-12), name
    one, _, _, _ = reduced(config(reduction="constant", **extra), lengths, seed)
    assert loss * constant == pytest.approx(one, rel=1e-9, abs=1e-12)
    assert torch.isfinite(gradient).all()


def test_a_token_weighs_the_same_in_a_long_answer_as_in_a_short_one():
    plain = {"proximal": "current", "grpo_std_normalization": False}
    lengths = [2, 8]  # one prompt: rewards 0 and 1, advantages -0.5 and 0.5
    per_sample, constant = (
        reduced(objective_of(**plain, **fields), lengths)[1].abs()
        for fields in ({}, {"reduction": "constant", "loss_constant": 8.0})
    )
    assert per_sample[0] / per_sample[-1] == pytest.approx(4)
    torch.testing.assert_close(constant, torch.full((10,), 0.5 / 8 / 2, dtype=torch.float64))
