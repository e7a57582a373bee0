"""What a script of Miles means by what it leaves out: held against a list of its defaults, and as settings of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.reward.sample import Sample
from actors.reward.scorer import Scorers
from actors.runtime.prompts import most_new_tokens
from miles_async.cli.flags import parse_flags
from miles_async.cli.train import parse
from miles_async.launcher.plan import reward_spec, training_data
from miles_async.launcher.preflight import preflight
from miles_async.launcher.quick import check_files
from miles_async.settings.catalog import catalog
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import Loaded, load
from miles_async.settings.meant import MEANT, UNLIKE
from tests.miles_async.miles_defaults import MILES

BASE = "--hf-checkpoint MODEL --prompt-data DATA --num-rollout 10 --rollout-batch-size 4 --actor-num-gpus-per-node 1"
ALONE = "--advantage-estimator reinforce_plus_plus"  # which compares with no other sample, of which Miles makes none by default


def same(ours: Any, theirs: Any) -> bool:
    return ours == theirs or (ours == () and theirs is None)


def test_every_flag_of_miles_has_its_default_or_a_row_that_says_why_not() -> None:
    theirs = {name for name, spec in catalog().items() if not spec.ours and spec.kind != "table" and spec.group != "architecture"}
    assert theirs == MILES.keys(), "tests/miles_async/miles_defaults.py lacks a flag"
    known = UNLIKE.keys() | {one.field for one in MEANT}
    unlike = {n for n in theirs if catalog()[n].derived or catalog()[n].required or not same(catalog()[n].default, MILES[n])}
    assert unlike - known == set()
    assert UNLIKE.keys() <= unlike and not UNLIKE.keys() & {one.field for one in MEANT}


def script(folder: Path, text: str, program: str = "train.py") -> Loaded:
    alone = "" if "sft" in text else ALONE
    (folder / "run.sh").write_text(f"python3 {program} {BASE} {alone} {text}\n")
    args = parse(["--from-miles", str(folder / "run.sh")])
    assert args.refused.found == [], args.refused.found
    return load(None, args.values)


def test_a_silent_script_means_miles_defaults(tmp_path: Path) -> None:
    s = script(tmp_path, "--apply-chat-template --rm-type math").settings.flat
    assert (s.metadata_key, s.tool_key, s.rollout_skip_special_tokens, s.n_samples_per_prompt) == ("metadata", "tools", False, 1)
    assert s.no_save and s.lr_decay_style == "linear" and s.train_backend == "megatron" and s.model_dtype == "bfloat16"
    s = script(tmp_path, "--rm-type math --save S --save-interval 5 --train-backend fsdp --n-samples-per-prompt 2").settings.flat
    assert not s.no_save and s.tool_key is None and s.n_samples_per_prompt == 2
    assert (s.lr_decay_style, s.adam_beta2, s.weight_decay) == ("constant", 0.95, 0.0)
    s = script(tmp_path, "--rm-type math --load OLD").settings.flat
    assert not s.no_save and s.load == "OLD"


@pytest.mark.parametrize(("text", "program", "wanted"), [
    ("--fully-async", "train.py", (1, True)),
    ("--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async", "train_async.py", (1, True)),
    ("--fully-async --max-weight-staleness 3 --use-rollout-logprobs", "train.py", (3, False)),
    ("--fully-async --use-rollout-logprobs", "train.py", (1, False)),
    ("", "train_async.py", (1, True)),
    ("", "train.py", (0, False)),
    ("--loss-type sft", "train_async.py", (1, False)),
])  # fmt: skip
def test_generation_ahead_of_training_has_a_bound_and_a_correction(
    text: str, program: str, wanted: tuple[int, bool], tmp_path: Path
) -> None:
    loaded = script(tmp_path, f"--rm-type math {text}", program)
    assert (loaded.settings.flat.max_weight_staleness, loaded.settings.flat.use_tis) == wanted
    assert any("strictly on-policy" in note for note in loaded.notes) == (wanted[0] == 0)


def test_our_own_command_line_takes_fully_async_the_same() -> None:
    args = parse(f"{BASE} --rm-type math --fully-async".split())
    flat = load(None, args.values).settings.flat
    assert (flat.max_weight_staleness, flat.use_tis) == (1, True)
    assert not any("no effect" in note for note in args.notes) and any("--max-weight-staleness 1" in note for note in args.notes)


@pytest.mark.parametrize(
    ("file", "bound", "tis"),
    [("", 1, True), ("max_weight_staleness = 3\n[grpo]\nuse_icepop = true\n", 3, False), ("[grpo]\nuse_icepop = true\n", 1, False)],
)
def test_fully_async_beside_a_settings_file_means_what_the_file_leaves_open(
    file: str, bound: int, tis: bool, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[rollout]\nrm_type = "math"\n{file}')
    args = parse([str(config), *BASE.split(), "--fully-async"])
    flat = load(args.config, args.values).settings.flat
    assert (flat.max_weight_staleness, flat.use_tis) == (bound, tis)


async def test_math_is_the_last_box_alone_where_miles_is_meant(tmp_path: Path) -> None:
    spec = reward_spec(script(tmp_path, "--rm-type math").settings, "")
    assert (spec.rm_type, spec.math_rule) == ("math", "math_boxed")
    said = Sample(sample_id="a", prompt="", response="the answer is 42", label="42")
    boxed = Sample(sample_id="b", prompt="", response=r"so \\boxed{42}", label="42")
    for rule, wanted in (("math_boxed", [0.0, 1.0]), ("math_final", [1.0, 1.0])):
        async with Scorers(rm_type="math", math_rule=rule) as scorers:
            assert [await scorers.named(name).score(one, 5.0) for name, one in (("math", said), ("", boxed))] == wanted
            assert await scorers.named("math_final").score(said, 5.0) == 1.0
            assert await scorers.named("math_boxed").score(said, 5.0) == 0.0


def rows(path: Path, *made: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def test_rows_may_lack_the_columns_that_miles_names(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", {"input": "1+1="}, {"input": "2+2=", "metadata": {"rm_type": "math"}})
    base = f"--hf-checkpoint builtin:arithmetic --prompt-data {data} --num-rollout 1 --rm-type length"
    preflight(load(None, parse_flags(f"{base} --metadata-key metadata".split(), frozenset()).values).settings)
    with pytest.raises(SettingsError, match="has no key 'extra'"):
        preflight(load(None, parse_flags(f"{base} --metadata-key extra".split(), frozenset()).values).settings)


def test_a_label_may_be_an_object_where_a_function_reads_it(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", {"input": "1+1=", "answer": {"ground_truth": ["2"]}})
    base = f"--hf-checkpoint builtin:arithmetic --prompt-data {data} --label-key answer --num-rollout 1"
    own = load(None, parse_flags(f"{base} --custom-rm-path json.dumps".split(), frozenset()).values).settings
    assert preflight(own).prompts.rows == 1 and training_data(own, "").label_objects
    with pytest.raises(SettingsError, match="the label under 'answer' is a dict"):
        preflight(load(None, parse_flags(f"{base} --rm-type math".split(), frozenset()).values).settings)


def test_a_function_gets_the_object_and_a_rule_its_text() -> None:
    sample = Sample(sample_id="a/0", prompt="", response="", label='{"x": [1]}', metadata={"label_is_json": True})
    assert sample.as_dict()["label"] == {"x": [1]} and sample.label == '{"x": [1]}'
    assert Sample(sample_id="a/0", prompt="", response="", label='{"x": [1]}').as_dict()["label"] == '{"x": [1]}'


def test_a_response_has_what_its_prompt_leaves_of_the_context(tmp_path: Path) -> None:
    assert [most_new_tokens(100, prompt, 128) for prompt in (10, 100, 127, 200)] == [100, 28, 1, 1]
    assert most_new_tokens(100, 1000, 0) == 100
    longest = "--rollout-max-context-len 64 --eval-max-response-len 64 --rollout-max-response-len 99"
    loaded = script(tmp_path, f"--rm-type math {longest}")
    assert sum("is cut to what a prompt leaves" in note for note in loaded.notes) == 2


def test_gpus_of_colocated_engines_are_the_trainers_whatever_is_said(tmp_path: Path) -> None:
    more = "--rm-type math --colocate --rollout-num-gpus-per-engine 2"
    loaded = script(tmp_path, f"{more} --actor-num-gpus-per-node 4 --rollout-num-gpus 16 --rollout-batch-size 8")
    assert loaded.settings.flat.rollout_num_gpus == 4
    assert any(note.startswith("rollout_num_gpus = 16 has no effect beside colocate") for note in loaded.notes)
    with pytest.raises(SettingsError) as caught:
        script(tmp_path, f"{more} --actor-num-gpus-per-node 1")
    assert str(caught.value).startswith("rollout_num_gpus_per_engine = 2: ") and "\n" not in str(caught.value)


def test_an_engine_larger_than_a_node_has_several(tmp_path: Path) -> None:
    more = "--rm-type math --rollout-num-gpus 64 --rollout-num-gpus-per-engine 32 --rollout-batch-size 64"
    s = script(tmp_path, more).settings.flat
    assert (s.launcher, s.sglang_nnodes, s.num_generation_workers, s.rollout_num_gpus) == ("ray", 4, 2, 64)
    s = script(tmp_path, f"{more} --colocate --actor-num-nodes 8 --actor-num-gpus-per-node 8").settings.flat
    assert (s.launcher, s.sglang_nnodes, s.num_generation_workers, s.rollout_num_gpus) == ("ray", 4, 2, 64)


OWN = [
    ("--dynamic-sampling-filter-path {}.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
     {"dynamic_sampling_filter_path": "check_reward_nonzero_std"}),
    ("--dynamic-sampling-filter-path {}.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted",
     {"dynamic_sampling_filter_path": "none"}),
    ("--buffer-filter-path {}.rollout.data_source.pop_first", {"buffer_filter_path": "fifo"}),
    ("--custom-rm-path {}.rollout.rm_hub.async_rm", {"custom_rm_path": None, "rm_type": "math"}),
    ("--custom-generate-function-path {}.rollout.sglang_rollout.generate", {"custom_generate_function_path": None}),
    ("--data-source-path {}.rollout.data_source.RolloutDataSourceWithBuffer", {"data_source_path": None}),
    ("--use-opd --opd-type sglang --custom-rm-path {0}.rollout.on_policy_distillation.reward_func --rm-url http://h:1/generate "
     "--custom-reward-post-process-path {0}.rollout.on_policy_distillation.post_process_rewards",
     {"custom_rm_path": None, "custom_reward_post_process_path": None, "opd_teacher_urls": ("http://h:1",), "rm_url": ()}),
]  # fmt: skip


@pytest.mark.parametrize("package", ["miles", "slime"])
@pytest.mark.parametrize(("text", "wanted"), OWN, ids=range(len(OWN)))
def test_functions_that_come_with_miles_are_ours(package: str, text: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    flat = script(tmp_path, f"--rm-type math --n-samples-per-prompt 2 {text.format(package)}").settings.flat
    assert {name: flat.values[name] for name in wanted} == wanted


def test_a_rollout_function_that_comes_with_miles_needs_no_package(tmp_path: Path) -> None:
    there = script(tmp_path, "--rm-type math --rollout-function-path slime.rollout.fully_async_rollout.generate", "train_async.py")
    check_files(there.settings)
    other = script(tmp_path, "--rm-type math --rollout-function-path slime.rollout.another.generate")
    with pytest.raises(SettingsError, match="no package slime"):
        check_files(other.settings)


SFT = "--loss-type sft_loss --disable-compute-advantages-and-returns --lr-warmup-fraction 0.2 --debug-train-only"


def test_a_supervised_script_starts_no_engine(tmp_path: Path) -> None:
    more = "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --input-key messages --rollout-num-gpus-per-engine 8"
    loaded = script(tmp_path, f"{SFT} {more} --sglang-mem-fraction-static 0.5", "train_async.py")
    flat = loaded.settings.flat
    assert (flat.engine, flat.rollout_num_gpus, flat.apply_chat_template, flat.lr_warmup_fraction) == ("none", 0, True, 0.2)
    assert flat.max_weight_staleness == 1 and any("no engines are started" in note for note in loaded.notes)
    with pytest.raises(SettingsError, match="only supervised training generates nothing"):
        load(None, parse_flags(f"{BASE} --rm-type math --engine none".split(), frozenset()).values)


@pytest.mark.parametrize(("text", "said"), [
    ("--update-weight-transfer-mode p2p", "no transport that writes into engines' memory by RDMA"),
    ("--sglang-config groups.yaml", "engine groups of Miles"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 3", "lr_warmup_iters = 3 says it too"),
])  # fmt: skip
def test_what_cannot_be_had_is_named(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(None, parse_flags(f"{BASE} --engine sglang --rm-type math {text}".split(), frozenset()).values)


def test_transports_have_their_names_in_miles() -> None:
    [value] = parse_flags(["--update-weight-transfer-mode", "broadcast"], frozenset()).values
    assert (value.spec.name, value.words) == ("update_weight_transport", ("nccl",))


def test_flags_with_nothing_left_to_do_take_their_values_along() -> None:
    parsed = parse_flags(["--num-gpus-per-node", "8", "--log-probs-chunk-size=4", "--log-passrate", "--lr", "1"], frozenset())
    assert [value.typed for value in parsed.values] == ["--lr"] and len(parsed.notes) == 3 and not parsed.positional


def test_no_far_name_is_suggested() -> None:
    with pytest.raises(SettingsError, match=r"See train --help"):
        parse_flags(["--num-frobnication-layers", "3"], frozenset())
