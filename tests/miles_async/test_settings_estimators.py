"""An estimator is its record and the function that it names: settings, rules and objective read all else off the record."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.trainer.objective.advantages import AdvantageInputs, advantage_of
from actors.trainer.objective_estimators import ESTIMATORS
from tests.declared import objective_of
from tests.floors.tree import PACKAGES, ROOT

RECORDS, FUNCTIONS = "actors/trainer/objective_estimators.py", "actors/trainer/objective/advantages.py"
HEAD = "ESTIMATORS: dict[str, Estimator] = {"
RECORD = HEAD + '"doubled": Estimator(advantage="doubled", policy_loss="gspo", whitens=True, whole_groups=True),'
FUNCTION = """

def doubled(cfg, x):
    a = 2 * x.rewards.to(torch.float64)[x.index]
    return a, a.clone()
"""
ASKED = """
import torch
from actors.trainer.objective.advantages import AdvantageInputs, advantage_of
from actors.trainer.objective.rules import check
from miles_async.launcher.plan import objective_config
from miles_async.settings.load import settings_from

words = dict(hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=3, rm_type="math")
s = settings_from(advantage_estimator="doubled", **words)
print(s.flat.normalize_advantages, s.flat.policy_loss, s.flat.staleness_policy)
cfg = check(objective_config(s))
two = torch.ones(2, dtype=torch.int64)
inputs = AdvantageInputs(rewards=torch.tensor([3.0]), mask=two > 0, index=two - 1, lengths=torch.tensor([2]))
print(cfg.whiten, advantage_of(cfg.advantage_estimator)(cfg, inputs)[0].tolist())
"""


def test_a_new_estimator_touches_two_files(tmp_path: Path) -> None:
    """In a copy of the code: settings offer it, rules and derived settings follow its record, the objective computes it."""
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "web", "configs"))
    for name, old, new in ((RECORDS, HEAD, RECORD), (FUNCTIONS, "\n\ndef advantage_of", FUNCTION + "\n\ndef advantage_of")):
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1, name
        (tmp_path / name).write_text(text.replace(old, new))
    words = [sys.executable, "-c", ASKED]
    done = subprocess.run(words, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["True gspo whole", "True [6.0, 6.0]"], done.stderr[-2000:]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_record_says_whether_the_kl_is_taken_off_the_reward(name: str) -> None:
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
    assert (made[0] != made[1]) == ESTIMATORS[name].charges_kl
