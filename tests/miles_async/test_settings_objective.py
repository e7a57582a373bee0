"""Hooks, reduction, steps, self-check and trainer ranks in the settings: what is refused, and what reaches the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.backend import BackendConfig
from miles_async.cli import app
from miles_async.launcher.place import Place
from miles_async.launcher.plan import backend_config, objective_config, room_specs
from miles_async.settings.dump import dump_toml
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import load, settings_from
from miles_async.settings.rules import notes
from miles_async.settings.run import RunSettings
from tests.declared import PLACE
from tests.warm.launched import warmed

BASE: dict[str, Any] = {
    "hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math",
}  # fmt: skip
HOOKS = "tests.trainer.hook_samples."


def make(**fields: Any) -> RunSettings:
    return settings_from(**{**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"custom_loss_function_path": "reinforce"}, "package.module.function"),
        ({"custom_tis_function_path": "a.b"}, "--use-tis"),
        ({"loss_type": "custom_loss"}, "Leave out loss_type"),
        ({"loss_type": "policy_loss", "custom_loss_function_path": "a.b"}, "Leave out loss_type"),
        ({"custom_loss_function_path": "a.b", "use_tis": True}, "--no-correction"),
        ({"custom_loss_function_path": "a.b", "use_opsm": True, "num_steps_per_rollout": 2}, "--no-correction"),
        ({"actor_num_nodes": 2}, "--actor-num-gpus-per-node"),
        ({"actor_num_nodes": 2, "train_master": "a host"}, "HOST:PORT"),
        ({"actor_num_nodes": 5, "train_master": "h:1", "rollout_batch_size": 1, "n_samples_per_prompt": 4}, "or less"),
        (
            {
                "actor_num_gpus_per_node": 9,
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 4,
            },
            "Set it to 8 or less",
        ),
        (
            {"use_dynamic_global_batch_size": True, "global_batch_size": 64},
            "global_batch_size = 64: use_dynamic_global_batch_size = true makes one step of what arrives, up to "
            "rollout_batch_size * n_samples_per_prompt = 256. Leave out global_batch_size",
        ),
        ({"use_dynamic_global_batch_size": True, "global_batch_size": 7}, "Leave out global_batch_size"),
        ({"use_dynamic_global_batch_size": True, "num_steps_per_rollout": 2}, "Leave out num_steps_per_rollout"),
        (
            {"calculate_per_token_loss": True, "loss_agg_mode": "seq-mean-token-mean"},
            "loss_agg_mode = 'seq-mean-token-mean': calculate_per_token_loss = true says otherwise. Keep one",
        ),
        ({"calculate_per_token_loss": False, "loss_agg_mode": "token-mean"}, "calculate_per_token_loss = false"),
        (
            {"loss_scale_factor": 512.0},
            "loss_scale_factor = 512.0: loss_agg_mode = 'seq-mean-token-mean' divides by no constant. Set "
            "--loss-agg-mode seq-mean-token-sum-norm",
        ),
        ({"balance_data": False, "balance_by_flops": True}, "balance_data = false. Leave out --no-balance-data"),
        (
            {"micro_batch_size": 3, "actor_num_gpus_per_node": 4},
            "micro_batch_size = 3: global_batch_size = 256 makes 86 micro-batches, not a multiple of actor_num_gpus_per_node = 4",
        ),
        (
            {"micro_batch_size": 4, "actor_num_gpus_per_node": 4, "use_dynamic_global_batch_size": True},
            "Set it to 1, or use --use-dynamic-batch-size",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make(max_weight_staleness=0, **fields)
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.field in fields


def backend_of(**fields: Any) -> BackendConfig:
    """The trainer backend's settings that follow."""
    return backend_config(make(max_weight_staleness=0, **fields), PLACE)


