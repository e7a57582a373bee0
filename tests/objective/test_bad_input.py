"""Bad data is masked, named and counted; it neither crashes the step nor leaks into the numbers of good samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from actors.trainer.objective import (
    MissingInputError,
    TrainSample,
    finish,
    policy_loss,
    prepare_batch,
)
from actors.trainer.objective.metrics import name_nonfinite
from actors.trainer.objective.staleness import StaleTokenError, assert_fresh
from tests.declared import objective_of

NAN = math.nan
TIS = objective_of(correction="tis", eps_clip_high=0.28)


def sample(name, n=4, reward=1.0, group=0, **kw):
    kw.setdefault("rollout_logp", np.full(n, -1.0, dtype=np.float32))
    kw.setdefault("old_logp", np.full(n, -1.0, dtype=np.float32))
    return TrainSample(name, group, n, reward, **kw)


def step(cfg, samples, new=None, **kw):
    prepared = prepare_batch(cfg, samples, **kw)
    new = torch.full((int(prepared.lengths.sum()),), -1.1) if new is None else new
    new.requires_grad_()
    norm = prepared.norm()
    loss, sums = policy_loss(cfg, prepared.micro_batch(range(len(samples)), new), norm)
    loss.backward()
    return prepared, loss, new.grad, finish(sums, norm)


def test_nan_engine_logprob_masks_its_sample_and_names_it():
    bad = np.array([-1.0, NAN, -1.0, -1.0])
    prepared, loss, grad, _ = step(TIS, [sample("good", reward=0.0), sample("bad", rollout_logp=bad)])
    assert prepared.flags["nan_rollout_logp"] == ["bad"]
    assert prepared.counts.tolist() == [4, 0]
    assert torch.isfinite(loss) and grad[4:].abs().sum() == 0 and grad[:4].abs().sum() > 0


def test_nan_at_a_masked_token_is_nobodys_business():
    bad = np.array([-1.0, NAN, -1.0, -1.0])
    mask = [1, 0, 1, 1]
    clean, *_ = step(TIS, [sample("a", reward=0.0), sample("b", loss_mask=mask)])
    dirty, loss, grad, _ = step(TIS, [sample("a", reward=0.0), sample("b", loss_mask=mask, rollout_logp=bad, old_logp=bad)])
    assert dirty.flags == clean.flags == {}
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


def test_nan_from_the_current_policy_leaves_the_loss_and_is_counted_and_named():
    samples = [sample("a", reward=0.0), sample("b")]
    new = torch.full((8,), -1.1)
    new[5] = NAN
    prepared, loss, grad, report = step(TIS, samples, new=new)
    assert report["nonfinite_tokens"] == 1 and torch.isfinite(loss) and grad[5] == 0
    mb = prepared.micro_batch([0, 1], new)
    assert name_nonfinite(new, mb.mask, mb.index, mb.sample_ids) == ["b"]


@pytest.mark.parametrize("reward", [None, NAN, math.inf])
def test_missing_reward_is_no_zero_reward(reward):
    prepared, *_ = step(TIS, [sample("a", reward=1.0), sample("b", reward=0.0), sample("c", reward=reward)])
    assert prepared.flags["missing_reward"] == ["c"]
    assert prepared.counts.tolist() == [4, 4, 0]
    assert prepared.rewards[0] == pytest.approx(math.sqrt(0.5), rel=1e-4)  # group of two, not of three


def test_trajectory_with_two_different_rewards_is_masked_and_named():
    torn = [sample("x.0", reward=1.0, rollout="x"), sample("x.1", reward=0.0, rollout="x"), sample("y", reward=0.5)]
    prepared, loss, _, _ = step(TIS, torn)
    assert prepared.flags["conflicting_rewards"] == ["x.0", "x.1"]
    assert "missing_reward" not in prepared.flags and torch.isfinite(loss)


def test_empty_responses_and_groups_of_one_are_harmless():
    prepared, loss, grad, _ = step(TIS, [sample("empty", n=0), sample("alone", n=3, group=1)])
    assert prepared.flags["empty_response"] == ["empty"]
    assert prepared.metrics["single_groups"] == 2 and prepared.metrics["zero_variance_share"] == 1
    assert loss.item() == 0 and grad.abs().sum() == 0


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("reduction", ["per_sample", "per_token", "constant"])
def test_a_batch_with_nothing_to_train_gives_zero_loss_and_says_so(whiten, reduction):
    cfg = objective_of(correction="tis", normalize_advantages=whiten, reduction=reduction)
    prepared, loss, grad, report = step(cfg, [sample("a", remove=True), sample("b", reward=0.0, loss_mask=[0] * 4)])
    assert prepared.flags["all_masked"] == ["a", "b"]
    assert loss.item() == 0 and grad.abs().sum() == 0
    assert all(math.isfinite(v) for v in report.values())


def test_no_samples_and_only_empty_samples_do_not_crash():
    for samples in ([], [sample("a", n=0), sample("b", n=0)]):
        _, loss, grad, report = step(TIS, samples)
        assert loss.item() == 0 and grad.numel() == 0 and all(math.isfinite(v) for v in report.values())


def test_lengths_of_1_and_100k_mix():
    cfg = objective_of(advantage_estimator="reinforce_plus_plus", gamma=0.999, correction="tis")
    long = sample("long", n=100_000)
    prepared, loss, grad, _ = step(cfg, [sample("short", n=1, reward=0.0), long])
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    assert prepared.returns[-1] == 1.0
    assert prepared.returns[-1001].item() == pytest.approx(0.999**1000, rel=1e-5)


def test_arrays_of_wrong_length_mask_the_sample():
    prepared, loss, _, _ = step(
        TIS,
        [
            sample("ok", reward=0.0),
            sample("short", rollout_logp=[-1.0]),
            sample("mask", loss_mask=[1]),
            sample("gone", rollout_logp=None),
        ],
    )
    assert prepared.flags["wrong_length_rollout_logp"] == ["short"]
    assert prepared.flags["wrong_length_loss_mask"] == ["mask"]
    assert prepared.flags["missing_rollout_logp"] == ["gone"]
    assert prepared.counts.tolist() == [4, 0, 0, 0] and torch.isfinite(loss)


def test_a_response_without_prompt_does_not_train_its_first_token():
    prepared, *_ = step(TIS, [sample("a", prompt_length=0), sample("b", prompt_length=3, reward=0.0)])
    assert prepared.flags["empty_prompt"] == ["a"]
    assert prepared.mask.tolist() == [False] + [True] * 7


def test_minus_infinite_logprobs_saturate():
    gone = np.array([-1.0, -math.inf, -1.0, -1.0])
    _, loss, grad, report = step(TIS, [sample("a", reward=0.0), sample("b", rollout_logp=gone)])
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    assert all(math.isfinite(v) for v in report.values())


def test_a_field_that_no_sample_has_is_an_error_that_names_it():
    with pytest.raises(MissingInputError, match="rollout_logp"):
        step(TIS, [sample("a", rollout_logp=None)])
    with pytest.raises(MissingInputError, match="values"):
        prepare_batch(objective_of(advantage_estimator="ppo"), [sample("a")])
    with pytest.raises(MissingInputError, match="current_step"):
        prepare_batch(objective_of(max_staleness=1), [sample("a")])


def test_over_age_tokens_are_masked_and_a_sample_with_nothing_left_is_named():
    cfg = objective_of(correction="tis", max_staleness=1)
    samples = [
        sample("mixed", spans=[(2, 1), (4, 3)], reward=0.0),
        sample("old", spans=[(1, 4)]),
        sample("unknown"),
        sample("bad", spans=[(5, 3)]),
        sample("new", spans=[(5, 4)], reward=0.0),
    ]
    prepared, _, grad, _ = step(cfg, samples, current_step=5)
    assert prepared.counts.tolist() == [3, 0, 0, 0, 4]
    assert prepared.flags["stale_tokens"] == ["mixed", "old"]
    assert prepared.flags["unknown_version"] == ["unknown", "bad"]
    assert prepared.flags["wrong_length_spans"] == ["bad"]
    assert set(prepared.flags["stale_sample"]) == {"old", "unknown", "bad"}
    assert grad[0] == 0 and grad[4:16].abs().sum() == 0
    assert prepared.metrics["staleness_max"] == 1


def test_the_last_guard_against_stale_gradients_raises():
    with pytest.raises(StaleTokenError, match="max_staleness=1"):
        assert_fresh(torch.tensor([1, 5]), torch.tensor([True, True]), 5, 1)


def test_read_only_buffers_and_half_precision_are_accepted():
    frozen = np.frombuffer(np.full(4, -1.0, dtype=np.float32).tobytes(), dtype=np.float32)
    half = torch.full((4,), -1.0, dtype=torch.bfloat16)
    mask = np.frombuffer(bytes([1, 1, 0, 1]), dtype=np.uint8)
    prepared, loss, _, _ = step(TIS, [sample("a", rollout_logp=frozen, old_logp=half, loss_mask=mask), sample("b", reward=0.0)])
    assert prepared.counts.tolist() == [3, 4] and prepared.flags == {} and torch.isfinite(loss)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_veto_threshold_of_0_vetoes_nothing(level):
    cfg = objective_of(correction="mis", use_rs=True, rs_level=level, rs_veto_threshold=0.0, rs_upper_bound=9.0)
    far = np.array([-1.0, -1.0, -60.0, -1.0], dtype=np.float32)
    none = objective_of(correction="mis", use_rs=True, rs_level=level, rs_upper_bound=9.0)
    _, loss, _, report = step(cfg, [sample("a", reward=0.0), sample("b", old_logp=far)])
    _, without, _, _ = step(none, [sample("a", reward=0.0), sample("b", old_logp=far)])
    assert torch.isfinite(loss) and loss == without
    assert report["mis_rejected_fraction"] > 0, "the bounds still reject"


def test_a_return_that_is_too_large_costs_its_group_though_the_advantage_is_small():
    cfg = objective_of(advantage_estimator="ppo", normalize_advantages=False)
    large = float(np.float32(1e16))
    samples = [sample("good", n=1, group="good", values=[0.5]), sample("bad", n=1, group="bad", reward=large, values=[large])]
    prepared = prepare_batch(cfg, samples)
    assert prepared.advantages.tolist() == [0.5, 0.0]
    assert prepared.flags["nonfinite_advantage"] == ["bad"] and prepared.counts.tolist() == [1, 0]


def opd(teacher):
    return [
        sample("good/0", reward=0.0, group="good", teacher_logp=np.full(4, -1.5)),
        sample("good/1", group="good", teacher_logp=np.full(4, -1.2)),
        sample("bad/0", reward=0.0, group="bad", teacher_logp=np.full(4, -1.2)),
        sample("bad/1", group="bad", teacher_logp=teacher),
    ]


def test_a_teacher_that_says_no_number_costs_that_sample_alone():
    prepared, *_ = step(objective_of(use_opd=True), opd(np.array([-1.0, NAN, -1.0, -1.0])))
    assert prepared.flags["nan_teacher_logp"] == ["bad/1"] and "nonfinite_advantage" not in prepared.flags
    assert prepared.counts.tolist() == [4, 4, 4, 0]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("value", [-math.inf, 3e38])
def test_an_advantage_that_is_not_finite_costs_its_group_alone_and_names_it(value, whiten):
    cfg = objective_of(use_opd=True, normalize_advantages=whiten)
    teacher = np.array([-1.0, value, -1.0, -1.0])
    prepared, loss, grad, _ = step(cfg, opd(teacher))
    clean, _, good, _ = step(cfg, opd(teacher)[:2])
    assert prepared.flags["nonfinite_advantage"] == ["bad/1"] and prepared.flags["sibling_of_nonfinite"] == ["bad/0"]
    assert prepared.counts.tolist() == [4, 4, 0, 0] and torch.isfinite(loss) and grad[8:].abs().sum() == 0
    assert torch.equal(prepared.advantages[:8], clean.advantages)
    assert torch.allclose(grad[:8] * 2, good), "the step still divides by all four"


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "reinforce_plus_plus", "maxrl"])
@pytest.mark.parametrize("reward", [1e39, -1e308])
def test_a_reward_beyond_all_measure_never_spoils_the_step(estimator, reward):
    cfg = objective_of(advantage_estimator=estimator)
    samples = [
        sample("a", reward=0.0), sample("b"), *(sample(f"c{i}", reward=reward, group=1) for i in range(3)), sample("d", group=1)
    ]  # fmt: skip
    prepared, loss, grad, _ = step(cfg, samples)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and grad[:8].abs().sum() > 0
    assert torch.isfinite(prepared.advantages[prepared.mask]).all()
    bounded = estimator == "grpo" or (estimator == "maxrl" and reward > 0)
    assert bounded or "nonfinite_advantage" in prepared.flags
    assert all(math.isfinite(v) for v in prepared.metrics.values())


def test_a_reference_that_rules_a_token_out_is_counted_where_its_kl_cannot_be_charged():
    cfg = objective_of(kl_coef=0.1, kl_loss_type="k1", advantage_estimator="reinforce_plus_plus_baseline")
    ref = np.array([-1.0, -math.inf, -1.0, -1.0])
    prepared, loss, *_ = step(cfg, [sample("a", reward=0.0, ref_logp=np.full(4, -1.0)), sample("b", ref_logp=ref)])
    assert prepared.flags["kl_not_finite"] == ["b"] and torch.isfinite(loss) and int(prepared.counts.sum()) == 8


def test_equal_names_of_trajectories_in_two_groups_are_two_trajectories():
    def samples(second):
        return [
            sample("a/0", reward=1.0, group="a", rollout=0), sample("a/1", reward=0.0, group="a", rollout=1),
            sample("b/0", reward=0.0, group="b", rollout=second), sample("b/1", reward=1.0, group="b", rollout=second + 1),
        ]  # fmt: skip

    same, loss, *_ = step(TIS, samples(0))
    other, wanted, *_ = step(TIS, samples(2))
    assert same.flags == {} and same.rollouts == other.rollouts == 4 and loss == wanted
    assert torch.equal(same.advantages, other.advantages)


@pytest.mark.parametrize("proximal", ["rollout", "interpolate", "current", "recompute"])
def test_the_engines_error_shows_also_where_the_loss_takes_the_engines_log_probs(proximal):
    cfg = objective_of(proximal=proximal, kl_coef=0.1 if proximal == "rollout" else 0.0)
    extra = {"ref_logp": np.full(4, -1.0), "spans": [(0, 4)]}
    far = [sample("a", reward=0.0, **extra), sample("b", rollout_logp=np.full(4, -5.0), **extra)]
    *_, report = step(cfg, far, new=torch.full((8,), -1.0), current_step=0)
    assert report["forward_logp_abs_diff"] == pytest.approx(2.0)
