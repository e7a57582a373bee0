"""The families with code of our own: packed attention in every layer, compiled layers, replayed routers, pictures."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from actors.runtime.vision import FAMILIES as SIGHTED
from actors.trainer.torch_backend import attention, experts
from actors.trainer.torch_backend.implementations.kind import Implementation
from actors.trainer.torch_backend.policy import Policy, SightedPolicy

TEXT = ("llama", "qwen2", "qwen3", *experts.FAMILIES)
FAMILIES = (*TEXT, *SIGHTED)
RECOMPUTED: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random


def recompute(hf: Any) -> None:
    """Every layer computes again in the backward."""
    hf.gradient_checkpointing_enable(RECOMPUTED)
    hf.train()


def _lacks(config: Any, families: tuple[str, ...]) -> str:
    if config.model_type not in families:
        return f"model_type {config.model_type!r} has no code of our own, which {', '.join(FAMILIES)} have"
    if "sliding_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        return "our own code has no sliding-window attention"
    return ""


OWN = Implementation(
    name="own",
    lacks=lambda config: _lacks(config, TEXT),
    loads=AutoModelForCausalLM,
    attention={"attn_implementation": attention.PACKED},
    configured=lambda config: None,
    prepared=experts.prepare,
    recomputes=recompute,
    policy=Policy,
)
OWN_SIGHTED = Implementation(
    name="own",
    lacks=lambda config: _lacks(config, SIGHTED),
    loads=AutoModelForImageTextToText,
    attention={"attn_implementation": {"text_config": attention.PACKED, "vision_config": "sdpa"}},
    configured=lambda config: None,
    prepared=lambda hf: None,
    recomputes=recompute,
    policy=SightedPolicy,
    critic=False,
)