@pytest.mark.parametrize(
    ("fields", "reduction", "constant"),
    [
        ({}, "per_sample", 1.0),
        ({"loss_agg_mode": "seq-mean-token-mean"}, "per_sample", 1.0),
        ({"calculate_per_token_loss": True}, "per_token", 1.0),
        ({"loss_agg_mode": "token-mean"}, "per_token", 1.0),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "rollout_max_response_len": 600}, "constant", 600.0),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1000}, "constant", 1000.0),
    ],
)
def test_the_reduction_reaches_the_objective(fields: dict[str, Any], reduction: str, constant: float) -> None:
    objective = backend_of(**fields).objective
    assert (objective.reduction, objective.loss_constant) == (reduction, constant)
    assert make(max_weight_staleness=0, **fields).grpo.calculate_per_token_loss == (reduction == "per_token")


@pytest.mark.parametrize(
    ("fields", "balance"),
    [
        ({}, "flops"),
        ({"balance_data": True}, "flops"),
        ({"balance_by_flops": True}, "flops"),
        ({"balance_by_flops": False}, "tokens"),
        ({"balance_data": False}, "none"),
    ],
)
def test_the_balance_reaches_the_backend(fields: dict[str, Any], balance: str) -> None:
    assert backend_of(**fields).balance == balance


def test_a_dynamic_global_batch_takes_what_agrees_with_it_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    assert not backend_of().use_dynamic_global_batch_size
    for agreeing in ({}, {"global_batch_size": 256}, {"num_steps_per_rollout": 1}):
        backend = backend_of(use_dynamic_global_batch_size=True, **agreeing)
        assert backend.use_dynamic_global_batch_size and backend.num_steps_per_rollout == 1
    s = make(max_weight_staleness=0, use_dynamic_global_batch_size=True, actor_num_gpus_per_node=3)
    assert any("leaves out 1 of 256" in note and "actor_num_gpus_per_node = 3" in note for note in notes(s.flat))
    (tmp_path / "run.toml").write_text(dump_toml(s))  # what a run writes down loads again, derived values included
    assert load(tmp_path / "run.toml").settings == s


def test_settings_reach_the_trainer() -> None:
    s = make(
        custom_loss_function_path="a.loss",
        custom_advantage_function_path="a.advantage",
        custom_pg_loss_reducer_function_path="a.reducer",
        custom_reward_post_process_path="a.rewards",
        actor_num_gpus_per_node=2,
        ci_test=True,
        max_weight_staleness=0,
    )
    assert s.grpo.loss_type == "custom_loss"
    cfg = objective_config(s)
    assert (cfg.custom_loss_function_path, cfg.custom_advantage_function_path) == ("a.loss", "a.advantage")
    assert (cfg.custom_pg_loss_reducer_function_path, cfg.custom_reward_post_process_path) == ("a.reducer", "a.rewards")
    assert cfg.custom_tis_function_path is None
    tis = objective_config(make(use_tis=True, custom_tis_function_path="a.tis"))
    assert (tis.correction, tis.custom_tis_function_path, tis.use_tis) == ("tis", "a.tis", True)

    place = Place(run_dir="r", model_dir="m", weights_dir="w", blob_dir="b", stop_token_ids=(), num_rollout=3, fingerprint="f")
    [trainer] = [room for name, _, room in room_specs(s, place) if name == "trainer"]
    assert (trainer.ranks, trainer.ci_test, trainer.backend.selfcheck_logprob_tolerance) == (2, True, 1e-4)
    for fields, tolerance in (({}, 0.1), ({"selfcheck_logprob_tolerance": 0.08}, 0.08)):
        assert backend_config(make(model_dtype="bfloat16", **fields), place).selfcheck_logprob_tolerance == tolerance


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"policy_loss": "dppo", "dppo_divergence": "kl", "dppo_delta": 0.05, "dppo_cap": 5.0, "max_weight_staleness": 1},
         {"policy_loss": "dppo", "dppo_divergence": "kl", "dppo_delta": 0.05, "dppo_cap": 5.0}),
        ({"policy_loss": "dppo"}, {"dppo_cap": 20.0}),
        ({"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0}, {"eps_clip": 1.0, "clip_high": 4.0}),
        ({"use_decoupled_loss": True, "decoupled_cap": 3.0}, {"correction": "decoupled", "decoupled_cap": 3.0}),
        ({"use_tis": True, "get_mismatch_metrics": True}, {"correction": "tis", "report_only": True, "use_tis": False}),
        ({"use_tis": True}, {"report_only": False}),
    ],
)  # fmt: skip
def test_what_the_objective_can_do_has_a_flag(fields: dict[str, Any], told: dict[str, Any]) -> None:
    cfg = objective_config(make(**{"max_weight_staleness": 0, **fields}))
    assert {name: getattr(cfg, name) for name in told} == told


