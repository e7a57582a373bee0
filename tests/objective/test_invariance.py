"""The objective of a step does not depend on packing, order or the number of ranks: to 1e-6, values and gradients."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.objective import (
    TrainSample,
    check,
    finish,
    flatten,
    merge,
    policy_loss,
    prepare_batch,
    unflatten,
    value_loss,
)
from tests.declared import objective_of

CONFIGS = {
    "grpo_tis": objective_of(eps_clip_high=0.28, correction="tis", max_staleness=2),
    "grpo_current_tis": objective_of(eps_clip_high=0.28, correction="tis", proximal="current"),
    "per_token_icepop": objective_of(correction="icepop", tis_clip_low=0.5, reduction="per_token", eps_clip_c=3.0),
    "dr_grpo": objective_of(grpo_std_normalization=False, reduction="constant", loss_constant=16.0),
    "gspo_kl_entropy": objective_of(
        advantage_estimator="gspo", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", entropy_coef=0.01
    ),
    "mis_normalised": objective_of(
        correction="mis", tis_batch_normalize=True, use_rs=True, rs_level="sequence", rs_upper_bound=4.0
    ),
    "mis_sequence_normalised": objective_of(correction="mis", tis_level="sequence", tis_batch_normalize=True),
    "rfpp_whitened": objective_of(advantage_estimator="reinforce_plus_plus", kl_coef=0.05, gamma=0.97),
    "ppo_whitened": objective_of(advantage_estimator="ppo", gamma=0.99, lambd=0.95, normalize_advantages=True),
    "opd_opsm": objective_of(use_opd=True, opd_kl_coef=0.3, use_opsm=True, opsm_delta=0.01),
    "decoupled_interpolated": objective_of(correction="decoupled", proximal="interpolate", max_staleness=3),
    "cispo": objective_of(advantage_estimator="cispo", policy_loss="cispo"),
    "dppo_rloo": objective_of(advantage_estimator="rloo", policy_loss="dppo", dppo_delta=0.05),
}
VERSION = 7


def make_samples(rng: random.Random, groups: int, per_group: int) -> list[TrainSample]:
    """Ragged batch with siblings, masks, empty and removed samples, mixed versions."""
    gen = torch.Generator().manual_seed(rng.randrange(2**31))
    out = []
    for g in range(groups):
        for k in range(per_group):
            reward = rng.choice([0.0, 1.0, 0.5])
            for part in range(rng.choice([1, 1, 2])):
                n = rng.choice([0, 1, 3, 8, 12])
                old_tokens = rng.randint(0, n)

                def logp(n: int = n) -> torch.Tensor:
                    return -1.5 + 0.5 * torch.randn(n, generator=gen, dtype=torch.float64)

                out.append(
                    TrainSample(
                        sample_id=f"{g}/{k}.{part}",
                        group=g,
                        rollout=f"{g}/{k}",
                        response_length=n,
                        reward=reward,
                        loss_mask=[int(rng.random() < 0.8) for _ in range(n)],
                        remove=rng.random() < 0.1,
                        rollout_logp=logp(),
                        old_logp=logp(),
                        ref_logp=logp(),
                        teacher_logp=logp(),
                        values=logp(),
                        spans=[(VERSION - rng.randint(1, 4), old_tokens), (VERSION, n - old_tokens)],
                    )
                )
    return out


def new_logps(samples, seed):
    gen = torch.Generator().manual_seed(seed)
    return [-1.5 + 0.5 * torch.randn(s.response_length, generator=gen, dtype=torch.float64) for s in samples]


def train(cfg, samples, news, plan, norm, prepared):
    """Runs micro-batches `plan[rank] = [[sample, ...], ...]` -> (loss, gradients per sample, metrics)."""
    loss, grads, total = 0.0, {}, {}
    for micro_batches in plan:
        own = {}
        for ids in micro_batches:
            leaves = [news[i].clone().requires_grad_() for i in ids]
            packed = torch.cat([*leaves, torch.zeros(0, dtype=torch.float64)])
            mb = prepared.micro_batch(ids, packed, entropy=(packed * packed))
            part, sums = policy_loss(cfg, mb, norm)
            if cfg.advantage_estimator == "ppo":
                critic, more = value_loss(cfg.value_clip, packed, mb, norm)
                part, sums = part + critic, sums | more
            part.backward()
            loss += part.item()
            merge(own, sums)
            grads |= {i: leaf.grad for i, leaf in zip(ids, leaves, strict=True)}
        sums_vector, tops = flatten(own)
        total = merge(total, unflatten(own, sums_vector, tops))
    return loss, grads, finish(total, norm, per_token=cfg.reduction == "per_token")


@pytest.mark.parametrize("name", sorted(CONFIGS))
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_packing_order_and_ranks_change_nothing(name, seed):
    cfg = check(CONFIGS[name])
    rng = random.Random(seed)
    samples = make_samples(rng, groups=3, per_group=3)
    news = new_logps(samples, seed)
    everyone = list(range(len(samples)))
    whole = prepare_batch(cfg, samples, current_step=VERSION, dtype=torch.float64)
    norm = whole.norm()
    want = train(cfg, samples, news, [[everyone]], norm, whole)

    ranks = rng.randint(2, 3)
    shuffled = rng.sample(everyone, len(everyone))
    local = [shuffled[r::ranks] for r in range(ranks)]
    plan = []
    for mine in local:
        cuts = sorted(rng.sample(range(len(mine) + 1), 2))
        parts = [mine[: cuts[0]], mine[cuts[0] : cuts[1]], mine[cuts[1] :]]
        plan.append([p for p in parts if p])

    got = train(cfg, samples, news, plan, norm, whole)
    assert got[0] == pytest.approx(want[0], rel=1e-6, abs=1e-9)
    for i in everyone:
        torch.testing.assert_close(got[1][i], want[1][i], rtol=1e-6, atol=1e-9)
    assert got[2].keys() == want[2].keys()
    for key, value in want[2].items():
        assert got[2][key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_sample_order_in_the_batch_changes_nothing(seed):
    cfg = objective_of(advantage_estimator="reinforce_plus_plus", gamma=0.9, correction="tis")
    rng = random.Random(seed)
    samples = make_samples(rng, 2, 3)
    news = new_logps(samples, seed)
    order = rng.sample(range(len(samples)), len(samples))
    first = prepare_batch(cfg, samples, dtype=torch.float64)
    second = prepare_batch(cfg, [samples[i] for i in order], dtype=torch.float64)
    a = policy_loss(cfg, first.micro_batch(range(len(samples)), torch.cat(news)), first.norm())[0]
    b = policy_loss(cfg, second.micro_batch(range(len(samples)), torch.cat([news[i] for i in order])), second.norm())[0]
    assert a.item() == pytest.approx(b.item(), rel=1e-6, abs=1e-9)


def test_siblings_of_one_trajectory_weigh_as_much_as_the_whole():
    logp = torch.linspace(-2, -1, 6, dtype=torch.float64)
    cfg = objective_of(proximal="current")
    whole = [TrainSample("a", 0, 6, 1.0), TrainSample("b", 0, 6, 0.0)]
    split = [
        TrainSample("a.0", 0, 2, 1.0, rollout="a"),
        TrainSample("a.1", 0, 4, 1.0, rollout="a"),
        TrainSample("b", 0, 6, 0.0),
    ]
    gradients = []
    for samples in (whole, split):
        new = torch.cat([logp, logp]).requires_grad_()
        prepared = prepare_batch(cfg, samples, dtype=torch.float64)
        loss, _ = policy_loss(cfg, prepared.micro_batch(range(len(samples)), new), prepared.norm())
        loss.backward()
        gradients.append(new.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_partial_last_step_is_normalised_by_what_it_holds():
    cfg = objective_of(proximal="current", rewards_normalization=False)
    samples = [TrainSample(str(i), i, 4, 1.0) for i in range(5)]
    prepared = prepare_batch(cfg, samples)
    assert [prepared.norm(step).divisor for step in ([0, 1, 2], [3, 4])] == [3.0, 2.0]
    loss, _ = policy_loss(cfg, prepared.micro_batch([3, 4], torch.zeros(8)), prepared.norm([3, 4]))
    assert loss.item() == pytest.approx(-1.0)
