"""The families of models that the Megatron backend builds from config.json, one record each (pure).

A record says what config.json means in Megatron's terms and which Hugging Face tensors each parameter holds. `tested`
in docs/megatron.md means: forward pass equal to transformers', weights bit-equal in both directions (tests/megatron).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import mapping
from actors.trainer.megatron_backend.architecture import Architecture, ConfigReader

PRE_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


def llama(c: ConfigReader) -> Architecture:
    if c.get("attention_bias", False):
        raise c.refuse("attention_bias", "a bias of the output projection is not mapped")
    rules = [*mapping.norms(**PRE_NORMS), *mapping.attention(bias=False, qk_norm=False), *mapping.mlp()]
    return c.dense(rules, transformer={})


def qwen2(c: ConfigReader) -> Architecture:
    rules = [*mapping.norms(**PRE_NORMS), *mapping.attention(bias=True, qk_norm=False), *mapping.mlp()]
    return c.dense(rules, transformer={"add_qkv_bias": True})


def qwen3(c: ConfigReader) -> Architecture:
    if c.get("attention_bias", False):
        raise c.refuse("attention_bias", "a bias of the output projection is not mapped")
    rules = [*mapping.norms(**PRE_NORMS), *mapping.attention(bias=False, qk_norm=True), *mapping.mlp()]
    return c.dense(rules, transformer={"qk_layernorm": True})


def qwen3_moe(c: ConfigReader) -> Architecture:
    if c.get("attention_bias", False):
        raise c.refuse("attention_bias", "a bias of the output projection is not mapped")
    step, plain = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers", [])
    pattern = [int(n not in plain and (n + 1) % step == 0) for n in range(c["num_hidden_layers"])]
    rules = [*mapping.norms(**PRE_NORMS), *mapping.attention(bias=False, qk_norm=True), *_feed_forward(pattern)]
    return c.dense(rules, transformer={
        "qk_layernorm": True, "moe_layer_freq": pattern,
        "num_moe_experts": c.config.get("num_experts") or c["num_local_experts"],
        "moe_router_topk": c["num_experts_per_tok"], "moe_ffn_hidden_size": c["moe_intermediate_size"],
        "moe_router_pre_softmax": not c.get("norm_topk_prob", False),
    })  # fmt: skip


def glm4(c: ConfigReader) -> Architecture:
    names = {"input_layernorm": "input_layernorm", "post_self_attn_layernorm": "post_self_attn_layernorm",
             "pre_mlp_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_mlp_layernorm"}  # fmt: skip
    bias = c.get("attention_bias", False)
    rules = [*mapping.norms(**names), *mapping.attention(bias=bias, qk_norm=False), *mapping.mlp(fused=True)]
    rotary = {
        **c.rotary(),
        "partial_rotary_factor": c.get("partial_rotary_factor", c.rotary().get("partial_rotary_factor", 0.5)),
    }
    return c.dense(rules, transformer={"add_qkv_bias": bias, "rotary_interleaved": True}, post_norms=True, rotary=rotary)


def glm4_moe(c: ConfigReader) -> Architecture:
    bias, qk_norm = c.get("attention_bias", False), c.get("use_qk_norm", False)
    pattern = _after_dense(c)
    rules = [
        *mapping.norms(**PRE_NORMS),
        *mapping.attention(bias=bias, qk_norm=qk_norm),
        *_feed_forward(pattern, bias=True, shared=True),
    ]
    return c.dense(rules, transformer={"add_qkv_bias": bias, "qk_layernorm": qk_norm, **_sigmoid_experts(c, pattern)})


def deepseek_v2(c: ConfigReader) -> Architecture:
    if (method := c.get("topk_method", "greedy")) != "greedy":
        raise c.refuse("topk_method", f"Megatron ranks groups of experts by a sum of scores, {method} by their maximum")
    if c.get("norm_topk_prob", False):
        raise c.refuse("norm_topk_prob", "DeepSeek-V2 in transformers doesn't read it")
    pattern = _after_dense(c)
    rules = [*mapping.norms(**PRE_NORMS), *_latent(c), *_feed_forward(pattern, shared=True)]
    scale = c.get("routed_scaling_factor", 1.0)
    return c.dense(rules, transformer={
        **_latent_config(c), "moe_layer_freq": pattern, "num_moe_experts": c["n_routed_experts"],
        "moe_router_topk": c["num_experts_per_tok"], "moe_ffn_hidden_size": c["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": c["n_shared_experts"] * c["moe_intermediate_size"],
        "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
    })  # fmt: skip


def deepseek_v3(c: ConfigReader) -> Architecture:
    pattern = _after_dense(c)
    rules = [*mapping.norms(**PRE_NORMS), *_latent(c), *_feed_forward(pattern, bias=True, shared=True)]
    return c.dense(rules, transformer={**_latent_config(c), **_sigmoid_experts(c, pattern)})


def minimax_m2(c: ConfigReader) -> Architecture:
    if (scores := c.get("scoring_func", "sigmoid")) != "sigmoid":
        raise c.refuse("scoring_func", f"the family's routers have sigmoid scores, not {scores}")
    if not c.get("use_qk_norm", True):
        raise c.refuse("use_qk_norm", "queries and keys are normed in this family")
    rotary = c.rotary()
    if (channels := c.config.get("rotary_dim")) is not None:
        rotary["partial_rotary_factor"] = channels / c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    experts = mapping.experts(bias="e_score_correction_bias", theirs="block_sparse_moe", names=("w1", "w3", "w2"))
    rules = [*mapping.norms(**PRE_NORMS), *mapping.attention(bias=False, qk_norm=True), *experts]
    return c.dense(rules, rotary=rotary, wide_norms=True, transformer={
        "moe_layer_freq": [1] * c["num_hidden_layers"], "num_moe_experts": c["num_local_experts"],
        "moe_router_topk": c["num_experts_per_tok"], "moe_ffn_hidden_size": c["intermediate_size"],
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    })  # fmt: skip


def gemma2(c: ConfigReader) -> Architecture:
    return _gemma(c, mapping.attention(bias=False, qk_norm=False), every=2)


def gemma3_text(c: ConfigReader) -> Architecture:
    if c.get("use_bidirectional_attention", False):
        raise c.refuse("use_bidirectional_attention", "a policy sees nothing of what follows")
    given = c.config.get("rope_parameters") or {}
    if "full_attention" in given:
        whole, local = given["full_attention"], given["sliding_attention"]
    else:
        whole = {"rope_type": "default", **(c.config.get("rope_scaling") or {}), "rope_theta": c.get("rope_theta", 1e6)}
        local = {"rope_theta": c.get("rope_local_base_freq", 1e4)}
    plain = {"rope_type": "default", "partial_rotary_factor": 1.0}
    rules = mapping.attention(bias=False, qk_norm=True)
    return _gemma(c, rules, every=6, rotary={**plain, **whole}, local_rotary={**plain, **local})


def _gemma(c: ConfigReader, attention: list[mapping.Rule], *, every: int, **own: Any) -> Architecture:
    """`every`: of so many layers the last one has no window, where config.json lists none."""
    if c.get("attention_bias", False):
        raise c.refuse("attention_bias", "a bias of the output projection is not mapped")
    names = {"input_layernorm": "input_layernorm", "post_self_attn_layernorm": "post_attention_layernorm",
             "pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}  # fmt: skip
    every = c.get("sliding_window_pattern", every)
    kinds = c.config.get("layer_types") or ["full" if n % every == 0 else "sliding" for n in range(1, c["num_hidden_layers"] + 1)]
    windows = [int(kind.startswith("sliding")) for kind in kinds]
    return c.dense(
        [*mapping.norms(**names), *attention, *mapping.mlp()],
        transformer={
            "layernorm_zero_centered_gamma": True, "softmax_scale": c["query_pre_attn_scalar"] ** -0.5,
            "qk_layernorm": "local_rotary" in own, "window_attn_skip_freq": windows,
            "window_size": (c["sliding_window"] - 1, 0) if any(windows) else None,  # tokens before a token that it sees
        },
        tied=True, post_norms=True, embedding_scale=c["hidden_size"] ** 0.5,
        score_cap=c.get("attn_logit_softcapping", 0.0), logit_cap=c.get("final_logit_softcapping", 0.0), **own,
    )  # fmt: skip


def _after_dense(c: ConfigReader) -> list[int]:
    """1 for each layer with experts: all after the first few."""
    dense = c.get("first_k_dense_replace", 0)
    return [int(n >= dense) for n in range(c["num_hidden_layers"])]


def _feed_forward(pattern: list[int], *, bias: bool = False, shared: bool = False) -> list[mapping.Rule]:
    return [
        *(mapping.mlp() if 0 in pattern else []),
        *(mapping.experts(bias="gate.e_score_correction_bias" if bias else "", shared=shared) if 1 in pattern else []),
    ]


def _sigmoid_experts(c: ConfigReader, pattern: list[int]) -> dict[str, Any]:
    if not c.get("norm_topk_prob", True):
        raise c.refuse("norm_topk_prob", "Megatron always normalises sigmoid scores")
    groups, of = c.get("n_group", 1), c.get("topk_group", 1)
    if groups > 1 and c["num_experts_per_tok"] // of != 2:
        raise c.refuse(
            "topk_group",
            "Megatron ranks groups by their num_experts_per_tok / topk_group best scores, the model by two",
        )
    return {
        "moe_layer_freq": pattern, "num_moe_experts": c["n_routed_experts"], "moe_router_topk": c["num_experts_per_tok"],
        "moe_ffn_hidden_size": c["moe_intermediate_size"], "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": c["n_shared_experts"] * c["moe_intermediate_size"],
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": c.get("routed_scaling_factor", 1.0),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": of} if groups > 1 else {}),
    }  # fmt: skip


def _latent(c: ConfigReader) -> list[mapping.Rule]:
    return mapping.latent_attention(q_rank=c.config.get("q_lora_rank"), kv_rows=c["kv_lora_rank"] + c["qk_rope_head_dim"])


def _latent_config(c: ConfigReader) -> dict[str, Any]:
    if c.get("attention_bias", False):
        raise c.refuse("attention_bias", "biases of latent attention are not mapped")
    rope = c.rotary()
    scaled: Mapping[str, Any] = {"rope_type": "rope"}
    if rope["rope_type"] == "yarn":
        scaled = {
            "rope_type": "yarn", "rotary_scaling_factor": rope["factor"], "beta_fast": rope.get("beta_fast", 32),
            "original_max_position_embeddings": rope["original_max_position_embeddings"], "beta_slow": rope.get("beta_slow", 1),
            "mscale": rope.get("mscale", 1.0), "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        }  # fmt: skip
    return {
        "multi_latent_attention": True, "qk_layernorm": True, "num_query_groups": c["num_attention_heads"],
        "q_lora_rank": c.config.get("q_lora_rank"), "kv_lora_rank": c["kv_lora_rank"], "qk_head_dim": c["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": c["qk_rope_head_dim"], "v_head_dim": c["v_head_dim"], "kv_channels": c["v_head_dim"],
        "rotary_base": rope["rope_theta"], **scaled,
    }  # fmt: skip


FAMILIES: dict[str, Callable[[ConfigReader], Architecture]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "minimax_m2": minimax_m2,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
}
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model type -> the family that it is, tensors and config.json alike."""
REFUSED = {"gemma3": "its tower for pictures is not mapped; give a directory of the text model alone, model_type gemma3_text"}


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
)


def describe(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """The architecture that a config.json describes. Raises Refused with the reason where Megatron can't train it."""
    given = str(config.get("model_type"))
    family = ALIASES.get(given, given)
    if family in REFUSED:
        raise Refused(f"{where}: {family} can't be trained: {REFUSED[family]}; families are {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        known, other = ", ".join((*FAMILIES, *ALIASES)), "--train-backend torch trains any causal class of transformers"
        raise Refused(f"{where}: the Megatron backend knows {known}, not model_type {family!r}; {other}")
    for key in SIZES:
        if (value := config.get(key)) is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise Refused(f"{where}: {key}={value!r} is no whole number >= 1")
    try:
        return FAMILIES[family](ConfigReader(config, where))
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:  # patterns, rope parameters
        raise Refused(f"{where}: a value is not of its kind ({type(error).__name__}: {error})") from error
