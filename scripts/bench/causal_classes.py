"""Causal classes of the installed transformers that are held to train, and small random models of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "rotary_dim": 8,
    "ffn_dim": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "n_groups": 1,
    "expand": 2,
    "chunk_size": 16,
    "ssm_state_size": 8,
    "block_size": 8,
    "word_embed_proj_dim": 32,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4}
"""Latent attention has as many heads of keys as of queries."""
OWN: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
}
"""What a family needs besides `SIZES`."""
CLASSES = (
    *("afmoe", "apertus", "bamba", "bloom", "cohere2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone4", "falcon_h1"),
    *("gemma2", "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_neox", "gpt_oss"),
    *("granitemoehybrid", "jamba", "lfm2", "llama4_text", "mamba2", "minimax", "minimax_m2", "mistral", "mixtral", "nemotron_h"),
    *("olmo2", "olmoe", "opt", "phi3", "qwen2_moe", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "smollm3"),
)
"""model_type of the classes that are measured."""
WIDTHS = (
    "vocab_size", "hidden_size", "n_embd", "d_model", "head_dim", "intermediate_size", "ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
    "rotary_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_d_head", "mamba_d_ssm",
    "mamba_head_dim", "mamba_dt_rank", "state_size", "ssm_state_size", "time_step_rank", "word_embed_proj_dim",
    "attention_hidden_size", "lru_width", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
)  # fmt: skip
"""What `wider` makes wider."""


def tiny_config(family: str, wider: int = 1, deeper: int = 1) -> Any:
    """A config of this model_type with few and small layers; `wider` and `deeper`: factors of widths and of layers."""
    kind = CONFIG_MAPPING[family]
    named = kind().to_dict()
    given = {name: value for name, value in SIZES.items() if name in named and (named[name] is not None or "token_id" in name)}
    given |= OWN.get(family, {})
    for name, value in given.items():
        if name in WIDTHS:
            given[name] = value * wider
        elif name.endswith("layers") or name in ("n_layer", "layer_types"):
            given[name] = value * deeper
    return kind(**given)


def make_causal(family: str, directory: Path, seed: int = 0) -> None:
    """Save a tiny random model of this model_type; every weight is a random number, none is the same as another."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        model.save_pretrained(directory)
