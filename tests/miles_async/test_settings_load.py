"""File, flags, defaults and derivations meet in one resolved value; whatever is wrong is one line with a remedy."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_async.cli.flags import parse_flags
from miles_async.settings.catalog import catalog
from miles_async.settings.dump import dry_run_text, dump_toml
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import GREATEST, SMALLEST, Loaded, load, settings_from

MINIMAL = """
[model]
hf_checkpoint = "builtin:arithmetic"
[rollout]
prompt_data = "train.jsonl"
num_rollout = 3
rm_type = "math"
"""


def from_text(tmp_path: Path, extra: str = "", flags: str = "", base: str = MINIMAL) -> Loaded:
    path = tmp_path / "tiny.toml"
    path.write_text(base + extra, "utf-8")
    return load(path, parse_flags(flags.split(), frozenset()).values)


def refusal(tmp_path: Path, extra: str = "", flags: str = "", base: str = MINIMAL) -> str:
    with pytest.raises(SettingsError) as caught:
        from_text(tmp_path, extra, flags, base)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    loaded = from_text(tmp_path, "rollout_batch_size = 16\n[optimizer]\nlr = 3e-4", "--rollout-batch-size 8")
    assert loaded.settings.rollout.rollout_batch_size == 8
    assert loaded.settings.optimizer.lr == 3e-4
    assert loaded.settings.grpo.eps_clip == 0.2
    assert loaded.origins["rollout_batch_size"] == "flag"
    assert loaded.origins["lr"] == "file"
    assert loaded.origins["eps_clip"] == "default"
    assert loaded.origins["eps_clip_high"] == "derived"


def test_what_is_not_given_follows_from_the_rest(tmp_path):
    s = from_text(tmp_path, "rollout_temperature = 0.7\n[grpo]\neps_clip = 0.1\nnum_steps_per_rollout = 2").settings
    assert (s.launch.name, s.ckpt.save, s.ckpt.load) == ("tiny", "runs/tiny/checkpoints", "runs/tiny/checkpoints")
    assert s.ckpt.ref_load == "builtin:arithmetic"
    assert s.rollout.rollout_batch_size == 32 and s.rollout.staleness_policy == "auto"
    assert (s.grpo.global_batch_size, s.grpo.eps_clip_high, s.eval.eval_temperature) == (128, 0.1, 0.7)
    assert s.run_dir == Path("runs/tiny")
    assert s.flat.samples_per_rollout == 256


def test_booleans_lists_and_unsetting_as_flags(tmp_path):
    s = from_text(
        tmp_path,
        'label_key = "answer"\n[grpo]\nuse_tis = true',
        "--no-use-tis --rollout-stop-token-ids 5 6 --eval-prompt-data held out.jsonl --label-key none "
        "--rollout-top-k=-1 --mask-offpolicy-in-partial-rollout --partial-rollout=false --tis-threshold 3",
    ).settings
    assert s.grpo.use_tis is False
    assert s.rollout.rollout_stop_token_ids == (5, 6)
    assert s.flat.datasets == (("held", "out.jsonl"),)
    assert s.rollout.label_key is None
    assert s.rollout.mask_offpolicy_in_partial_rollout and not s.rollout.partial_rollout
    assert s.grpo.tis_clip == 3.0


@pytest.mark.parametrize(("word", "value"), [(".5", 0.5), ("5.", 5.0), ("+5", 5.0), ("+.5e-1", 0.05), ("1E-6", 1e-6), ("5.0", 5.0)])
def test_a_number_is_taken_as_a_shell_script_may_write_it(tmp_path, word, value):
    assert from_text(tmp_path, flags=f"--lr {word}").settings.optimizer.lr == value
    if value == 5:
        assert from_text(tmp_path, flags=f"--rollout-batch-size={word}").settings.rollout.rollout_batch_size == 5


def test_a_string_field_takes_any_word_literally(tmp_path):
    assert from_text(tmp_path, flags="--input-key null").settings.rollout.input_key == "null"
    assert from_text(tmp_path, flags="--input-key 7").settings.rollout.input_key == "7"


@pytest.mark.parametrize(
    ("extra", "flags", "words"),
    [
        ("rollout_bach_size = 4", "", ("[rollout] rollout_bach_size", "Did you mean rollout_batch_size?")),
        ("lr = 1e-4", "", ("[rollout] lr", "wrong table", "[optimizer]")),
        ("[rolout]\nx = 1", "", ("[rolout]", "Did you mean rollout?")),
        ("[optimizer]\nlr = 'fast'", "", ("[optimizer] lr = 'fast'", "must be a number >= 0")),
        ("rollout_batch_size = 0", "", ("rollout_batch_size = 0", "whole number >= 1")),
        ("rollout_batch_size = 2.5", "", ("rollout_batch_size = 2.5", "whole number")),
        ("rollout_shuffle = 1", "", ("rollout_shuffle = 1", "true or false")),
        ("staleness_policy = 'drpo'", "", ("'drpo'", "auto, split, whole, member, wait, drop", "Did you mean drop?")),
        ("rollout_stop_token_ids = ['a']", "", ("rollout_stop_token_ids", "list of whole numbers")),
        ("input_key = ''", "", ("input_key", "must not be empty")),
        ("rollout_stop = ['a', '']", "", ("rollout_stop = ['a', '']", "must not be empty")),
        ("", "--rollout-stop=", ("--rollout-stop", "must not be empty")),
        ("[grpo]\ntis_clip = 2.0\ntis_threshold = 1.0", "", ("tis_threshold and tis_clip are one setting",)),
        ("this is not toml", "", ("tiny.toml is not valid TOML", "line")),
        (f"[sglang]\nserver_args = {{a={'[' * 5000}{']' * 5000}}}", "", ("tiny.toml is not valid TOML", "nested too deeply")),
        (f"rollout_batch_size = {'9' * 6000}", "", ("tiny.toml is not valid TOML", "4300 digits")),
        (f"[perf]\ntrain_env_vars = '{'[' * 100_000}'", "", ("train_env_vars", "not a JSON object of texts")),
        ("[ckpt]\nsave = 'a\\u0000b'".replace("'", '"'), "", ("[ckpt] save", "must be UTF-8 text without NUL")),
        ("", "--save a\udcff", ("--save", "must be UTF-8 text")),
        ("", "--tools calculater", ("--tools = ['calculater']", "must be a list of calculator, search, python")),
        ("", "--rollout-bach-size 4", ("--rollout-bach-size is not a flag", "Did you mean --rollout-batch-size?")),
        ("", "--rollout-batch-size four", ("--rollout-batch-size = 'four'", "whole number >= 1")),
        ("", "--rollout-batch-size", ("--rollout-batch-size needs a value", "whole number")),
        ("", "--lr --use-tis", ("--lr needs a value",)),
        ("", "--lr nan", ("--lr = 'nan'", "a number")),
        ("", "--lr inf", ("--lr", "<= 1000")),
        ("", "--tis-lower-bound inf", ("--tis-lower-bound", "finite")),
        ("", "--use-tis=maybe", ("--use-tis = 'maybe'", "true or false")),
        ("", "--no-use-tis=true", ("--no-use-tis takes no value",)),
        ("", "-n 4", ("-n is not a flag", "two dashes")),
        ("", "-lr 1e-4", ("-lr is not a flag", "Did you mean --lr?")),
        ("", "--use-tis true", ("--use-tis takes no word behind a space", "--use-tis=true")),
        ("", "--use-fault-tolerance 1", ("--use-fault-tolerance takes no word",)),
        ("", "--lr= 1e-4", ("'1e-4' stands behind --lr= and a space", "Write --lr=1e-4")),
        ("", "--bf16=true", ("--bf16 takes no value",)),
        ("", "--lr 1_0", ("--lr = '1_0'", "a number >= 0")),
        ("", "--lr .", ("--lr = '.'", "a number >= 0")),
        ("", "--attention-backend flsh", ("megatron.attention_backend = 'flsh'", "Did you mean flash?")),
        ("", "--recompute-granularity none", ("megatron-core does not know it", "It is full or selective")),
        ("", "--attention-dropout x", ("--attention-dropout = 'x'", "must be a number")),
        ("", "--sglang-mem-fraction-static 0.7", ("engine is 'embedded'", "Set --engine sglang, or leave it out")),
        ("", "--sglang-server-concurency 7", ("engine is 'embedded'", "Did you mean sglang_server_concurrency?")),
        ("[sglang]\nsglang_mem_fraction_static = 0.7", "", ("the table server_args of [sglang], as mem-fraction-static",)),
        ("[perf]\nrecompute_granularity = 'full'", "", ("the table megatron of [parallel], as recompute_granularity",)),
        ("", "--eps-clip-c 0.5", ("--eps-clip-c = '0.5'", "> 1")),
        ("", "--eps-clip 1.01", ("--eps-clip = '1.01'", "> 0 and <= 1")),
    ],
)
def test_a_wrong_word_is_refused_with_field_value_and_remedy(tmp_path, extra, flags, words):
    text = refusal(tmp_path, extra, flags)
    for word in words:
        assert word in text


def test_a_key_outside_its_table_is_sent_to_its_table(tmp_path):
    assert "Move it to [optimizer]" in refusal(tmp_path, base="lr = 1e-4\n" + MINIMAL)


def test_missing_files_and_missing_fields_are_named(tmp_path):
    with pytest.raises(SettingsError, match=r"no such settings file: .*nowhere\.toml"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(SettingsError, match="cannot read settings file"):
        load(tmp_path)
    (tmp_path / "marked.toml").write_text("\ufeff" + MINIMAL, encoding="utf-8")  # as editors on Windows save it
    load(tmp_path / "marked.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load(tmp_path / "binary.toml")
    with pytest.raises(SettingsError) as both:
        from_text(tmp_path, "", base="")
    assert [e.field for e in both.value.each] == ["hf_checkpoint", "prompt_data"]
    assert "--prompt-data" in refusal(tmp_path, base='[model]\nhf_checkpoint = "builtin:arithmetic"')


def test_the_dry_run_names_every_field_and_loads_back_to_the_same_settings(tmp_path):
    loaded = from_text(tmp_path, 'custom_rm_path = "a.b"\n', "--rm-type none")
    text = dry_run_text(loaded)
    for name in catalog():
        assert f"\n{name} = " in text or f"# {name} is unset" in text
    again = tmp_path / "resolved.toml"
    again.write_text(text, "utf-8")
    assert load(again).settings == loaded.settings


def _strategy(name: str) -> st.SearchStrategy:
    spec = catalog()[name]
    if spec.kind == "choice":
        return st.sampled_from(spec.choices)
    if spec.kind == "bool":
        return st.booleans()
    if spec.kind == "str":
        return st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=20)
    bounds = spec.limits
    low = bounds.ge if bounds.ge is not None else bounds.gt
    high = bounds.le if bounds.le is not None else bounds.lt
    if spec.kind == "int":
        return st.integers(low, high if high is not None else 2**40)
    return st.floats(
        low, high, exclude_min=bounds.gt is not None, exclude_max=bounds.lt is not None,
        allow_nan=False, allow_infinity=False,
    ).filter(lambda value: value == 0 or SMALLEST <= abs(value) <= GREATEST)  # fmt: skip


FREE = (  # no rule speaks of them
    "load", "save", "ref_load", "input_key", "label_key", "reward_key", "runs_dir", "rollout_seed", "seed", "gamma",
    "rollout_temperature", "entropy_coef", "weight_decay", "adam_eps", "clip_grad", "model_dtype", "kl_loss_type",
    "stream_max_bytes", "report", "console", "async_save", "normalize_advantages", "eps_clip_c",
    "partial_save_tokens", "max_tokens_per_slice", "ref_update_interval", "sglang_server_concurrency", "opsm_delta",
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(chosen=st.fixed_dictionaries({}, optional={name: _strategy(name) for name in FREE}))
def test_any_settings_survive_being_written_and_read(tmp_path, chosen):
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 1, "rm_type": "math"}
    made = settings_from(**{**base, **chosen})
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(made), "utf-8")
    assert load(path).settings == made


@pytest.mark.parametrize(
    ("model", "gpu", "dtype"), [("builtin:arithmetic", True, "float32"), ("a/dir", True, "bfloat16"), ("a/dir", False, "float32")]
)
def test_the_trainers_type_follows_from_the_host(
    model: str, gpu: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Loaded.__module__], "has_gpu", lambda: gpu)
    loaded = from_text(tmp_path, flags=f"--hf-checkpoint {model}")
    assert loaded.settings.model.model_dtype == dtype
    assert any("bfloat16" in note for note in loaded.notes) == (dtype == "bfloat16")
