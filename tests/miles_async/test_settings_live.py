"""One rule set behind two doors: what a run may be started with and what a running run may be changed to are the same, and
what was accepted the trainer takes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from actors.filter.judges import JUDGES
from actors.generation.engines.records import ENGINES
from actors.partial.decide import POLICIES
from actors.reward.rules import RULES
from actors.reward.scorer import BOXED, OTHERS
from actors.runtime.transports.records import TRANSPORTS
from actors.trainer.objective_estimators import ESTIMATORS
from actors.trainer.training.ranked import LIBRARIES
from bus import Bus
from bus.errors import KnobRejected
from bus.knobs.kinds import checked
from bus.knobs.live import pending, propose, publish_initial, read_history, values_at
from bus.knobs.plans import plan
from bus.topology import KNOBS
from miles_async.launcher.plan import objective_config
from miles_async.launcher.prepare import live_kinds
from miles_async.settings.catalog import catalog, live_fields
from miles_async.settings.errors import SettingsError, SeveralErrors
from miles_async.settings.live import check_patch, initial_values, whole
from miles_async.settings.load import settings_from
from miles_async.settings.rules import check_rules
from miles_async.settings.run import RunSettings
from tests.miles_async.console_data import config

BASE: dict[str, Any] = {
    "hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math", "name": "r",
}  # fmt: skip
SOME: dict[str, list[Any]] = {
    "rollout_batch_size": [1, 2, 6, 32],
    "n_samples_per_prompt": [1, 2, 8],
    "num_steps_per_rollout": [1, 2, 3],
    "over_sampling_batch_size": [0, 2, 8, 40],
    "max_weight_staleness": [0, 1, 3, 2000],
    "staleness_policy": ["auto", "split", "whole", "wait", "drop", "hope"],
    "staleness_lookahead": [1, 8, 60],
    "update_weights_interval": [1, 3],
    "advantage_estimator": ["grpo", "maxrl", "gspo", "reinforce_plus_plus", "ppo", "cispo"],
    "use_tis": [True],
    "use_mis": [True],
    "use_icepop": [True],
    "use_decoupled_loss": [True],
    "use_rollout_logprobs": [True],
    "keep_old_actor": [True],
    "interpolate_proximal": [True],
    "use_opsm": [True],
    "no_correction": [True],
    "tis_batch_normalize": [False],
    "tis_level": ["token", "geometric"],
    "tis_clip": [0.4, 2.0, -1.0],
    "tis_clip_low": [0.0, 0.5],
    "use_kl_loss": [True],
    "kl_loss_coef": [0.0, 0.1],
    "kl_coef": [0.0, 0.2],
    "eps_clip": [0.2, 0.9, 1.0],
    "eps_clip_high": [0.2, 3.0],
    "loss_agg_mode": ["token-mean", "seq-mean-token-sum-norm"],
    "lr": [0.0, 1e-6, 0.1, float("nan")],
    "min_lr": [0.0, 1e-3],
    "clip_grad": [0.0, 1.0],
    "entropy_coef": [0.0, 0.1],
    "rollout_temperature": [0.0, 0.7],
    "rollout_max_response_len": [4, 64, 1024],
    "rollout_max_context_len": [64, None],
    "eval_interval": [None, 5],
    "eval_prompt_data": [("held", "out.jsonl")],
    "save_interval": [1, 0, 1 << 70],
    "dynamic_sampling_filter_path": ["none", "check_reward_nonzero_std", "foo"],
    "actor_num_gpus_per_node": [1, 3],
    "micro_batch_size": [1, 2],
    "sglang_server_concurrency": ["auto", 4, 64],
    "sglang_concurrency_min": [1, 9],
    "sglang_concurrency_max": [None, 8],
    "max_masked_fraction": [None, 0.1],
    "tail_slots": [None, 2, 600],
    "tail_after_tokens": [None, 2, 2000],
    "num_generation_workers": [1, 3],
    "max_tokens_per_slice": [None, 1],
}
LIVE = {name: values for name, values in SOME.items() if name in live_fields()}


def drawn(space: dict[str, list[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """A few settings with a value each."""
    names = st.lists(st.sampled_from(sorted(space)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: st.sampled_from(space[name]) for name in chosen}))


def start(**fields: Any) -> RunSettings:
    return settings_from(**{**BASE, **fields})


def values_of(**fields: Any) -> dict[str, Any]:
    """As the knob stream of a run holds them."""
    values: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(initial_values(start(**fields))))
    return values


def refused(patch: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(SettingsError) as refusal:
        check_patch(values_of(**fields), patch)
    assert str(refusal.value).endswith("Nothing was changed.")
    return str(refusal.value)


@given(drawn(SOME, 9), drawn(LIVE, 4))
@hypothesis_settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much], deadline=None)
def test_a_start_and_a_patch_have_one_verdict_and_what_passes_the_trainer_takes(
    fields: dict[str, Any], patch: dict[str, Any]
) -> None:
    try:
        settings = start(**fields)
    except SettingsError:
        assume(False)
    values = values_of(**fields)
    told = {n: v for n, v in settings.flat.values.items() if n != "global_batch_size"}  # which follows
    try:
        after, said = start(**{**told, **patch}), ""
    except SettingsError as error:
        after, said = settings, str(error)
    try:
        changes = check_patch(values, patch)
    except SettingsError as error:
        assert said, f"tune refuses what a start accepts: {error}"
        return
    assert not said, f"tune accepts what a start refuses: {said}"
    assert whole(values | changes).values == after.flat.values | {"bus_url": None}
    for name, value in changes.items():
        checked(name, value, live_kinds())
    live = {name: value for name, value in changes.items() if name in objective_config(settings).__struct_fields__}
    assert msgspec.structs.replace(objective_config(settings), **live) == objective_config(after)


GARBAGE: tuple[tuple[str, Any], ...] = (
    *(("nonsense", 1), ("lr", "fast"), ("lr", None), ("n_samples_per_prompt", 3), ("rm_type", "os.system"), ("", "")),
    *(("max_weight_staleness", -1), ("staleness_policy", 7), ("rollout_batch_size", 1 << 70), ("wandb_key", "x")),
)


@pytest.mark.parametrize("seed", [1, 2])
async def test_of_hundreds_of_random_patches_no_invalid_one_has_any_effect(redis_url: str, run_name: str, seed: int) -> None:
    draw, accepted, refusals = random.Random(seed), 0, 0
    async with Bus(config(redis_url, run_name)) as bus:
        await publish_initial(bus, values_of(use_tis=True, max_weight_staleness=1), live_kinds())
        history = await read_history(bus)
        for _ in range(120):
            names = draw.sample(sorted(LIVE), draw.randint(1, 3))
            patch = {name: draw.choice(LIVE[name]) for name in names}
            if draw.random() < 0.3:
                patch |= dict([draw.choice(GARBAGE)])
            before, state = await bus.scan_all(KNOBS), await bus.state("knob_epoch")
            at_step = draw.choice((None, None, draw.randint(2, 9)))
            say: dict[str, Any] = {"author": "me", "check": check_patch}
            try:
                made = await (propose(bus, patch, **say) if at_step is None else plan(bus, patch, at_step=at_step, **say))
            except (SettingsError, KnobRejected) as error:
                refusals += 1
                assert "\n" not in str(error) or isinstance(error, SeveralErrors)
                assert (await bus.scan_all(KNOBS), await bus.state("knob_epoch")) == (before, state)
                continue
            accepted += 1
            history.append(made)
            live = dict(values_at(history, made.epoch).values)
            for waiting in pending(history):  # the whole holds now, and after each plan
                check_rules(whole(live))
                live |= waiting.planned or {}
            check_rules(whole(live))
        assert await read_history(bus) == history
    assert accepted > 20 and refusals > 40, "the draw is no test of either"


def test_a_clip_below_its_lower_bound_is_refused_before_the_trainer_sees_it() -> None:
    assert "tis_clip_low = 0.5: above tis_clip = 0.4" in refused({"tis_clip": "0.4"}, use_tis=True, tis_clip_low=0.5)


def test_the_old_actor_is_a_correction_for_whoever_asks() -> None:
    fields = {"keep_old_actor": True, "max_weight_staleness": 1}
    assert check_patch(values_of(**fields), {"max_weight_staleness": "3"}) == {"max_weight_staleness": 3}


@pytest.mark.parametrize(
    ("patch", "fields", "says"),
    [
        ({"rollout_batch_size": "5"}, {"num_steps_per_rollout": 4, "n_samples_per_prompt": 2}, "does not divide"),
        ({"rollout_batch_size": 40}, {"over_sampling_batch_size": 33}, "smaller than rollout_batch_size = 40"),
        ({"over_sampling_batch_size": 3}, {}, "Set it to 32 or more"),
        ({"max_weight_staleness": 1}, {}, "off-policy data without a correction"),
        ({"max_weight_staleness": 2000}, {"use_tis": True}, "must be a whole number >= 0 and <= 1024"),
        ({"kl_loss_coef": 0.1}, {}, "--use-kl-loss"),
        ({"dynamic_sampling_filter_path": "nonzero_std"}, {"n_samples_per_prompt": 1, "advantage_estimator": "ppo"}, "drops every"),
        ({"dynamic_sampling_filter_path": "os.system"}, {}, "cannot be given to a running run"),
        ({"eval_interval": 5}, {}, "eval_prompt_data is empty"),
        ({"lr": 1e-9}, {"min_lr": 1e-7}, "min_lr = 1e-07: above lr"),
        ({"lr": "free"}, {}, "must be a number >= 0"),
        ({"lr": "inf"}, {}, "<= 1000"),
        ({"lr": "1e-320"}, {}, "no number of single precision"),
        ({"rs_lower_bound": 1e-3}, {}, "fixed for the whole run"),
        ({"lr": None}, {}, "must be a number"),
        ({"save_interval": 1 << 70}, {}, "too large"),
        ({"rollout_temprature": 1}, {}, "Did you mean rollout_temperature?"),
        ({"n_samples_per_prompt": 4}, {}, "fixed for the whole run"),
        ({"global_batch_size": 4}, {}, "it follows from others"),
        ({"tail_slots": 4}, {}, "nothing says which samples are the tail"),
        ({"tail_after_tokens": 4}, {}, "no slots are kept for the tail"),
        ({"tail_slots": 600, "tail_after_tokens": 4}, {}, "2 workers of 512 slots must leave one worker"),
        ({"tail_slots": 4, "tail_after_tokens": 1024}, {}, "no sample outlives it"),
        ({"tail_slots": 4, "tail_after_tokens": 4}, {"num_generation_workers": 1}, "the run has one worker"),
        ({"max_masked_fraction": 0.1}, {}, "sglang_server_concurrency is fixed at 512"),
        ({"sglang_concurrency_min": 9, "sglang_concurrency_max": 8}, {}, "above sglang_concurrency_max = 8"),
        ({"rollout_batch_size": 1}, {"actor_num_gpus_per_node": 9}, "a rank would have no sample"),
    ],
)
def test_a_patch_that_breaks_a_rule_says_which(patch: dict[str, Any], fields: dict[str, Any], says: str) -> None:
    assert says in refused(patch, **fields)


def test_all_that_is_wrong_is_said_at_once() -> None:
    lines = refused({"lr": "free", "max_wavs": "1", "eps_clip": 2}).splitlines()
    assert [line.partition(" ")[0].rstrip(":") for line in lines] == ["lr", "max_wavs", "eps_clip"]
    lines = refused({"eval_interval": 5, "kl_loss_coef": 0.1}).splitlines()
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("patch", "changes"),
    [
        ({"lr": "1e-5"}, {"lr": 1e-5}),
        ({"--over-sampling-batch-size": " 64 "}, {"over_sampling_batch_size": 64}),
        ({"rollout_batch_size": 8}, {"rollout_batch_size": 8, "global_batch_size": 64}),
        ({"sglang_server_concurrency": "auto", "max_masked_fraction": "0.1"}, None),
        ({"tis_threshold": 3}, {"tis_clip": 3.0}),
        ({"dynamic_sampling_filter_path": "none"}, {"dynamic_sampling_filter_path": "none"}),
        ({"max_tokens_per_slice": "none"}, {}),
        ({"lr": 1e-6}, {}),
    ],
)
def test_what_holds_becomes_values(patch: dict[str, Any], changes: dict[str, Any] | None) -> None:
    made = check_patch(values_of(), patch)
    assert made == ({"sglang_server_concurrency": 0, "max_masked_fraction": 0.1} if changes is None else changes)


def test_a_password_stays_off_the_bus() -> None:
    assert "bus_url" not in values_of(bus_url="redis://me:secret@host/0")
    assert "secret" not in str(values_of(bus_url="redis://me:secret@host/0"))


def test_shipped_names_are_those_of_the_rooms() -> None:
    found = {name: catalog()[name].shipped for name, spec in catalog().items() if spec.shipped}
    assert {name: sorted(names) for name, names in found.items()} == {
        "rm_type": sorted(boxed + name for boxed in ("", BOXED) for name in (*RULES, *OTHERS)),
        "dynamic_sampling_filter_path": sorted(JUDGES),
        "buffer_filter_path": sorted(POLICIES),
        "train_backend": sorted(LIBRARIES),
        "engine": sorted(ENGINES),
        "update_weight_transport": sorted(TRANSPORTS),
    }


def test_live_settings_say_where_a_change_applies() -> None:
    for name in live_fields():
        assert catalog()[name].live.endswith(")"), name


def test_what_settings_know_of_an_estimator_is_what_its_record_says() -> None:
    assert set(catalog()["advantage_estimator"].choices) == set(ESTIMATORS)
    for name, record in ESTIMATORS.items():
        own = {} if not record.teacher else {"opd_teacher_load": "t"}
        s = start(advantage_estimator=name, **own).flat
        assert s.policy_loss == record.policy_loss and s.normalize_advantages == record.whitens
        assert s.needs_whole_groups == record.whole_groups and s.distills == record.teacher
