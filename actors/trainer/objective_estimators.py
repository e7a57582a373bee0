"""The advantage estimators: one record each, which with the function that it names is all there is of an estimator.

Importable without torch. Everything else asks the record: the objective which functions to call, the backend which models and
log-probs to have, the settings which rules to hold it to.
"""

from __future__ import annotations

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
    "reinforce_plus_plus": Estimator(advantage="discounted", whitens=True),
    "reinforce_plus_plus_baseline": Estimator(advantage="reward_minus_kl", baseline="centred", whitens=True),
    "ppo": Estimator(advantage="gae", critic=True),
    "on_policy_distillation": Estimator(advantage="distilled", teacher=True),
}
