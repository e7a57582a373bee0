"""What lies exactly on an edge, and what a rejected token takes part in: golden vectors lie on no edge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.trainer.objective import TrainSample, check, policy_loss, prepare_batch
from actors.trainer.objective import mis as _mis  # noqa: F401  registers its correction
from actors.trainer.objective.corrections import CORRECTIONS, Correction, CorrectionInputs, opsm_mask
from actors.trainer.objective.kl import masked_kl
from actors.trainer.objective.losses import POLICY_LOSSES, Terms
from actors.trainer.objective.staleness import fresh, staleness
from tests.declared import objective_of

N = 4
ALL = torch.ones(N, dtype=torch.bool)
ONE_SAMPLE = torch.zeros(N, dtype=torch.int64)
COUNTS = torch.tensor([float(N)], dtype=torch.float64)


def numbers(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def corrected(log_ratio: Tensor, **settings: Any) -> Correction:
    cfg = check(objective_of(**settings))
    return CORRECTIONS[cfg.correction](cfg, CorrectionInputs(log_ratio, ALL, ONE_SAMPLE, COUNTS))


def losses_of(new: Tensor, old: Tensor, advantages: Tensor, **settings: Any) -> Tensor:
    """Loss by token."""
    cfg = check(objective_of(**settings))
    terms = Terms((new - old).nan_to_num(nan=0.0, neginf=-20.0), new, old, advantages, ALL, ONE_SAMPLE, COUNTS)
    return POLICY_LOSSES[cfg.policy_loss](cfg, terms).loss


@pytest.mark.parametrize("bounds", [{"tis_clip": 1.0}, {"tis_clip_low": 1.0}], ids=["upper", "lower"])
def test_icepop_keeps_a_ratio_that_is_the_bound(bounds: dict[str, float]) -> None:
    found = corrected(numbers(0.0, 0.0, -2.0, 0.5), correction="icepop", **bounds)
    assert found.weights is not None
    assert found.weights[:2].tolist() == [1.0, 1.0] and sum(found.weights[2:] > 0) == 1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 1.0), (1.0, 2.0)], ids=["upper", "lower"])
@pytest.mark.parametrize("of", ["tis", "rs"])
def test_mis_accepts_a_ratio_that_is_the_bound(of: str, low: float, high: float, level: str) -> None:
    wide = {"tis_lower_bound": 0.1, "tis_upper_bound": 9.0, "rs_lower_bound": 0.1, "rs_upper_bound": 9.0}
    bounds = {f"{of}_lower_bound": low, f"{of}_upper_bound": high, f"{of}_level": level}
    on = {"use_rs": True} if of == "rs" else {"tis_mode": "mask"}
    assert corrected(numbers(0, 0, 0, 0), correction="mis", **(wide | bounds | on)).mask.all()
    assert not corrected(numbers(5, 5, 5, 5), correction="mis", **(wide | bounds | on)).mask.any()


def test_a_veto_is_of_ratios_below_the_threshold_only() -> None:
    at = math.log(0.25)
    wide = {"correction": "mis", "use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 9.0, "rs_veto_threshold": 0.25}
    assert corrected(numbers(0, 0, at, 0), **wide).mask.all()
    assert not corrected(numbers(0, 0, at - 1e-9, 0), **wide).mask.any(), "one token rejects its whole sample"


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_the_ratio_of_a_sample_is_held_and_not_that_of_each_token(level: str) -> None:
    found = corrected(numbers(30, -30, 25, -25), correction="mis", tis_level=level, tis_upper_bound=9.0)
    assert found.weights is not None and found.weights.tolist() == [1.0] * N
    found = corrected(numbers(60, -20, -20, -20), correction="mis", tis_level=level, tis_upper_bound=9.0)
    assert found.weights is not None and found.weights.tolist() == [1.0] * N


def test_opsm_drops_a_sequence_that_has_moved_further_than_delta_and_not_one_just_as_far() -> None:
    x = CorrectionInputs(numbers(0, 0, 0, 0), ALL, ONE_SAMPLE, COUNTS)
    for drift, delta, dropped in ((0.0, 0.0, 0), (0.5, 0.5, 0), (0.5, 0.25, N), (-0.5, 0.25, 0)):
        kept, share = opsm_mask(numbers(-1, -1, -1, -1), numbers(*[-drift] * N), x, delta)
        assert (int((~kept).sum()), share.item()) == (dropped, dropped / N)


def test_cispo_has_two_widths() -> None:
    old = numbers(-1, -1, -1, -1)
    new = (old + numbers(-1.0, -0.3, 0.2, 1.0)).requires_grad_()
    losses_of(new, old, numbers(1, 1, 1, 1), advantage_estimator="cispo", eps_clip=0.4, eps_clip_high=0.5).sum().backward()
    assert new.grad is not None
    assert (-new.grad).tolist() == pytest.approx([0.6, math.exp(-0.3), math.exp(0.2), 1.5])


@pytest.mark.parametrize("loss", ["nll", "dppo", "cispo"])
def test_a_token_that_the_policy_gives_no_probability_has_a_finite_loss(loss: str) -> None:
    settings = {"advantage_estimator": "cispo"} if loss == "cispo" else {"policy_loss": loss}
    new = numbers(-1, -math.inf, -1, -1).requires_grad_()
    found = losses_of(new, numbers(-1, -1, -1, -1), numbers(1, 1, 1, 1), **settings)
    found.sum().backward()
    assert torch.isfinite(found).all() and new.grad is not None and torch.isfinite(new.grad).all()


def test_two_probabilities_of_0_have_no_distance_that_is_known() -> None:
    new, ref = numbers(-1, -math.inf, -1, -2), numbers(-1, -math.inf, -2, -1)
    kl, bad = masked_kl("low_var_kl", ALL, new, ref)
    assert bad.tolist() == [False, True, False, False] and kl[1] == 0 and (kl[2:] > 0).all()


def test_a_token_at_the_bound_is_fresh_on_either_side() -> None:
    steps = torch.tensor([1, 2, 3, 4, 5, 6])
    assert staleness(steps, 3).tolist() == [2, 1, 0, 1, 2, 3]
    assert fresh(steps, 3, 1).tolist() == [False, True, True, True, False, False], "a lost future is old on its other side"


def gradients(**settings: Any) -> tuple[Tensor, Tensor]:
    """Of the policy's log-probs and of the entropy, where MIS rejects the last token of two samples of 2."""
    cfg = check(objective_of(correction="mis", tis_mode="mask", tis_lower_bound=0.5, tis_upper_bound=2.0, **settings))
    given = {"rollout_logp": [-1.0, -1.0], "ref_logp": [-2.0, -2.0]}
    samples = [TrainSample(str(i), 0, 2, float(i), old_logp=[-1.0, last], **given) for i, last in enumerate((-1.0, -4.0))]
    prepared = prepare_batch(cfg, samples, dtype=torch.float64)
    new, entropy = numbers(-1.1, -1.1, -1.1, -4.1).requires_grad_(), numbers(1, 1, 1, 1).requires_grad_()
    loss, _ = policy_loss(cfg, prepared.micro_batch((0, 1), new, entropy=entropy), prepared.norm())
    loss.backward()
    none = torch.zeros(N, dtype=torch.float64)
    return none if new.grad is None else new.grad, none if entropy.grad is None else entropy.grad


def test_a_rejected_token_has_no_part_in_entropy_and_kl_either() -> None:
    of_policy, of_entropy = gradients(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2")
    assert (of_policy != 0).tolist() == (of_entropy != 0).tolist() == [True, True, True, False]
