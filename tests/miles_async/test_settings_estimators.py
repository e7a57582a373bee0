"""What settings say of each estimator is what its record says: settings import nothing of the trainer's."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from actors.trainer.objective_estimators import ESTIMATORS
from miles_async.settings.derive import DISTILLATION, WHITENED, needs_whole_groups
from miles_async.settings.groups.grpo import GrpoSettings


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_settings_know_the_estimators_as_their_records_have_them(name: str) -> None:
    record = ESTIMATORS[name]
    assert (name in WHITENED) == record.whitens and (name == DISTILLATION) == record.teacher
    assert needs_whole_groups(reward_hook=None, estimator=name) == record.whole_groups
    assert {*get_args(get_type_hints(GrpoSettings)["advantage_estimator"])} == ESTIMATORS.keys()
