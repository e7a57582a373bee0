"""Rules between fields: each refuses with the field, its value, the rule and what to do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.objective_estimators import ESTIMATORS
from miles_async.launcher.engines import engine_specs
from miles_async.launcher.place import Place
from miles_async.settings.checks import check_model
from miles_async.settings.derive import solve_four_knobs
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.rules import notes
from miles_async.settings.run import RunSettings

BASE: dict[str, Any] = {
    "hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math",
}  # fmt: skip

FUNCTION = {"rollout_function_path": "a.b", "num_generation_workers": 1, "sglang_server_concurrency": 256}


def make(**fields: Any) -> RunSettings:
    return settings_from(**{**BASE, **fields})


def without(name: str, **fields: Any) -> RunSettings:
    return settings_from(**{key: value for key, value in {**BASE, **fields}.items() if key != name})


knob = st.one_of(st.none(), st.integers(1, 64))


@given(st.integers(1, 64), st.integers(1, 16), knob, knob)
def test_four_knobs_fill_in_or_refuse(batch, n, gbs, steps):
    try:
        got_gbs, got_steps = solve_four_knobs({"rollout_batch_size": batch, "n_samples_per_prompt": n}, gbs, steps)
    except SettingsError as error:
        whole = {(None, steps): (batch * n) % (steps or 1), (gbs, None): (batch * n) % (gbs or 1)}
        assert whole.get((gbs, steps), 1 if batch * n != (gbs or 0) * (steps or 0) else 0)
        assert str(batch * n) in str(error)
    else:
        assert got_gbs * got_steps == batch * n
        assert gbs in (None, got_gbs) and steps in (None, got_steps)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "global_batch_size": 7},
            ("global_batch_size = 7", "24", "6"),
        ),
        (
            {"global_batch_size": 64, "num_steps_per_rollout": 3},
            ("64 * 3 = 192", "rollout_batch_size * n_samples_per_prompt = 32 * 8 = 256", "Leave out"),
        ),
        ({"num_steps_per_rollout": 3}, ("num_steps_per_rollout = 3", "256", "e.g. 2")),
        ({"over_sampling_batch_size": 8}, ("over_sampling_batch_size = 8", "rollout_batch_size = 32")),
        ({"max_weight_staleness": 2}, ("max_weight_staleness = 2", "--use-tis", "--no-correction")),
        ({"use_tis": True, "use_rollout_logprobs": True}, ("use_rollout_logprobs", "use_tis")),
        ({"tools": ("python",)}, ("tools", "--apply-chat-template")),
        ({"tools": ("search",), "apply_chat_template": True}, ("tool_corpus = (unset)", "both or neither")),
        ({"tools": ("python",), "custom_agent_function_path": "a.b"}, ("an agent of your own brings its own tools",)),
        ({"custom_agent_function_path": "a.b", "custom_generate_function_path": "c.d"}, ("it is a rollout program", "Keep one")),
        ({"custom_agent_function_path": "a.b", **FUNCTION}, ("it makes all samples", "Keep one")),
        ({**FUNCTION, "num_generation_workers": 2}, ("num_generation_workers = 2", "--use-router")),
        ({**FUNCTION, "sglang_server_concurrency": 64}, ("holds the 256 samples", "Set at least 256")),
        ({**FUNCTION, "pause_generation_mode": "abort"}, ("all its groups anew",)),
        ({"rollout_function_path": "miles.rollout.sft_rollout.generate_rollout"}, ("supervised", "--loss-type sft")),
        ({"use_tis": True, "no_correction": True}, ("no_correction", "use_tis")),
        ({"use_tis": True, "tis_clip_low": 3.0}, ("tis_clip_low = 3.0", "tis_clip = 2.0")),
        ({"use_rs": True}, ("use_rs", "--use-mis")),
        ({"use_opsm": True}, ("use_opsm", "leaves nothing out", "--keep-old-actor")),
        ({"advantage_estimator": "gspo", "policy_loss": "ppo"}, ("policy_loss = 'ppo'", "Leave it out")),
        ({"policy_loss": "cispo"}, ("policy_loss = 'cispo'", "advantage_estimator is 'grpo'")),
        ({"get_mismatch_metrics": True}, ("get_mismatch_metrics", "--use-tis")),
        ({"partial_rollout": False, "max_tokens_per_slice": 8}, ("max_tokens_per_slice = 8", "partial_rollout is off")),
        (
            {"max_weight_staleness": 1, "use_tis": True, "get_mismatch_metrics": True},
            ("max_weight_staleness = 1", "without a correction"),
        ),
        ({"use_mis": True, "tis_level": "geometric"}, ("tis_batch_normalize", "--no-tis-batch-normalize")),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True}, ("kl_coef = 0.1", "kl_loss_coef = 0.1")),
        ({"rm_type": "my.rewards.mine"}, ("rm_type = 'my.rewards.mine'", "--custom-rm-path")),
        ({"rm_type": "boxed_remote_rm"}, ("rm_url", "--rm-url")),
        ({"kl_coef": 0.1}, ("kl_coef = 0.1", "'grpo'", "--use-kl-loss --kl-loss-coef")),
        ({"kl_coef": 0.1, "advantage_estimator": "rloo"}, ("kl_coef = 0.1", "'rloo'")),
        ({"kl_loss_coef": 0.1}, ("kl_loss_coef = 0.1", "--use-kl-loss")),
        (
            {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False},
            ("normalize_advantages", "reinforce_plus_plus"),
        ),
        (
            {
                "n_samples_per_prompt": 1,
                "advantage_estimator": "reinforce_plus_plus",
                "dynamic_sampling_filter_path": "check_reward_nonzero_std",
            },
            ("dynamic_sampling_filter_path", "n_samples_per_prompt"),
        ),
        (
            {"max_weight_staleness": 1, "use_tis": True, "staleness_policy": "wait", "staleness_lookahead": 34},
            ("staleness_lookahead = 34", "max_weight_staleness = 1", "33 or less"),
        ),
        ({"rollout_max_context_len": 512, "rollout_max_prompt_len": 512}, ("rollout_max_prompt_len = 512", "context_len = 512")),
        ({"rollout_top_k": 0}, ("rollout_top_k = 0", "-1")),
        ({"rm_type": "remote_rm"}, ("rm_url", "remote_rm")),
        ({"rm_url": "localhost:80"}, ("rm_url = 'localhost:80'", "http://")),
        ({"rm_url": "http://me:hidden@scorer:80800/score?key=hidden"}, ("rm_url = 'http://scorer:80800/score'", "0-65535")),
        ({"rm_url": "http://scorer:0/score"}, ("rm_url", "port 0")),
        ({"judge_url": "http:///v1"}, ("judge_url", "names no host")),
        ({"reward_max_retries": 5}, ("reward_max_retries = 5", "5 deliveries", "--max-deliveries 6")),
        ({"buffer_filter_path": "not a path"}, ("buffer_filter_path = 'not a path'", "package.module.function")),
        ({"eval_interval": 5}, ("eval_interval = 5", "eval_prompt_data")),
        ({"eval_prompt_data": ["a", "b", "c"]}, ("eval_prompt_data", "NAME PATH")),
        ({"eval_prompt_data": ["a", "x", "a", "y"]}, ("eval_prompt_data", "one name")),
        ({"min_lr": 1.0}, ("min_lr = 1.0", "lr = 1e-06")),
        ({"engine": "external"}, ("engine = 'external'", "--rollout-external-engine-addrs")),
        ({"rollout_external_engine_addrs": ["h:1"]}, ("rollout_external_engine_addrs", "--engine external")),
        ({"sglang_router_ip": "10.0.0.1"}, ("sglang_router_port", "both")),
        ({"heartbeat_s": 30.0}, ("heartbeat_s = 30.0", "lease_s = 6.0")),
        ({"engine_token_deadline_s": 4000.0}, ("engine_token_deadline_s = 4000.0", "sglang_request_deadline_s")),
        ({"bus_url": "http://x"}, ("bus_url = 'http://x'", "redis://")),
        ({"name": "a/b"}, ("name = 'a/b'", "letters")),
        ({"save_debug_rollout_data": "x.msgpack"}, ("save_debug_rollout_data", "{rollout_id}")),
        ({"save_hf": "export"}, ("save_hf", "{rollout_id}")),
    ],
)
def test_a_broken_rule_says_field_value_and_remedy(fields, words):
    with pytest.raises(SettingsError) as caught:
        make(**fields)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_a_run_needs_an_end_and_a_reward():
    with pytest.raises(SettingsError, match="--num-rollout N or --num-epoch N"):
        without("num_rollout")
    with pytest.raises(SettingsError, match=r"nothing scores.*--rm-type math.*--custom-rm-path FILE.*--rm-url URL"):
        without("rm_type")
    for program in ({"custom_generate_function_path": "a.b"}, {"custom_agent_function_path": "a.b"}, FUNCTION):
        assert without("rm_type", **program).rollout.rm_type is None, "a program may give its samples their reward"
    taught = {"use_opd": True, "opd_teacher_load": "teacher"}
    assert without("rm_type", **taught).rollout.rm_type == "zero", "a teacher speaks of every token"
    with pytest.raises(SettingsError, match="nothing scores"):
        without("rm_type", loss_type="sft", n_samples_per_prompt=1, eval_prompt_data=("e", "e.jsonl"))
    assert without("rm_type", loss_type="sft", n_samples_per_prompt=1).rollout.rm_type is None
    assert without("num_rollout", num_epoch=2).rollout.num_epoch == 2
    assert without("rm_type", metadata_key="meta").rollout.rm_type is None


def test_a_wrong_bus_address_does_not_show_its_password():
    with pytest.raises(SettingsError) as caught:
        make(bus_url="http://me:secret@host")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("flag", ["use_tis", "use_icepop", "use_mis", "use_decoupled_loss", "use_rollout_logprobs"])
def test_each_correction_allows_stale_data_and_is_named(flag):
    s = make(max_weight_staleness=2, **{flag: True})
    assert s.flat.off_policy_correction == flag.removeprefix("use_").removesuffix("_loss")
    assert s.flat.max_open_groups == 96


def test_decoupled_and_mis_go_together():
    s = make(max_weight_staleness=2, use_mis=True, use_decoupled_loss=True)
    assert s.flat.off_policy_correction == "mis"


@pytest.mark.parametrize("other", [{"use_rollout_logprobs": True}, {"use_mis": True}])
def test_interpolation_is_refused_without_its_inputs(other):
    with pytest.raises(SettingsError, match="interpolate_proximal"):
        make(max_weight_staleness=2, interpolate_proximal=True, **other)
    make(max_weight_staleness=2, interpolate_proximal=True, use_mis=True, tis_batch_normalize=False)


def test_the_old_actor_is_a_correction_of_its_own():
    assert make(max_weight_staleness=2, keep_old_actor=True).grpo.keep_old_actor
    for other in ("use_rollout_logprobs", "interpolate_proximal"):
        with pytest.raises(SettingsError, match="keep_old_actor"):
            make(max_weight_staleness=2, keep_old_actor=True, **{other: True})


def test_waiting_takes_its_lookahead_off_the_admission_bound():
    s = make(max_weight_staleness=2, use_tis=True, staleness_policy="wait")
    assert (s.rollout.staleness_lookahead, s.flat.lookahead_versions, s.flat.max_open_groups) == (32, 1, 64)
    assert make(staleness_policy="wait").flat.max_open_groups == 32


@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 200),
    st.sampled_from(["auto", "whole", "wait", "drop"]),
)
def test_open_groups_always_hold_at_least_one_version(bound, batch, interval, ahead, policy):
    try:
        s = make(
            max_weight_staleness=bound, no_correction=True, rollout_batch_size=batch, staleness_lookahead=ahead,
            update_weights_interval=interval, staleness_policy=policy,
        )  # fmt: skip
    except SettingsError as error:
        assert error.field == "staleness_lookahead"
        return
    assert batch * interval <= s.flat.max_open_groups <= (bound + 1) * batch * interval


@pytest.mark.parametrize("estimator", sorted(name for name, record in ESTIMATORS.items() if record.baseline))
def test_a_group_of_one_has_nothing_to_be_compared_with(estimator):
    with pytest.raises(SettingsError) as refusal:
        make(n_samples_per_prompt=1, advantage_estimator=estimator)
    said = str(refusal.value)
    assert refusal.value.field == "n_samples_per_prompt" and "\n" not in said
    for words in (f"n_samples_per_prompt = 1: {estimator} compares", "every advantage is 0", "2 or more", "ppo",
                  "--disable-rewards-normalization"):  # fmt: skip
        assert words in said
    assert make(n_samples_per_prompt=2, advantage_estimator=estimator).rollout.n_samples_per_prompt == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "ppo"},
        {"advantage_estimator": "on_policy_distillation", "opd_teacher_urls": ["http://t:1"]},
        {"use_opd": True, "opd_teacher_urls": ["http://t:1"]},
        {"disable_rewards_normalization": True},
        {"custom_advantage_function_path": "a.advantage"},
        {"custom_loss_function_path": "a.loss"},
        {"custom_reward_post_process_path": "a.rewards"},
        {"custom_convert_samples_to_train_data_path": "a.data"},
        {"debug_rollout_only": True},
        {"loss_type": "sft", "rm_type": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_group_of_one_is_trained_where_nothing_is_compared(fields):
    s = make(n_samples_per_prompt=1, max_weight_staleness=0, **fields)
    assert s.rollout.dynamic_sampling_filter_path == "none"


def test_a_given_micro_batch_size_turns_packing_off():
    assert make().perf.use_dynamic_batch_size
    assert not make(micro_batch_size=4).perf.use_dynamic_batch_size


def test_hints_name_what_is_allowed_but_surprising():
    text = "\n".join(notes(make(num_epoch=1, rollout_max_response_len=9000).flat))
    for word in ("num_epoch = 1 has no effect", "strictly on-policy", "9000"):
        assert word in text
    wide = make(max_weight_staleness=1, no_correction=True, over_sampling_batch_size=128)
    assert "cut to 64" in "\n".join(notes(wide.flat))
    wave = make(over_sampling_batch_size=64)
    assert "cut to" not in "\n".join(notes(wave.flat)), "at bound 0 it is a wave larger than the batch"


@pytest.mark.parametrize("policy", ["split", "member"])
def test_groups_are_trained_in_parts_only_where_that_means_something(policy):
    with pytest.raises(SettingsError, match="no group has a turn to be split on"):
        make(staleness_policy=policy)
    with pytest.raises(SettingsError, match="maxrl needs all rewards of a group at once"):
        make(staleness_policy=policy, max_weight_staleness=2, no_correction=True, advantage_estimator="maxrl")
    assert make(max_weight_staleness=2, no_correction=True, advantage_estimator="maxrl").rollout.staleness_policy == "whole"
    assert make(max_weight_staleness=2, no_correction=True, staleness_policy=policy).rollout.staleness_policy == policy


def test_experts_are_replayed_from_one_source_and_where_there_are_any():
    with pytest.raises(SettingsError, match=r"use_routing_replay.*cannot go together with use_rollout_routing_replay"):
        make(use_routing_replay=True, use_rollout_routing_replay=True)
    several = {"num_steps_per_rollout": 2, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
    for without_pass in ({}, several | {"use_rollout_logprobs": True}):
        with pytest.raises(SettingsError, match=r"use_routing_replay.*there is no log-prob pass"):
            make(use_routing_replay=True, **without_pass)
    for settings in ({"use_rollout_routing_replay": True}, several | {"use_routing_replay": True}):
        with pytest.raises(SettingsError, match=r"routing_replay.*the model has no experts"):
            check_model(make(**settings))


def test_a_rollout_function_is_beside_one_worker_and_those_of_miles_beside_none() -> None:
    at = dict.fromkeys(("run_dir", "model_dir", "weights_dir", "blob_dir", "fingerprint"), "x")
    place = Place(**at, stop_token_ids=(), num_rollout=3)
    base = {"sglang_server_concurrency": 256, "num_generation_workers": 2, "use_router": True, "engine": "sglang"}

    def workers(path: str) -> dict[str, tuple[str, bool]]:
        found = make(rollout_function_path=path, **base)
        return {n: (s.rollout_function, s.takes_samples) for n, role, s in engine_specs(found, place) if role == "generation"}

    assert workers("a.b") == {"generation-0": ("a.b", True), "generation-1": ("", False)}
    own = "miles.rollout.sglang_rollout.generate_rollout"
    assert set(workers(own).values()) == {("", True)}
    assert any("is done here anyway" in note for note in notes(make(rollout_function_path=own).flat))


def test_a_function_replaces_the_rule_of_a_recipe_and_says_so() -> None:
    both = make(custom_rm_path="mine.score", rm_type="judge").flat  # which would need an address
    assert "rm_type = judge has no effect: custom_rm_path replaces it" in list(notes(both))


@pytest.mark.parametrize("path", ["rewards.mine", "my.rewards.mine", "rewards.py:mine", "/my code/rewards.py:mine"])
def test_a_function_is_named_as_load_hook_takes_it(path: str) -> None:
    assert without("rm_type", custom_rm_path=path).rollout.custom_rm_path == path


@pytest.mark.parametrize("path", ["rewards", "rewards.py:", "rewards.py:two words", ":mine", "my.rewards:mine"])
def test_what_names_no_function_is_refused_with_both_forms(path: str) -> None:
    with pytest.raises(SettingsError, match=r"package\.module\.function or file\.py:function"):
        without("rm_type", custom_rm_path=path)


def test_what_is_just_enough_is_taken_and_one_less_is_not():
    assert make(use_tis=True, tis_clip_low=2.0, tis_clip=2.0).grpo.tis_clip_low == 2.0
    assert make(rollout_batch_size=8, over_sampling_batch_size=8).rollout.over_sampling_batch_size == 8
    with pytest.raises(SettingsError, match="tis_clip_low"):
        make(use_tis=True, tis_clip_low=2.1, tis_clip=2.0)
    with pytest.raises(SettingsError, match="over_sampling_batch_size"):
        make(rollout_batch_size=8, over_sampling_batch_size=7)
