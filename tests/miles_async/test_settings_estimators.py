"""What settings say of each estimator is what its record says: settings import nothing of the trainer's."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from actors.trainer.objective.advantages import AdvantageInputs, advantage_of
from actors.trainer.objective_estimators import ESTIMATORS
from miles_async.settings.derive import DISTILLATION, KL_CHARGED, WHITENED, needs_whole_groups
from miles_async.settings.groups.grpo import GrpoSettings
from tests.declared import objective_of


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_settings_know_the_estimators_as_their_records_have_them(name: str) -> None:
    record = ESTIMATORS[name]
    assert (name in WHITENED) == record.whitens and (name == DISTILLATION) == record.teacher
    assert needs_whole_groups(reward_hook=None, estimator=name, group_rm=False) == record.whole_groups
    assert {*get_args(get_type_hints(GrpoSettings)["advantage_estimator"])} == ESTIMATORS.keys()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_settings_know_which_estimators_take_the_kl_off_the_reward(name: str) -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0], dtype=torch.float64),
        mask=torch.ones(3, dtype=torch.bool),
        index=torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([3]),
        old_logp=logp,
        ref_logp=logp - 0.5,
        teacher_logp=logp - 0.1,
        values=torch.zeros(3, dtype=torch.float64),
    )
    made = [advantage_of(name)(objective_of(advantage_estimator=name, kl_coef=c), inputs)[0].tolist() for c in (0.0, 0.3)]
    assert (made[0] != made[1]) == (name in KL_CHARGED)
