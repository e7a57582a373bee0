"""docs/objective.md has a formula for all that can be named, and for nothing else."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from actors.trainer.objective import mis as _mis  # noqa: F401  registers its correction
from actors.trainer.objective.corrections import CORRECTIONS
from actors.trainer.objective.kl import KL_ESTIMATORS
from actors.trainer.objective.losses import POLICY_LOSSES
from actors.trainer.objective.reductions import REDUCERS
from actors.trainer.objective_estimators import ESTIMATORS

PAGE = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
NAME = re.compile(r"^\|(?: `--[^`]*` \|| \|)? `(\w+)` \|", re.MULTILINE)  # of a row, alone or behind its flag


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Advantages", ESTIMATORS),
        ("Policy losses", POLICY_LOSSES),
        ("Corrections", CORRECTIONS),
        ("KL", KL_ESTIMATORS),
        ("From tokens to a loss", REDUCERS),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_page_of_formulas_is_complete(section: str, names: Collection[str]) -> None:
    text = PAGE.partition(f"\n### {section}\n")[2].partition("\n#")[0]
    assert sorted(NAME.findall(text)) == sorted(names)
