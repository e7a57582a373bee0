"""Values of samples whose group is in the batch in part: the estimator's transform over the rewards they bring."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.objective.rewards import normalize_group_rewards
from actors.trainer.objective_estimators import ESTIMATORS as RECORDS

ESTIMATORS = sorted(name for name, record in RECORDS.items() if record.baseline)
REWARDS = st.sampled_from([0.0, 1.0, 0.5, -1.0, 1 / 3])
GROUP = st.lists(REWARDS, min_size=2, max_size=8)


def by_hand(known: list[float], own: float, estimator: str, *, std: bool = True) -> float:
    """The value of one sample among `known`, written out."""
    n, mean = len(known), math.fsum(known) / len(known)
    if max(known) == min(known):
        return 0.0
    match estimator:
        case "rloo":
            rest = list(known)
            rest.remove(own)
            return own - math.fsum(rest) / len(rest)
        case "maxrl":
            return (own - mean) / mean if mean > 0 else 0.0
        case "reinforce_plus_plus_baseline":
            return own - mean
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / (n - 1))
    return (own - mean) / (sigma + 1e-6) if std else own - mean


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("std", [True, False])
@given(known=GROUP, taken=st.integers(1, 8), others=GROUP)
def test_a_part_has_the_values_of_the_transform_over_its_known_rewards(
    estimator: str, std: bool, known: list[float], taken: int, others: list[float]
) -> None:
    part = known[:taken]
    rewards = part + others
    groups = ["split"] * len(part) + ["whole"] * len(others)
    brought = [tuple(known)] * len(part) + [()] * len(others)
    made = normalize_group_rewards(rewards, groups, range(len(rewards)), estimator=estimator, std=std, known_rewards=brought)
    wanted = [by_hand(known, own, estimator, std=std) for own in part] + [
        by_hand(others, own, estimator, std=std) for own in others
    ]
    assert made.values == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce_plus_plus", "ppo"])
@given(groups=st.lists(GROUP, min_size=1, max_size=4))
def test_whole_groups_are_bit_equal_with_and_without_known_rewards(estimator: str, groups: list[list[float]]) -> None:
    rewards = [reward for group in groups for reward in group]
    ids = [at for at, group in enumerate(groups) for _ in group]
    plain = normalize_group_rewards(rewards, ids, range(len(ids)), estimator=estimator)
    for brought in ([()] * len(ids), [tuple(groups[at]) for at in ids]):
        again = normalize_group_rewards(rewards, ids, range(len(ids)), estimator=estimator, known_rewards=brought)
        assert [x.hex() for x in again.values] == [x.hex() for x in plain.values]


def test_early_and_late_samples_of_one_group_in_one_batch_each_have_their_own_rewards() -> None:
    made = normalize_group_rewards(
        [1.0, 0.0, 1.0, 0.0],
        ["g"] * 4,
        range(4),
        estimator="rloo",
        known_rewards=[(1.0, 0.0), (1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 0.0, 0.0)],
    )
    assert made.values == pytest.approx([1.0, -1.0, 0.5, -0.5])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_missing_reward_is_worth_nothing_and_leaves_its_siblings_values_alone(estimator: str, reward: float | None) -> None:
    known = (1.0, 0.0, 1.0)
    made = normalize_group_rewards([1.0, reward, 0.0], ["g"] * 3, range(3), estimator=estimator, known_rewards=[known] * 3)
    assert made.missing == [1] and made.values[1] == 0.0
    assert made.values[::2] == pytest.approx([by_hand(list(known), own, estimator) for own in (1.0, 0.0)])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "ppo"])
def test_without_a_group_baseline_a_part_keeps_its_raw_rewards(estimator: str) -> None:
    made = normalize_group_rewards([1.0, 0.5], ["g"] * 2, range(2), estimator=estimator, known_rewards=[(1.0, 0.5, 0.0)] * 2)
    assert made.values == [1.0, 0.5]


def test_switched_off_normalisation_leaves_a_part_alone_too() -> None:
    made = normalize_group_rewards([1.0], ["g"], [0], estimator="grpo", enabled=False, known_rewards=[(1.0, 0.0)])
    assert made.values == [1.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_known_rewards_are_worth_exactly_nothing(estimator: str) -> None:
    made = normalize_group_rewards([0.1], ["g"], [0], estimator=estimator, known_rewards=[(0.1, 0.1, 0.1)])
    assert made.values == [0.0]
