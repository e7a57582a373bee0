"""Every field is documented, has one flag, and its default obeys its own bounds."""

import msgspec
import pytest

from miles_async.settings.catalog import NO_DEFAULT, FieldSpec, catalog, groups, live_fields, names
from miles_async.settings.derive import DERIVATIONS
from miles_async.settings.miles import needless, why_not

FIELDS = list(catalog().values())
SOLVED = {"name", "model_dtype", "use_dynamic_batch_size", "global_batch_size", "num_steps_per_rollout"}


def test_the_groups_are_there():
    assert list(groups()) == [
        "model", "ckpt", "rollout", "eval", "perf", "parallel", "grpo", "optimizer", "lora", "sglang", "bus", "launch", "trackers",
        "governor", "architecture",
    ]  # fmt: skip


@pytest.mark.parametrize("spec", FIELDS, ids=lambda spec: spec.name)
def test_a_field_says_what_it_is_and_its_default_is_valid(spec: FieldSpec):
    assert spec.text.endswith(".") and len(spec.text) > 15
    if spec.default is not NO_DEFAULT:
        assert msgspec.convert(spec.default, spec.type) == spec.default
        assert not spec.derived


@pytest.mark.parametrize("spec", FIELDS, ids=lambda spec: spec.name)
def test_an_optional_field_is_unset_by_default_because_toml_cannot_unset_it(spec: FieldSpec):
    if spec.optional:
        assert spec.default is None or spec.derived


def test_quantities_name_their_unit():
    for spec in FIELDS:
        if spec.name.endswith(("_s", "_bytes", "_tokens", "_len", "_batch_size", "_interval")):
            assert spec.unit or spec.kind == "bool", spec.name


def test_every_derived_field_has_a_derivation_and_no_other_has():
    assert {name for name, _ in DERIVATIONS} | SOLVED == {spec.name for spec in FIELDS if spec.derived}


def test_established_names_are_accepted():
    for flag in (
        "--hf-checkpoint", "--rollout-batch-size", "--n-samples-per-prompt", "--over-sampling-batch-size",
        "--max-weight-staleness", "--global-batch-size", "--num-steps-per-rollout", "--eps-clip-high", "--kl-loss-type",
        "--dynamic-sampling-filter-path", "--rollout-max-response-len", "--update-weights-interval", "--tis-clip-low",
        "--calculate-per-token-loss", "--sglang-server-concurrency", "--use-dynamic-batch-size", "--max-tokens-per-gpu",
    ):  # fmt: skip
        assert flag in {spec.flag for spec in FIELDS}
    assert names()["tis_threshold"].name == "tis_clip"


def test_no_flag_of_data_rewards_or_evaluation_is_refused_without_its_reason():
    for flag in (
        *("--prompt-data", "--input-key", "--label-key", "--metadata-key", "--tool-key", "--multimodal-keys", "--data-source-path"),
        *("--apply-chat-template", "--apply-chat-template-kwargs", "--chat-template-path", "--disable-rollout-global-dataset"),
        *("--rm-type", "--rm-url", "--group-rm", "--custom-rm-path", "--reward-key", "--eval-reward-key", "--loss-mask-type"),
        *("--eval-interval", "--eval-prompt-data", "--eval-config", "--eval-input-key", "--eval-label-key", "--eval-tool-key"),
        *("--n-samples-per-eval-prompt", "--eval-temperature", "--eval-top-p", "--eval-top-k", "--eval-max-response-len"),
        *("--eval-max-prompt-len", "--eval-min-new-tokens", "--eval-max-context-len", "--eval-function-path", "--eval-num-gpus"),
        *("--eval-overflow-policy", "--eval-max-in-flight", "--eval-keep-snapshots", "--eval-hf-dir", "--skip-eval-before-train"),
        *("--log-correct-samples", "--log-reward-category", "--custom-rollout-log-function-path"),
        *("--custom-eval-rollout-log-function-path", "--disable-rollout-trim-samples", "--rollout-submission-granularity"),
        *("--custom-async-data-buffer-path", "--rollout-shuffle", "--rollout-seed", "--loss-type"),
    ):
        assert flag.removeprefix("--").replace("-", "_") in names() or why_not(flag) or needless(flag), flag


def test_live_fields_cover_what_may_be_turned_while_the_run_goes_on():
    assert {
        "over_sampling_batch_size", "max_weight_staleness", "staleness_policy", "rollout_batch_size",
        "global_batch_size", "rollout_temperature", "rollout_max_response_len", "lr", "eps_clip", "eps_clip_high",
        "kl_loss_coef",
        "sglang_server_concurrency", "pause_generation_mode", "save_interval", "eval_interval", "eval_share",
    } <= set(live_fields())  # fmt: skip
    assert not {"hf_checkpoint", "seed", "name", "bus_url", "optimizer"} & set(live_fields())
