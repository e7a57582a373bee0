"""The advantage estimators: one record each, which with the function that it names is all there is of an estimator.

Importable without torch, and imports msgspec alone: settings read it too. Everything else asks the record: the objective which
functions to call, the backend which models and log-probs to have, the settings which names there are and which rules to hold
them to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec


class Estimator(msgspec.Struct, frozen=True, kw_only=True):
    """How rewards become advantages. Functions are named: `advantage` in objective/advantages.py, `baseline` in
    objective/rewards.py, `policy_loss` in losses.POLICY_LOSSES."""

    advantage: str = "broadcast"
    """(config, inputs) -> (advantages [T], returns [T])"""
    baseline: str = ""
    """what is made of a group's rewards first; empty: nothing, rewards are taken raw. With one, a group's advantages cancel."""
    policy_loss: str = "ppo"
    """the loss that goes with it unless the settings name another"""
    charges_kl: bool = False
    """its advantage takes kl_coef times the KL to the reference off the reward"""
    whitens: bool = False
    """only defined with advantages whitened over the batch"""
    critic: bool = False
    """needs values, so a second trained model"""
    teacher: bool = False
    """takes a teacher's log-probs in place of rewards"""
    whole_groups: bool = False
    """parts of a group, each against the rewards known at its time, would give another gradient"""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(baseline="standardised"),
    "gspo": Estimator(baseline="standardised", policy_loss="gspo"),
    "cispo": Estimator(baseline="standardised", policy_loss="cispo"),
    "rloo": Estimator(baseline="leave_one_out"),
    "maxrl": Estimator(baseline="over_mean", whole_groups=True),
    "reinforce_plus_plus": Estimator(advantage="discounted", charges_kl=True, whitens=True),
    "reinforce_plus_plus_baseline": Estimator(advantage="reward_minus_kl", baseline="centred", charges_kl=True, whitens=True),
    "ppo": Estimator(advantage="gae", charges_kl=True, critic=True),
    "on_policy_distillation": Estimator(advantage="distilled", teacher=True),
}

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
"""Type of a setting that names one; a type checker cannot read it off the records."""
