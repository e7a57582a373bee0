"""Group reward normalisation: rewards of one prompt's trajectories against each other. Plain floats, whole batch.

A trajectory (rollout) split into several training samples counts once. With r_j the rewards of a group's n
trajectories: centred c_j = r_j - mean(r); standardised c_j / (s + 1e-6), s unbiased (n - 1). Groups whose
rewards are all equal (n = 1 included) get exactly 0: max == min is tested, never a rounded s > 0.
Reference section 4.5.

Where only a part of a group is in the batch, its samples bring rewards to compare with: of the siblings that had finished when
the group was split, and for a late sample its own. The same transform over these gives their values. So what a sample is compared
with does not depend on its own length, early or late, and the gradient has no bias by it (docs/bias.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from actors.trainer.objective_estimators import ESTIMATORS

STD_EPS = 1e-6


class RewardError(ValueError):
    """Rewards that contradict each other; the message names the trajectory."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """values: float per sample, 0.0 where the reward was missing. Counts are groups / samples of this call."""

    values: list[float]
    missing: list[int] = field(default_factory=list)
    """positions of samples without a finite reward; they are left out of the group's statistics"""
    groups: int = 0
    zero_variance_groups: int = 0
    single_groups: int = 0
    non_positive_mean_groups: int = 0
    """maxrl only: groups it is undefined for (mean reward < 0); they get 0"""


def standardised(r: Sequence[float]) -> list[float]:
    """GRPO: (r - mean) / (unbiased std + 1e-6). [n] -> [n]. DeepSeekMath, arXiv 2402.03300."""
    c = centred(r)
    std = math.sqrt(math.fsum(x * x for x in c) / (len(r) - 1))
    return [x / (std + STD_EPS) for x in c]


def centred(r: Sequence[float]) -> list[float]:
    """r - mean. Dr. GRPO (arXiv 2503.20783); baseline of REINFORCE++ (arXiv 2501.03262)."""
    mean = math.fsum(r) / len(r)
    return [x - mean for x in r]


def leave_one_out(r: Sequence[float]) -> list[float]:
    """RLOO: r_i - mean of the others = n/(n-1) (r_i - mean). arXiv 2402.14740."""
    n = len(r)
    return [x * n / (n - 1) for x in centred(r)]


def over_mean(r: Sequence[float]) -> list[float]:
    """MaxRL: (r - mean) / mean, so rare successes weigh 1/p; 0 when nothing succeeded. arXiv 2602.02710."""
    mean = math.fsum(r) / len(r)
    return [(x - mean) / mean if mean > 0 else 0.0 for x in r]


def baseline_of(estimator: str) -> Callable[[Sequence[float]], list[float]] | None:
    """The group transform that an estimator's record names; None: it takes raw rewards."""
    name = ESTIMATORS[estimator].baseline
    return globals()[name] if name else None


def _within(transform: Callable[[Sequence[float]], list[float]], r: Sequence[float]) -> list[float]:
    """The transform, or NaN for all where a sum is beyond float64; their samples are named and not trained."""
    try:
        return transform(r)
    except OverflowError:
        return [math.nan] * len(r)


def normalize_group_rewards(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    rollouts: Sequence[Hashable],
    *,
    estimator: str,
    std: bool = True,
    enabled: bool = True,
    known_rewards: Sequence[Sequence[float]] | None = None,
) -> GroupRewards:
    """One value per sample (three aligned sequences in, one out). `known_rewards`: by sample, empty for one whose group is the
    batch's; its own reward is among them.

    A missing reward is None, NaN or infinite: that sample gets 0 and is listed, its group goes on without it.
    Raises RewardError when two samples of one trajectory carry different rewards.
    """
    if not len(rewards) == len(groups) == len(rollouts):
        raise RewardError(f"{len(rewards)} rewards, {len(groups)} groups, {len(rollouts)} rollouts: lengths differ.")
    members: dict[Hashable, dict[Hashable, float]] = {}
    missing: list[int] = []
    brought = known_rewards or ((),) * len(rewards)
    for i, (reward, group, rollout) in enumerate(zip(rewards, groups, rollouts, strict=True)):
        known = members.setdefault(group, {})
        if reward is None or not math.isfinite(reward):
            missing.append(i)
            continue
        if known.setdefault(rollout, reward) != reward:
            raise RewardError(
                f"samples of trajectory {rollout!r} (group {group!r}) carry rewards {known[rollout]} and {reward}. "
                "A trajectory has one reward: give its samples the same."
            )
    transform = baseline_of(estimator) if enabled else None
    if transform is standardised and not std:
        transform = centred
    flat = single = negative = 0
    scaled: dict[Hashable, dict[Hashable, float]] = {}
    for group, known in members.items():
        values = list(known.values())
        constant = len(values) > 0 and max(values) == min(values)
        single += len(values) == 1
        flat += len(values) > 1 and constant
        if transform is None or not values:
            scaled[group] = known
            continue
        negative += transform is over_mean and sum(values) < 0
        scaled[group] = dict(zip(known, [0.0] * len(values) if constant else _within(transform, values), strict=True))
    absent = set(missing)
    values_of = [
        0.0 if i in absent else scaled[group][rollout] for i, (group, rollout) in enumerate(zip(groups, rollouts, strict=True))
    ]
    for i, (reward, others) in enumerate(zip(rewards, brought, strict=True)):
        if i not in absent and others and transform is not None and reward is not None and reward in others:
            constant = max(others) == min(others)
            values_of[i] = 0.0 if constant else _within(transform, others)[list(others).index(reward)]
    return GroupRewards(
        values=values_of,
        missing=missing,
        groups=len(members),
        zero_variance_groups=flat,
        single_groups=single,
        non_positive_mean_groups=negative,
    )
