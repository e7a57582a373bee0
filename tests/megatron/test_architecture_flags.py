"""Architecture flags of Megatron launch scripts: equal to config.json, or refused with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.families import SIZES, describe
from actors.trainer.megatron_backend.flags import OF_MODEL, compare, facts, fields_against, is_ours, layer_pattern
from miles_async.cli.flags import parse_flags
from miles_async.launcher.hooks import check_architecture
from miles_async.settings.errors import SettingsError
from miles_async.settings.groups import ArchitectureSettings
from miles_async.settings.load import load, settings_from
from miles_async.settings.megatron_fields import FIELDS
from miles_async.settings.miles import NOT_COMPARED
from miles_async.settings.run import RunSettings
from scripts.bench.launch_scripts import CONFIGS

GLM4_9B = {"model_type": "glm4", "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13696,
           "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
           "vocab_size": 151552, "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
GLM4_FLAGS = (
    "--spec miles_plugins.models.glm4 get_glm_spec --swiglu --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings --disable-bias-linear "
    "--add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 10000 --vocab-size 151552 --post-self-attn-layernorm "
    "--post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 --no-rope-fusion --untie-embeddings-and-output-weights"
)
QWEN3_4B = {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
            "vocab_size": 151936,
            "tie_word_embeddings": True, "hidden_act": "silu"}  # fmt: skip
QWEN3_FLAGS = (
    "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 "
    "--rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm"
)
SPARSE = {**QWEN3_4B, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
          "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip


def settings_of(flags: str, config: dict[str, Any], directory: Path) -> RunSettings:
    (directory / "config.json").write_text(json.dumps(config))
    found = parse_flags(flags.split(), frozenset())
    assert not found.positional
    values = {v.spec.name: v.spec.name for v in found.values}
    assert set(values) <= set(ArchitectureSettings.__struct_fields__)
    base: dict[str, Any] = {
        "hf_checkpoint": str(directory),
        "num_rollout": 1,
        "rm_type": "math",
        "prompt_data": "p.jsonl",
    }
    typed = {v.spec.name: typed_value(v.spec.kind, v.words) for v in found.values}
    return settings_from(**base, **typed)


def typed_value(kind: str, words: tuple[str, ...]) -> Any:
    return {
        "bool": lambda: words[0] == "true",
        "int": lambda: int(words[0]),
        "float": lambda: float(words[0]),
        "list": lambda: words,
    }.get(kind, lambda: words[0])()


@pytest.mark.parametrize(("flags", "config"), [(GLM4_FLAGS, GLM4_9B), (QWEN3_FLAGS, QWEN3_4B)], ids=["glm4", "qwen3"])
def test_the_flags_of_a_launch_script_are_what_config_says(flags: str, config: dict[str, Any], tmp_path: Path) -> None:
    check_architecture(settings_of(flags, config, tmp_path))


def test_what_differs_is_refused_with_both_values_all_at_once(tmp_path: Path) -> None:
    flags = "--num-layers 36 --rotary-base 10000 --qk-layernorm --num-experts 8 --vocab-size 151936"
    flags += " --untie-embeddings-and-output-weights"
    with pytest.raises(SettingsError) as caught:
        check_architecture(settings_of(flags, {**GLM4_9B, "tie_word_embeddings": True}, tmp_path))
    said = str(caught.value)
    for line in (
        "--num-layers 36 is given, config.json says 40; leave it out",
        "--qk-layernorm is given, config.json has no such thing",
        "--num-experts 8 is given, config.json has no such thing",
        "--untie-embeddings-and-output-weights is given, config.json has no such thing",
        "--vocab-size 151936 is given, config.json says 151552",
    ):
        assert line in said
    assert "rotary" not in said and "\n" not in said


def test_kimi_is_deepseek_v3_and_its_flags_may_give_a_head_size_that_means_nothing() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
             "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
             "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False,
             "hidden_act": "silu", "max_position_embeddings": 64}  # fmt: skip
    kimi, deepseek = ({**sizes, "model_type": name} for name in ("kimi_k2", "deepseek_v3"))
    assert describe(kimi).transformer == describe(deepseek).transformer
    assert compare({"kv_channels": 64, "v_head_dim": 8}, kimi) == []
    assert compare({"v_head_dim": 16}, kimi) == ["--v-head-dim 16 is given, config.json says 8; leave it out"]


def test_a_model_that_megatron_does_not_know_is_refused_only_where_flags_ask(tmp_path: Path) -> None:
    assert compare({"num_layers": None, "swiglu": False}, {"model_type": "mamba"}) == []
    with pytest.raises(SettingsError, match="not model_type 'mamba'"):
        check_architecture(settings_of("--num-layers 2", {"model_type": "mamba"}, tmp_path))


def test_every_flag_that_describes_a_model_is_compared() -> None:
    assert set(facts(describe(QWEN3_4B))) == set(ArchitectureSettings.__struct_fields__) - set(NOT_COMPARED)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--layernorm-zero-centered-gamma", "--layernorm-zero-centered-gamma is given, config.json has no such thing"),
        ("--softmax-scale 0.5", "--softmax-scale 0.5 is given, config.json has no such thing"),
        ("--window-size 128 0", r"--window-size \[128, 0\] is given, config.json has no such thing"),
        ("--add-bias-linear", "--add-bias-linear is given, config.json has no such thing"),
        ("--rotary-scaling-factor 4", r"--rotary-scaling-factor 4.0 is given, config.json has no such thing"),
    ],
)
def test_a_field_that_says_what_the_model_is_may_only_repeat_its_config(flags: str, said: str, tmp_path: Path) -> None:
    """Engines load config.json: with another norm or window the policy that is trained is not the one that samples."""
    base = f"--hf-checkpoint {tmp_path} --num-rollout 1 --rm-type math --prompt-data p.jsonl --max-weight-staleness 0 "
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    with pytest.raises(SettingsError, match=said):
        check_architecture(load(None, parse_flags((base + flags).split(), frozenset()).values).settings)
    same = "--no-layernorm-zero-centered-gamma --rope-type rope --softmax-type vanilla --recompute-granularity full"
    check_architecture(load(None, parse_flags((base + same).split(), frozenset()).values).settings)


def test_fields_of_a_model_are_compared_with_what_it_has() -> None:
    gemma = describe({
        **QWEN3_4B, "model_type": "gemma2", "query_pre_attn_scalar": 256, "sliding_window": 8,
        "hidden_activation": "gelu_pytorch_tanh",
    })  # fmt: skip
    assert fields_against({"layernorm_zero_centered_gamma": True, "softmax_scale": 0.0625, "window_size": ("7", "0")}, gemma) == []
    [said] = fields_against({"window_size": (4095, 0)}, gemma)
    assert said == "--window-size [4095, 0] is given, config.json says [7, 0]; leave it out"
    assert OF_MODEL.keys() <= FIELDS.keys()


def test_patterns_of_layers_with_experts() -> None:
    assert layer_pattern("[0]*2+[1]*3", 5) == layer_pattern("([0]*2+[1]*3)", 5) == [0, 0, 1, 1, 1]
    assert layer_pattern("[1]+[0,1]*2", 5) == [1, 0, 1, 0, 1]
    assert layer_pattern("2", 4) == [1, 0, 1, 0]
    assert layer_pattern("__import__('os')", 4) is None
    given = {
        "moe_layer_freq": "[1]*36",
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_router_score_function": "softmax",
    }
    assert compare(given, SPARSE) == []
    [said] = compare({"moe_layer_freq": "[0]*36"}, SPARSE)
    assert said.startswith("--moe-layer-freq [0, 0")


def test_layer_specs_of_miles_are_answered_by_the_family() -> None:
    assert is_ours(("miles_plugins.models.glm4", "get_glm_spec"))
    assert not is_ours(("mine.layers", "get_spec")) and not is_ours(())


def test_a_layout_that_does_not_divide_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM4_9B))
    base: dict[str, Any] = {"hf_checkpoint": str(tmp_path), "num_rollout": 1, "rm_type": "math", "prompt_data": "p.jsonl"}
    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 3, "actor_num_gpus_per_node": 12}
    said = r"2 key-value heads can't be cut into 4 equal parts; nearest: 2; .*nearest: 2 or 4"
    with pytest.raises(SettingsError, match=said) as caught:
        check_architecture(settings_from(**base, **layout))
    assert "\n" not in str(caught.value)
    check_architecture(settings_from(**base, **layout | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                                                         "actor_num_gpus_per_node": 4}))  # fmt: skip


@pytest.mark.parametrize("value", ["x", [], {"a": 1}, 1.5, True, -1, 0])
def test_values_of_a_config_that_are_none_are_refused_in_one_line(value: Any) -> None:
    config = CONFIGS["qwen3-30b-a3b"]
    for key in (*SIZES, "decoder_sparse_step", "mlp_only_layers", "rope_parameters", "rope_scaling", "hidden_act"):
        try:
            found = describe(config | {key: value})
        except Refused as error:
            assert "\n" not in str(error)
            continue
        assert key not in SIZES, f"{key}={value!r} was taken"
        compare({"num_layers": 48}, config | {key: value})
        assert found.experts == 128
