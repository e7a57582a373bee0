"""What a run began with is what it goes on with: names of runs, what a start under a known name says, what it refuses."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.checkpoint import TRACKER
from miles_async.launcher.began import check_began, keep_began, read_began, resumed
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import load, settings_from
from miles_async.settings.rules import RUN_NAME
from miles_async.settings.run import RunSettings
from miles_async.settings.run_names import fresh_name

NOON = datetime(2026, 10, 28, 12, 0, 1)


def model(folder: Path, fill: int = 1, words: str = "{}") -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(words)
    (folder / "model.safetensors").write_bytes(bytes([fill]) * 100_000)
    return str(folder)


def start(folder: Path, **fields: Any) -> RunSettings:
    base = {"prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math", "runs_dir": str(folder / "runs"), "name": "mine"}
    return settings_from(**base | fields)


def refused(settings: RunSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        check_began(settings)
    said = str(caught.value)
    assert "\n" not in said and "--name" in said + "--name" and "Nothing was changed." in said
    return said


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B-20261028-120001"),
        ("/models/my model/", "my-model-20261028-120001"),
        ("builtin:smollm2", "smollm2-20261028-120001"),
        ("../..", "run-20261028-120001"),
        ("模型", "run-20261028-120001"),
        ("x" * 300, "x" * 44 + "-20261028-120001"),
    ],
)
def test_a_run_without_a_name_is_called_after_its_model_and_the_time(tmp_path: Path, model: str, name: str) -> None:
    assert fresh_name(model, str(tmp_path), NOON) == name and RUN_NAME.fullmatch(name)
    for number in (2, 3):
        (tmp_path / fresh_name(model, str(tmp_path), NOON)).mkdir()
        assert fresh_name(model, str(tmp_path), NOON) == f"{name}-{number}", "never one that is there"


def test_without_a_name_two_starts_are_two_runs_and_a_settings_file_names_its_own(tmp_path: Path) -> None:
    one, file = model(tmp_path / "m"), tmp_path / "gsm.toml"
    first = start(tmp_path, hf_checkpoint=one, name=fresh_name(one, str(tmp_path / "runs")))
    given: dict[str, Any] = {"hf_checkpoint": one, "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math"}
    unnamed = [load(None, values=given | {"runs_dir": str(tmp_path / "runs")}).settings for _ in range(2)]
    for settings in unnamed:
        assert settings.launch.name.startswith("m-2") and not settings.run_dir.exists()
    first.run_dir.mkdir(parents=True)
    assert load(None, values=given | {"runs_dir": str(tmp_path / "runs")}).settings.run_dir != first.run_dir
    file.write_text(f'[model]\nhf_checkpoint = "{one}"\n')
    assert load(file, values={k: v for k, v in given.items() if k != "hf_checkpoint"}).settings.launch.name == "gsm"


def test_a_known_name_with_another_model_reward_template_tokenizer_or_data_is_refused(tmp_path: Path) -> None:
    """Measured before: the old model was trained and the new one never touched, with status 0."""
    one, two = model(tmp_path / "one"), model(tmp_path / "two", fill=2)
    first = start(tmp_path, hf_checkpoint=one)
    check_began(first)
    keep_began(first)
    check_began(first)
    check_began(start(tmp_path, hf_checkpoint=one, num_rollout=9, lr=1e-4))
    said = refused(start(tmp_path, hf_checkpoint=two))
    assert said.startswith("name = 'mine': the run of this name began 20") and f"hf_checkpoint was '{one}' and is '{two}'" in said
    assert "Choose another --name" in said and f"add --finetune --load {first.ckpt.save}" in said
    for part, other in {
        "another reward: rm_type was 'math' and is 'f1'": {"rm_type": "f1"},
        "another reward: custom_rm_path was (unset) and is 'a.py:f'": {"custom_rm_path": "a.py:f"},
        "another template: apply_chat_template was false and is true": {"apply_chat_template": True},
        "other data or group settings: prompt_data was 'x.jsonl' and is 'y.jsonl'": {"prompt_data": "y.jsonl"},
        "n_samples_per_prompt was 8 and is 4": {"n_samples_per_prompt": 4},
    }.items():
        assert part in refused(start(tmp_path, hf_checkpoint=one, **other))
    check_began(start(tmp_path, hf_checkpoint=two, name="other"))


def test_what_lies_under_a_path_counts_and_not_where_it_lies(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    keep_began(start(tmp_path, hf_checkpoint=one))
    check_began(start(tmp_path, hf_checkpoint=str(shutil.copytree(one, tmp_path / "moved"))))
    (tmp_path / "one" / "tokenizer.json").write_text('{"other": 1}')
    assert "another tokenizer: hf_checkpoint was" in refused(start(tmp_path, hf_checkpoint=one))
    (tmp_path / "one" / "tokenizer.json").write_text("{}")
    (tmp_path / "one" / "model.safetensors").write_bytes(b"\1" * 99_999 + b"\2")
    assert "another model: hf_checkpoint was" in refused(start(tmp_path, hf_checkpoint=one))


def test_checkpoints_of_another_run_are_not_resumed_under_another_model(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "two", fill=2)
    first = start(tmp_path, hf_checkpoint=one)
    keep_began(first)
    said = refused(start(tmp_path, hf_checkpoint=two, name="second", load=first.ckpt.save))
    assert said.startswith("load = ") and "Add --finetune" in said
    check_began(start(tmp_path, hf_checkpoint=one, name="second", load=first.ckpt.save))


def test_a_start_that_goes_on_says_what_from_which_step_and_since_when(tmp_path: Path) -> None:
    settings = start(tmp_path, hf_checkpoint=model(tmp_path / "one"))
    assert resumed(settings) == "", "a new run"
    keep_began(settings)
    assert "run mine goes on at step 0, without a checkpoint yet, begun 20" in resumed(settings)
    save = Path(settings.ckpt.save)
    (save / "iter_0000002").mkdir(parents=True)
    (save / TRACKER).write_text("2\n")
    said = resumed(settings)
    assert said.startswith(f"run mine RESUMES at step 2 from {save}, begun 20") and said.endswith(settings.model.hf_checkpoint)
    assert "begins again" in resumed(start(tmp_path, hf_checkpoint=settings.model.hf_checkpoint, no_save=True))


def test_the_beginning_is_written_once(tmp_path: Path) -> None:
    settings = start(tmp_path, hf_checkpoint=model(tmp_path / "one"))
    keep_began(settings)
    before = read_began(settings.run_dir)
    keep_began(start(tmp_path, hf_checkpoint=settings.model.hf_checkpoint, rm_type="f1"))
    assert before is not None and read_began(settings.run_dir) == before == read_began(Path(settings.ckpt.save))
    (settings.run_dir / "began.json").write_text(json.dumps([1]))
    assert read_began(settings.run_dir) is None
