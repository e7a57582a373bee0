"""Megatron's flags for a model's architecture against its config.json, which decides (pure).

Launch scripts of Megatron repeat what config.json says. Always true: a flag that passes here says the same, so it may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.families import describe

RENAMED = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
"""flag -> field of TransformerConfig, where the names differ"""
OF_TRANSFORMER = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization",
    "add_qkv_bias", "qk_layernorm", "rotary_interleaved", "multi_latent_attention", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", *RENAMED,
)  # fmt: skip
OF_MODEL: Mapping[str, Any] = {
    "add_bias_linear": False, "apply_residual_connection_post_layernorm": False, "attention_output_gate": False,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "gated_linear_unit": True,
    "experimental_attention_variant": None, "heterogeneous_block_specs": False, "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None, "moe_apply_probs_on_input": False, "moe_latent_size": None, "moe_shared_expert_gate": False,
    "moe_router_topk_limited_devices": None, "mrope_section": None, "no_rope_freq": None, "qk_l2_norm": False,
    "softmax_scale": None, "softmax_type": "vanilla", "window_size": None, "window_attn_skip_freq": None,
    "rope_type": "rope", "rotary_scaling_factor": None, "original_max_position_embeddings": None, "mscale": None,
    "mscale_all_dim": None, "beta_fast": None, "beta_slow": None,
}  # fmt: skip
"""Further fields of TransformerConfig that say what is computed, not how -> what a model has whose record does not say it."""
NEUTRAL = {"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 1, "rotary_scaling_factor": 1,
           "mscale": 1, "mscale_all_dim": 1}  # fmt: skip
"""Field -> the value that says the same as leaving it out."""
_DEFAULTS = {"moe_router_score_function": "softmax"}
_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")


def facts(arch: Architecture) -> dict[str, Any]:
    """Flag -> what config.json says, for every flag of an architecture. None: the model has no such thing."""
    t = arch.transformer
    return {
        **{flag: t.get(RENAMED.get(flag, flag), _DEFAULTS.get(flag)) for flag in OF_TRANSFORMER},
        "qk_layernorm": bool(t.get("qk_layernorm")) or arch.wide_norms,
        "swiglu": t["activation_func"] == "silu" and t["gated_linear_unit"],
        "moe_router_pre_softmax": t.get("moe_router_score_function") == "sigmoid" or bool(t.get("moe_router_pre_softmax")),
        "group_query_attention": t["num_query_groups"] < t["num_attention_heads"],
        "use_rotary_position_embeddings": True,
        "position_embedding_type": "rope",
        "rotary_base": arch.rotary["rope_theta"],
        "rotary_percent": arch.rotary.get("partial_rotary_factor", 1.0),
        "disable_bias_linear": not t["add_bias_linear"],
        "untie_embeddings_and_output_weights": not arch.tied,
        "vocab_size": arch.vocab,
        "post_self_attn_layernorm": arch.post_norms,
        "post_mlp_layernorm": arch.post_norms,
        "moe_layer_freq": list(t["moe_layer_freq"]) if arch.experts else None,
    }


def compare(flags: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """One line, with both values, for each given flag that says otherwise than config.json. A flag that is None or false is not
    given. Raises Refused for a config.json that Megatron can't train."""
    given = {flag: value for flag, value in flags.items() if value not in (None, False)}
    if not given:
        return []
    arch = describe(config)
    known = facts(arch)
    if arch.transformer.get("multi_latent_attention"):
        del known["kv_channels"]  # heads are as large as q_lora_rank and its kind say
    return [line for flag, value in given.items() if flag in known and (line := _differs(flag, value, known[flag], arch.layers))]


def fields_against(given: Mapping[str, Any], arch: Architecture) -> list[str]:
    """The same of fields of TransformerConfig by name: those that say what the model is may only repeat its config.json, which
    engines load."""
    known = {**OF_MODEL, **arch.transformer}
    mine = {name: _numbers(value) for name, value in given.items() if name in known}
    return [line for name, value in mine.items() if (line := _differs(name, value, known[name], arch.layers))]


def _numbers(value: Any) -> Any:
    """A list of texts that are whole numbers, as a flag gives it, is one of numbers."""
    several = isinstance(value, list | tuple)
    return [int(x) for x in value] if several and all(str(x).lstrip("-").isdecimal() for x in value) else value


def _differs(flag: str, value: Any, said: Any, layers: int) -> str:
    name = "--" + flag.replace("_", "-")
    if flag == "moe_layer_freq":
        value = layer_pattern(str(value), layers)
    said = list(said) if isinstance(said, tuple) else said
    if (
        value == said
        or (said is None and value == NEUTRAL.get(flag, said))
        or (isinstance(value, float) and isinstance(said, float | int) and abs(value - said) <= 1e-9 * abs(said))
    ):
        return ""
    there = "config.json has no such thing" if said in (None, False) else f"config.json says {said!r}"
    return f"{name} {'' if value is True else f'{value!r} '}is given, {there}; leave it out"


def layer_pattern(text: str, layers: int) -> list[int] | None:
    """Megatron's pattern of layers with experts, `3` (every third) or `[0]*3+[1]*58`, layer by layer; None for what is neither."""
    if text.isdecimal() and int(text):
        return [int(n % int(text) == 0) for n in range(layers)]
    found: list[int] = []
    for term in text.replace(" ", "").removeprefix("(").removesuffix(")").split("+"):
        if (term_found := _TERM.fullmatch(term.removeprefix("(").removesuffix(")"))) is None:
            return None
        found += [int(x) for x in term_found[1].split(",")] * int(term_found[2] or 1)
    return found


def is_ours(spec: Sequence[str]) -> bool:
    """Whether a `--spec MODULE FUNCTION` is one of Miles' or Megatron's own: their families are built from config.json here."""
    return bool(spec) and spec[0].split(".")[0] in ("miles_plugins", "slime_plugins", "megatron")
