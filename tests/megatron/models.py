"""Tiny random models of every family that the Megatron backend builds, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

VOCAB = 97  # odd: embeddings are padded where they are cut
DENSE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
            "eos_token_id": 1}  # fmt: skip
SPARSE = {**DENSE, "head_dim": 16, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {**DENSE, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          "v_head_dim": 16}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
        "beta_slow": 1, "original_max_position_embeddings": 32}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**DENSE, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", DENSE),
    "llama": ("LlamaConfig", {**DENSE, "rope_parameters": LLAMA3}),
    "glm4": ("Glm4Config", {**DENSE, "head_dim": 16, "attention_bias": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SPARSE, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "glm4_moe": ("Glm4MoeConfig", {**SPARSE, "n_routed_experts": 8, "attention_bias": True, "use_qk_norm": True,
                                   "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    "gemma2": ("Gemma2Config", {**DENSE, **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("Gemma3TextConfig", {**DENSE, **GEMMA, "sliding_window_pattern": 3, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "minimax_m2": ("MiniMaxM2Config", {**DENSE, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
                                       "intermediate_size": 24, "rotary_dim": 8}),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "moonlight": (
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
    ),
}
"""Models of another name in a family."""


def make(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save the model; returns it. Weights are wide, so that a wrong place shows."""
    import transformers  # not in the processes that only convert

    kind, shape = (MODELS | OTHERS)[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**shape), dtype=dtype, attn_implementation="eager"
    )
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
    with torch.no_grad():
        for _, weight in named:
            weight.copy_((weight if weight.ndim == 1 else 0) + 0.1 * torch.randn_like(weight))
    model.save_pretrained(directory)
    return model.eval()


def tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found
