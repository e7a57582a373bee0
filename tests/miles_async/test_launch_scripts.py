"""Launch scripts of Miles go through flag by flag, and the documentation says what becomes of each flag."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from actors.trainer.megatron_backend.config import MegatronConfig
from miles_async.cli.flags import Parsed, flags_help, parse_flags
from miles_async.launcher.hooks import check_architecture
from miles_async.launcher.plan import told
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.load import load
from miles_async.settings.miles import fate
from miles_async.settings.run import RunSettings
from scripts.bench.launch_scripts import CONFIGS, OF_RECIPES, SCRIPTS
from tests.floors.tree import ROOT

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# A script of Miles says neither: engines are SGLang's there, and staleness is another script's.
OURS = "--engine sglang --max-weight-staleness 0 --model-dtype bfloat16"


def parsed(name: str, more: str = "") -> Parsed:
    return parse_flags(f"--hf-checkpoint MODEL {SCRIPTS[name]} {OURS} {more}".split(), frozenset())


def settings_of(name: str, more: str = "") -> RunSettings:
    return load(None, parsed(name, more).values).settings


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_goes_through_flag_by_flag(name: str, tmp_path: Path) -> None:
    """All refusals of a command come at once; there are none, and what it says of the model is what config.json says."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    settings = settings_of(name, f"--hf-checkpoint {tmp_path}")
    check_architecture(settings)
    s = settings.flat
    assert s.global_batch_size == 256 and s.adam_beta2 == 0.98 and s.eps_clip_high == 0.28 and s.evaluates
    assert s.train_backend == ("fsdp" if "fsdp" in name else "megatron")
    if s.train_backend == "megatron":
        own = told(MegatronConfig, s)
        assert own.megatron["recompute-granularity"] == "full" and own.megatron["recompute-num-layers"] == 1
        assert own.megatron["grad-reduce-in-fp32"] is True and own.megatron["attention-dropout"] == 0.0
        assert own.sequence_parallel and own.expert_tensor_parallel_size == 1


def test_what_a_script_says_otherwise_than_the_model_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-4b"]))
    with pytest.raises(SettingsError) as caught:
        check_architecture(settings_of("glm4-9b", f"--hf-checkpoint {tmp_path}"))
    said = str(caught.value)
    assert "--num-layers 40 is given, config.json says 36" in said and "--post-mlp-layernorm is given" in said and "\n" not in said


def test_flags_that_have_nothing_to_do_are_taken_and_told() -> None:
    assert [note.split()[0] for note in parsed("qwen3-0.6b-fsdp").notes] == ["--use-fault-tolerance"]
    [note] = parsed("qwen3-4b").notes
    assert note.startswith("--use-miles-dashboard has no effect here: the live view")


def test_the_recipes_own_flags_are_refused_with_the_reason() -> None:
    refused = Refusals()
    parse_flags(OF_RECIPES.split(), frozenset(), refused)
    [error] = refused.found
    assert re.search(r"are not flags\. Miles has them\. It is of a recipe that starts train\.py", str(error)), error
    named = {word for word in OF_RECIPES.split() if word.startswith("--")} - {"--num-gpus-per-node"}  # taken without effect
    assert {word.strip(",") for word in str(error).partition(".")[0].split() if word.startswith("--")} == named


def test_flags_of_one_thing_are_refused_in_one_line() -> None:
    refused = Refusals()
    words = "--update-weight-mode delta --fp8-format e4m3 --update-weight-delta-encoding x --rollout-bach-size 4 --lr 1e-6"
    assert [value.spec.name for value in parse_flags(words.split(), frozenset(), refused).values] == ["lr"]
    heads = sorted(str(error).partition(".")[0] for error in refused.found)
    assert heads == [
        "--fp8-format is not a flag",
        "--rollout-bach-size is not a flag",
        "--update-weight-mode and --update-weight-delta-encoding are not flags",
    ]


def test_layers_that_predict_several_tokens_are_refused_once() -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of("qwen3-4b", "--mtp-num-layers 1 --enable-mtp-training")
    assert "mtp_num_layers = 1: layers that predict several tokens are not trained" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_two_checks_refuse_alike_is_told_once() -> None:
    refused = Refusals()
    refused.found += [SettingsError("a", field="lr"), SettingsError("a", field="lr"), SettingsError("b", field="lr")]
    with pytest.raises(SettingsError) as caught:
        refused.raise_all()
    assert str(caught.value).splitlines() == ["lr: a.", "lr: b."]


def test_details_are_dumped_where_they_are_asked_for() -> None:
    assert settings_of("qwen3-4b").ckpt.save_debug_rollout_data == "DETAILS/rollout_data/{rollout_id}.msgpack"
    assert settings_of("glm4-9b").ckpt.save_debug_rollout_data is None
    own = settings_of("qwen3-4b", "--save-debug-rollout-data mine/{rollout_id}")
    assert own.ckpt.save_debug_rollout_data == "mine/{rollout_id}"


def test_variables_of_the_trainer_are_a_json_object() -> None:
    assert json.loads(settings_of("qwen3-0.6b-fsdp").perf.train_env_vars or "") == {"PYTORCH_ALLOC_CONF": "x:1"}
    for wrong in ("NCCL_DEBUG=WARN", '["a"]', '{"A":1}'):
        with pytest.raises(SettingsError, match=r"train_env_vars = .*: not a JSON object of texts"):
            settings_of("glm4-9b", f"--train-env-vars {wrong}")


def test_help_knows_flags_of_other_programs() -> None:
    assert flags_help("--moe-permute-fusion") == "--moe-permute-fusion: a field of megatron-core"
    assert flags_help("fully-async").startswith("--fully-async: means --max-weight-staleness 1 --use-tis")


def fates() -> dict[str, str]:
    """Flag of a script -> what becomes of it."""
    return {flag: fate(flag) for text in (*SCRIPTS.values(), OF_RECIPES) for flag in FLAG.findall(text)}


def as_table() -> str:
    """The table of docs/megatron-scripts.md."""
    rows: dict[str, list[str]] = {}
    for flag, said in sorted(fates().items()):
        rows.setdefault(said, []).append(f"`{flag}`")
    lines = [f"| {said} | {' '.join(flags)} |" for said, flags in sorted(rows.items(), key=lambda row: (-len(row[1]), row[0]))]
    return "\n".join(["| here | flags |", "|---|---|", *lines])


def test_the_documentation_tells_what_becomes_of_each_flag() -> None:
    """After a change of it: UPDATE_DOCS=1 writes the table anew."""
    page = ROOT / "docs" / "megatron-scripts.md"
    text = page.read_text()
    before, rest = text.split(mark := "<!-- fates -->\n")
    written, after = rest.split("\n<!-- /fates -->")
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(f"{before}{mark}{as_table()}\n<!-- /fates -->{after}")
        return
    assert written == as_table(), "run this test with UPDATE_DOCS=1"
