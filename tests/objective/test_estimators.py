"""Estimators, losses and corrections without golden vectors, against closed forms and brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.objective import (
    ObjectiveConfigError,
    TrainSample,
    check,
    finish,
    learning_rate,
    policy_loss,
    prepare_batch,
    rewards,
)
from actors.trainer.objective.advantages import advantage_of
from actors.trainer.objective.corrections import interpolated_proximal
from actors.trainer.objective.kl import approx_kl
from actors.trainer.objective.losses import POLICY_LOSSES, binary_divergence
from actors.trainer.objective.metrics import length_bias
from actors.trainer.objective.rewards import baseline_of, normalize_group_rewards
from actors.trainer.objective.segments import reverse_scan
from actors.trainer.objective_estimators import ESTIMATORS, Estimator
from tests.declared import objective_of


def normalised(rewards, estimator, **kw):
    n = len(rewards)
    return normalize_group_rewards(rewards, [0] * n, range(n), estimator=estimator, **kw)


def test_rloo_subtracts_the_mean_of_the_others():
    assert normalised([1.0, 0.0, 0.5], "rloo").values == pytest.approx([0.75, -0.75, 0.0])


def test_maxrl_divides_by_the_success_rate():
    assert normalised([1.0, 0.0, 0.0, 0.0], "maxrl").values == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert normalised([0.0, 0.0], "maxrl").values == [0.0, 0.0]
    below = normalised([-1.0, 0.0], "maxrl")
    assert below.values == [0.0, 0.0] and below.non_positive_mean_groups == 1


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12), st.sampled_from(["grpo", "rloo", "cispo"]))
def test_group_advantages_add_up_to_zero_and_equal_rewards_give_exactly_zero(rewards, estimator):
    assert sum(normalised(rewards, estimator).values) == pytest.approx(0, abs=1e-6 * (1 + max(map(abs, rewards))))
    assert normalised([rewards[0]] * 5, estimator).values == [0.0] * 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), max_size=5), st.floats(0, 1), st.integers(0, 1000))
def test_reverse_scan_equals_the_loop(lengths, factor, seed):
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = []
    for part in torch.split(x, lengths):
        carry, out = 0.0, []
        for value in reversed(part.tolist()):
            carry = value + factor * carry
            out.append(carry)
        want += reversed(out)
    got = reverse_scan(x, torch.tensor(lengths, dtype=torch.int64), factor)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def one_step(cfg, new, old, rewards=(1.0, 0.0), rollout=None, spans=None, version=None):
    n = new.numel() // 2
    rollout = old if rollout is None else rollout
    samples = [
        TrainSample(str(i), 0, n, r, old_logp=old[i * n : i * n + n], rollout_logp=rollout[i * n : i * n + n], spans=s)
        for i, (r, s) in enumerate(zip(rewards, spans or (None, None), strict=True))
    ]
    prepared = prepare_batch(cfg, samples, current_step=version, dtype=torch.float64)
    new = new.clone().requires_grad_()
    norm = prepared.norm()
    loss, sums = policy_loss(cfg, prepared.micro_batch([0, 1], new), norm)
    loss.backward()
    return loss.item(), new.grad, finish(sums, norm), prepared


def test_cispo_keeps_the_gradient_of_clipped_tokens_with_a_bounded_weight():
    old = torch.full((4,), -2.0, dtype=torch.float64)
    new = torch.tensor([-2.0, -1.0, -2.0, -1.0], dtype=torch.float64)  # ratio e on every second token
    cfg = check(objective_of(advantage_estimator="cispo", eps_clip=1.0, eps_clip_high=0.5))
    _, grad, report, prepared = one_step(cfg, new, old)
    a = prepared.advantages
    assert grad.tolist() == pytest.approx((-torch.tensor([1.0, 1.5, 1.0, 1.5]) * a / 4).tolist())
    assert report["pg_clipfrac"] == pytest.approx(0.5)


def test_dppo_blocks_only_updates_that_leave_the_trust_region():
    cfg = check(objective_of(policy_loss="dppo", dppo_delta=0.1))
    old = torch.tensor([0.5, 0.001, 0.5, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.8, 0.01, 0.2, 0.8], dtype=torch.float64).log()
    _, grad, report, prepared = one_step(cfg, new, old)
    assert prepared.advantages[0] > 0 > prepared.advantages[2]
    # Up and far: blocked. Ratio 10 of a rare token: kept (PPO would clip it). Down and far: blocked. Coming back: kept.
    assert (grad != 0).tolist() == [False, True, False, True]
    assert report["pg_clipfrac"] == pytest.approx(0.5)


@pytest.mark.parametrize("far", [5.0, 30.0], ids=["within the hold", "beyond it"])
def test_dppo_caps_the_pull_of_a_token_that_moves_back(far):
    cfg = check(objective_of(policy_loss="dppo", dppo_cap=3.0))
    old = torch.full((4,), -40.0, dtype=torch.float64)
    new = old + torch.tensor([0.5, 0.0, far, math.log(2.5)], dtype=torch.float64)
    loss, grad, report, prepared = one_step(cfg, new, old)
    assert prepared.advantages[0] > 0 > prepared.advantages[2]
    weights = torch.tensor([math.exp(0.5), 1.0, 3.0, 2.5], dtype=torch.float64)  # too rare to be blocked
    assert grad.tolist() == pytest.approx((-weights * prepared.advantages / 4).tolist())
    assert loss == pytest.approx(float((-weights * prepared.advantages).sum() / 4)) and report["pg_clipfrac"] == 0


def test_binary_divergences_match_their_definitions():
    p, q = (torch.tensor([x, 1.0], dtype=torch.float64).log() for x in (0.3, 0.2))
    kl = 0.2 * math.log(0.2 / 0.3) + 0.8 * math.log(0.8 / 0.7)
    assert binary_divergence("tv", p, q).tolist() == pytest.approx([0.1, 0.0])
    assert binary_divergence("kl", p, q).tolist() == pytest.approx([kl, 0.0], abs=1e-12)


def test_decoupled_weights_bring_the_gradient_back_to_the_behaviour_policy():
    rollout = torch.tensor([-1.0, -3.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-1.5, -1.0, -1.0, -4.0], dtype=torch.float64)
    cfg = check(objective_of(correction="decoupled", decoupled_cap=4.0))
    _, grad, report, prepared = one_step(cfg, old, old, rollout=rollout)  # new == old: ratio 1, weight prox/behaviour
    weights = torch.tensor([math.exp(-0.5), 4.0, 1.0, math.exp(-3.0)])  # no lower bound
    assert grad.tolist() == pytest.approx((-weights * prepared.advantages / 4).tolist())
    assert report["tis_clipfrac"] == pytest.approx(0.25)


def test_interpolated_proximal_follows_staleness():
    new, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-math.inf, -3.0, -3.0])
    got = interpolated_proximal(new, rollout, torch.tensor([0, 1, 4]))
    assert got.tolist() == pytest.approx([-1.0, -3.0, -1.5])


def test_fresh_tokens_need_no_correction_under_interpolation():
    rollout = torch.tensor([-1.0, -3.0, -1.0, -1.0], dtype=torch.float64)
    cfg = check(objective_of(correction="decoupled", proximal="interpolate", max_staleness=4))
    new = rollout + 0.1
    fresh = [[(9, 2)], [(9, 2)]]
    _, _, report, _ = one_step(cfg, new, rollout, rollout=rollout, spans=fresh, version=9)
    assert report["ppo_kl"] == 0 and report["pg_clipfrac"] == 0
    stale = [[(8, 2)], [(8, 2)]]
    _, _, report, _ = one_step(cfg, new, rollout, rollout=rollout, spans=stale, version=9)
    assert report["ppo_kl"] == pytest.approx(-0.1) and report["tis"] == pytest.approx(1.0)


def test_max_difference_is_a_maximum_not_a_mean():
    old = torch.full((4,), -1.0, dtype=torch.float64)
    rollout = old - torch.tensor([0.0, 0.25, 0.0, 0.5], dtype=torch.float64)
    _, _, report, _ = one_step(objective_of(correction="tis"), old, old, rollout=rollout)
    assert report["forward_logp_max_diff"] == pytest.approx(0.5)
    assert report["train_rollout_logprob_abs_diff"] == pytest.approx(0.1875)


def test_kl_coefficient_zero_only_monitors():
    base = objective_of(proximal="current")
    monitored = objective_of(proximal="current", use_kl_loss=True, kl_loss_type="k2")
    logp = torch.tensor([-1.0, -2.0, -1.5, -0.5], dtype=torch.float64)
    samples = [TrainSample(str(i), 0, 2, float(i), ref_logp=[-1.0, -1.0]) for i in range(2)]
    grads = []
    for cfg in (base, monitored):
        new = logp.clone().requires_grad_()
        prepared = prepare_batch(cfg, samples, dtype=torch.float64)
        loss, sums = policy_loss(cfg, prepared.micro_batch([0, 1], new), prepared.norm())
        loss.backward()
        grads.append(new.grad)
    assert torch.equal(*grads) and sums["kl_loss"] > 0


def test_low_var_kl_is_held_only_after_the_unbiased_factor():
    new, old, ref = (torch.tensor([x], dtype=torch.float64) for x in (-5.0, -2.0, -1.0))
    plain = math.exp(4) - 1 - 4
    assert approx_kl("low_var_kl", new, ref).item() == 10.0 < plain
    assert approx_kl("low_var_kl", new, ref, old).item() == pytest.approx(plain * math.exp(-3))


def test_length_bias_has_a_sign():
    assert length_bias([10, 30], [10]) == pytest.approx(-0.5)
    assert length_bias([], []) == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantage_estimator": "grpoo"}, "unknown"),
        ({"correction": "tisk"}, "unknown"),
        ({"policy_loss": "pp"}, "unknown"),
    ],
)
def test_unknown_names_are_refused(change, words):
    with pytest.raises(ObjectiveConfigError, match=words):
        check(objective_of(**change))


def test_schedules():
    rate = [learning_rate(i, lr=1.0, style="linear", total=12, warmup=2, min_lr=0.1) for i in range(15)]
    assert rate[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rate[7] == pytest.approx(0.55) and rate[12:] == pytest.approx([0.1] * 3)
    assert learning_rate(6, lr=2.0, style="cosine", total=10, warmup=2) == pytest.approx(1.0)
    assert learning_rate(500, lr=2.0, min_lr=0.5) == 2.0
    with pytest.raises(ValueError, match="unknown"):
        learning_rate(0, lr=1.0, style="square")


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_an_estimator_is_its_record_and_the_functions_that_it_names(name):
    record = ESTIMATORS[name]
    assert advantage_of(name).__name__ == record.advantage and record.policy_loss in POLICY_LOSSES
    baseline = baseline_of(name)
    assert (baseline is None) == (record.baseline == "") and (baseline is None or len(baseline([0.0, 1.0])) == 2)
    cfg = check(objective_of(advantage_estimator=name))
    assert cfg.whiten == record.whitens and cfg.needs_student_logp == record.teacher and cfg.policy_loss == record.policy_loss


def test_a_new_estimator_is_a_record_and_its_function(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "best_of_group", Estimator(baseline="best_only"))
    monkeypatch.setattr(rewards, "best_only", lambda r: [float(x == max(r)) for x in r], raising=False)
    samples = [TrainSample(f"a/{i}", "a", 2, float(i), old_logp=[-1.0, -1.0]) for i in range(3)]
    prepared = prepare_batch(check(objective_of(advantage_estimator="best_of_group")), samples)
    assert prepared.advantages.tolist() == [0, 0, 0, 0, 1, 1]
