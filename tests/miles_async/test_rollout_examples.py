"""The examples of docs/rollouts.md are tried as they stand there, as the launcher tries them before a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from actors.reward.sample import Sample
from miles_async.launcher.try_hooks import HookTrial, problem_of

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.M | re.S))
TRIED = {
    "my_reward": ("custom_rm_path", "reward"),
    "second_look": ("custom_generate_function_path", "rollout"),
    "guess": ("custom_generate_function_path", "rollout"),
    "digits": ("custom_generate_function_path", "rollout"),
    "whole_groups": ("rollout_function_path", "generate_rollout"),
    "from_miles": ("custom_generate_function_path", "generate"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_sound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field, function = TRIED[name]
    (tmp_path / f"{name}.py").write_text(EXAMPLES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    sample = Sample(sample_id="try/0", prompt="1+1=", response="2", label="2")
    paths = {field: f"{name}.{function}", "environment_path": "actors.environments.guess.Guess"}
    ask = HookTrial(paths=paths, sample=sample, reward_key="score", values={"rollout_batch_size": 2, "n_samples_per_prompt": 2})
    for asked in (field, "environment_path"):
        assert problem_of(asked, ask.paths[asked], ask) == ""


def test_all_examples_are_tried() -> None:
    assert EXAMPLES.keys() == TRIED.keys()
