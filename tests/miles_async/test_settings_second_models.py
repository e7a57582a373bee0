"""Critic and teacher in the settings: what is derived, what is refused, which directory is meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from miles_async.launcher.place import Place
from miles_async.launcher.plan import backend_config, room_specs
from miles_async.launcher.preflight import preflight
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings
from miles_async.settings.second_models import critic_dir, teacher_dir

OPD = {"advantage_estimator": "on_policy_distillation"}


def make(**fields: Any) -> RunSettings:
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math"}
    return settings_from(**{**base, **fields})


def model_at(path: Path, vocab: int = 20) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab, "max_position_embeddings": 4096}))
    (path / "tokenizer.json").write_text("{}")
    return path


def test_the_critic_learns_at_the_policys_rate_unless_it_has_its_own():
    assert make(lr=3e-4).optimizer.critic_lr == 3e-4
    assert make(lr=3e-4, critic_lr=1e-3).optimizer.critic_lr == 1e-3


@pytest.mark.parametrize("fields", [OPD, {"use_opd": True}], ids=["estimator", "penalty"])
def test_groups_of_equal_rewards_are_kept_where_a_teacher_speaks(fields):
    assert make().rollout.dynamic_sampling_filter_path == "check_reward_nonzero_std"
    assert make(**fields, opd_teacher_load="t").rollout.dynamic_sampling_filter_path == "none"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (OPD, ("opd_teacher_load", "--opd-teacher-load DIR")),
        ({"use_opd": True}, ("opd_teacher_load", "--opd-teacher-load DIR")),
        ({**OPD, "use_opd": True, "opd_teacher_load": "t"}, ("use_opd", "Keep one")),
        ({"opd_teacher_load": "t"}, ("opd_teacher_load = 't'", "nothing is distilled")),
        ({"opd_teacher_urls": ["http://h:1"]}, ("opd_teacher_urls", "nothing is distilled")),
        ({**OPD, "opd_teacher_urls": ["h:1"]}, ("opd_teacher_urls = 'h:1'", "http://")),
        ({**OPD, "opd_teacher_load": "t", "opd_teacher_urls": ["http://h:1"]}, ("opd_teacher_load", "one teacher")),
        ({**OPD, "opd_type": "megatron", "opd_teacher_urls": ["http://h:1"]}, ("opd_teacher_load", "without a teacher")),
        (
            {**OPD, "opd_teacher_urls": ["http://h:1"], "rollout_temperature": 0.7},
            ("rollout_temperature = 0.7", "temperature 1"),
        ),
        ({"opd_teacher_ckpt_step": 3}, ("opd_teacher_ckpt_step = 3", "opd_teacher_load")),
        ({"critic_load": "c"}, ("critic_load = 'c'", "--advantage-estimator ppo")),
        ({"num_critic_only_steps": 1}, ("num_critic_only_steps = 1", "--advantage-estimator ppo")),
        (
            {"advantage_estimator": "ppo", "num_critic_only_steps": 3},
            ("num_critic_only_steps = 3", "num_rollout = 3", "never"),
        ),
    ],
)
def test_a_broken_rule_says_field_value_and_remedy(fields, words):
    with pytest.raises(SettingsError) as caught:
        make(**fields)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_directory_of_checkpoints_stands_for_its_newest_one(tmp_path):
    for step in (4, 8):
        model_at(tmp_path / f"iter_{step:07d}")
    settings = make(**OPD, opd_teacher_load=str(tmp_path))
    with pytest.raises(SettingsError, match=r"config\.json"):
        teacher_dir(settings)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8\n")
    assert teacher_dir(settings) == str(tmp_path / "iter_0000008")
    chosen = make(**OPD, opd_teacher_load=str(tmp_path), opd_teacher_ckpt_step=4)
    assert teacher_dir(chosen) == str(tmp_path / "iter_0000004")
    plain = make(**OPD, opd_teacher_load=str(tmp_path / "iter_0000004"))
    assert teacher_dir(plain) == str(tmp_path / "iter_0000004")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    with pytest.raises(SettingsError, match="release"):
        teacher_dir(settings)


def test_models_that_cannot_work_are_refused_before_anything_starts(tmp_path):
    data = tmp_path / "x.jsonl"
    data.write_text('{"input": "1+1=", "label": "2"}\n')
    common = {"hf_checkpoint": str(model_at(tmp_path / "own")), "prompt_data": str(data), "label_key": "label"}
    small = str(model_at(tmp_path / "small", vocab=12))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    for fields, words in (
        ({**OPD, "opd_teacher_load": small}, ("12 tokens", "policy's 20", "opd_teacher_load")),
        ({**OPD, "opd_teacher_load": "nowhere"}, ("opd_teacher_load = 'nowhere'", "No such file")),
        ({**OPD, "opd_teacher_load": str(tmp_path / "torn")}, ("opd_teacher_load", "cannot be read")),
        ({"advantage_estimator": "ppo", "critic_load": "nowhere"}, ("critic_load = 'nowhere'", "No such file")),
    ):
        with pytest.raises(SettingsError) as caught:
            preflight(make(**common, **fields))
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)
    preflight(make(**common, **OPD, opd_teacher_load=str(model_at(tmp_path / "teacher"))))


def test_a_served_teacher_is_asked_by_the_reward_room():
    settings = make(**OPD, opd_teacher_urls=["http://h:1", "http://h:2"])
    assert settings.grpo.opd_type == "sglang" and teacher_dir(settings) == ""
    assert make(**OPD, opd_teacher_load="t").grpo.opd_type == "megatron"
    place = Place(run_dir="", model_dir="m", weights_dir="", blob_dir="", stop_token_ids=(), num_rollout=3, fingerprint="")
    [reward] = [spec for name, room, spec in room_specs(settings, place) if room == "reward"]
    assert reward.teacher_urls == ("http://h:1", "http://h:2")


def test_the_trainer_is_told_what_was_set(tmp_path):
    model = model_at(tmp_path / "m")
    settings = make(advantage_estimator="ppo", critic_load=str(model), critic_lr=2e-3, num_critic_only_steps=1, value_clip=0.3)
    place = Place(
        run_dir="", model_dir="m", weights_dir="", blob_dir="", stop_token_ids=(), num_rollout=3, fingerprint="",
        critic_dir=critic_dir(settings), teacher_dir=teacher_dir(settings),
    )  # fmt: skip
    config = backend_config(settings, place)
    assert (config.critic_load, config.critic_lr, config.num_critic_only_steps) == (str(model), 2e-3, 1)
    assert config.objective.value_clip == 0.3 and config.opd_teacher_load == ""
    assert critic_dir(make(advantage_estimator="ppo")) == ""
    penalised = make(use_opd=True, opd_kl_coef=0.5, opd_teacher_load=str(model))
    config = backend_config(penalised, Place(**{**_fields(place), "teacher_dir": teacher_dir(penalised)}))
    assert config.objective.use_opd and config.objective.opd_kl_coef == 0.5 and config.opd_teacher_load == str(model)


def _fields(place: Place) -> dict[str, Any]:
    return {name: getattr(place, name) for name in place.__struct_fields__}
