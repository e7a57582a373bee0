"""--eval-config: each held-out set is measured as its own table says, else as the defaults of the file, else as the settings do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.launcher.eval_sets import eval_sets
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from

YAML = """
eval:
  defaults: {max_response_len: 64, rm_type: math}
  datasets:
    - {name: aime, path: aime.jsonl, n_samples_per_eval_prompt: 16, temperature: 0.6}
    - {name: gpqa, path: gpqa.jsonl, rm_type: gpqa, label_key: letter, metadata_overrides: {level: 3}}
"""


def of(file: Path, **more: object) -> list[object]:
    settings = settings_from(
        hf_checkpoint="m", prompt_data="x.jsonl", num_rollout=3, rm_type="f1", eval_config=str(file), eval_interval=2, **more
    )
    return list(eval_sets(settings))


def test_a_set_has_its_own_then_the_defaults_then_the_settings(tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text(YAML)
    aime, gpqa = of(tmp_path / "eval.yaml", eval_temperature=0.1, eval_top_p=0.9)
    assert (aime.n_samples_per_eval_prompt, aime.temperature, aime.max_response_len, aime.top_p) == (16, 0.6, 64, 0.9)
    assert (gpqa.temperature, gpqa.label_key, gpqa.metadata) == (0.1, "letter", {"level": 3, "rm_type": "gpqa"})
    tables = {"eval": {"datasets": [{"name": "a", "path": "a.jsonl"}]}}
    (tmp_path / "eval.json").write_text(json.dumps(tables))  # JSON is YAML
    assert [one.name for one in of(tmp_path / "eval.json")] == ["a"]
    (tmp_path / "eval.toml").write_text('[[eval.datasets]]\nname = "b"\npath = "b.jsonl"\n')
    assert [one.name for one in of(tmp_path / "eval.toml")] == ["b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eval: {datasets: [{name: a, path: p, temprature: 1}]}", "a has no temprature.*Did you mean temperature"),
        ("eval: {datasets: [{name: a}]}", "missing required field `path`"),
        ("eval: {datasets: [{name: a, path: p, temperature: hot}]}", "Expected `float`"),
        ("eval: {datasets: [{name: a, path: p}, {name: a, path: q}]}", "two data sets have one name"),
        ("eval: {datasets: []}", "names no data set"),
        ("[1]", "must hold eval.datasets"),
        ("a: [", "neither TOML"),
        ("a: !!bool x", "neither TOML"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "eval.yaml").write_text(text)
    with pytest.raises(SettingsError, match=says):
        of(tmp_path / "eval.yaml")