def test_hooks_are_tried_before_anything_starts(
    tmp_path: Path, warm: Path | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    for name, value in warmed(warm, os.environ).items() if warm is not None else ():
        monkeypatch.setenv(name, value)
    (tmp_path / "x.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    words = ["train", "--dry-run", "--max-weight-staleness", "0"]
    words += [w for name, value in BASE.items() for w in (f"--{name.replace('_', '-')}", str(value))]

    assert app.main([*words, "--custom-reward-post-process-path", HOOKS + "plus_one"]) == 0
    assert HOOKS + "plus_one" in capsys.readouterr().out

    assert app.main([*words, "--custom-reward-post-process-path", HOOKS + "too_few_rewards"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    assert f"custom_reward_post_process_path = '{HOOKS}too_few_rewards': raw rewards are not 6 numbers" in error
    assert "(args, samples) -> (raw rewards, processed rewards)" in error

    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    assert app.main([*words, "--custom-reward-post-process-path", "dies.hook"]) == 2
    assert "status 7" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs"))


def test_without_hooks_the_command_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    code = "import sys; from miles_async.cli import app; app.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = [w for name, value in BASE.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--dry-run", "--max-weight-staleness", "0", *words],
        capture_output=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 0 and b"hf_checkpoint" in done.stdout, done.stderr


def test_what_rooms_wait_for_and_read_is_what_the_settings_say() -> None:
    place = Place(run_dir="r", model_dir="m", weights_dir="w", blob_dir="b", stop_token_ids=(), num_rollout=3, fingerprint="f")

    def rooms(**fields: object) -> dict[str, Any]:
        return {name: room for name, _, room in room_specs(make(**fields), place)}

    slow = rooms(update_weight_deadline_s=300.0, update_weight_wave_fraction=0.25)
    assert (slow["publisher"].activation_deadline_s, slow["publisher"].wave_fraction) == (300.0, 0.25)
    assert slow["generation-0"].control_deadline_s == 300.0
    both = {"reward_key": "a", "eval_reward_key": "b"}
    for fields, keys in (({}, ("", "")), ({"reward_key": "a"}, ("a", "a")), (both, ("a", "b"))):
        reward = rooms(**fields)["reward-0"]
        assert (reward.reward_key, reward.eval_reward_key, reward.skip_special_tokens) == (*keys, True)
    assert not rooms(rollout_skip_special_tokens=False)["reward-0"].skip_special_tokens
    assert "evaluator" not in rooms()
    assert [room.sets for name, _, room in room_specs(make(), place, evaluating=True) if name == "evaluator"] == [()]


def test_what_the_trainer_writes_lies_where_the_run_was_started_in() -> None:
    """A function that changed the folder of its process had the checkpoints written to another place."""
    place = Place(run_dir="r", model_dir="m", weights_dir="w", blob_dir="b", stop_token_ids=(), num_rollout=3, fingerprint="f")
    given = {"save": "ck", "load": "ck", "save_hf": "hf/{rollout_id}", "save_debug_rollout_data": "b/{rollout_id}"}
    given |= {"save_debug_train_data": "t/{rollout_id}_{rank}", "save_trigger_sentinel": "now"}
    trainer: Any = {name: room for name, _, room in room_specs(make(**given), place)}["trainer"]
    told = (trainer.save, trainer.load, trainer.save_hf, trainer.record, trainer.backend.save_debug_train_data)
    assert [os.path.relpath(path) for path in (*told, trainer.save_trigger_sentinel)] == [*map(str, given.values())]
    assert all(map(os.path.isabs, (*told, trainer.save_trigger_sentinel)))
