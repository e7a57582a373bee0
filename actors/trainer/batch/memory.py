"""What a GPU of the trainer holds in a step, by estimate (pure): activations of a micro-batch, and whether what FSDP could hold
whole fits beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
GATHERED_BYTES = 6  # of a trained parameter that is held whole: the computing weight and the float32 gradient
SHARED_BYTES = 12  # ... and of one that ranks share: the float32 weight and two moments
WORTH_COMPILING = 100_000_000
"""Parameters from which on `compile = auto` compiles; on an H200 compiling took 4 to 12 s, a step of a tiny model 0.06."""
FULL = 0.8  # of a GPU, that an estimate may fill; the rest is for what is not counted


def _layer_bytes(config: Mapping[str, Any], *, fused: bool, tp: int = 1, along: int = 1) -> tuple[float, float]:
    """Bytes that a layer keeps of one token for the backward pass: in all, and of its input alone. config: config.json of a
    decoder. `fused`: compiled layers or Transformer Engine's. `along`: ranks that share what is between matrices. The factors give
    the peaks that were measured on H200s, within 4 %: uncompiled torch, torch's compiled layers and Transformer Engine's
    (docs/results.md)."""
    hidden, inner, _, heads = (int(config[name]) for name in SIZES)
    width = int(config.get("head_dim") or hidden // heads)
    attention = width * (heads + 2 * int(config.get("num_key_value_heads") or heads))
    if of := int(config.get("num_experts_per_tok") or 0):  # not measured
        inner, hidden = of * int(config.get("moe_intermediate_size") or inner), hidden * (1 + of // 2)
    if not fused:
        return 16 * hidden + 8 * inner + 10 * attention, 2 * hidden
    return 8 * hidden / along + (6 * inner + 7 * attention) / tp, 2 * hidden / along


def activation_bytes(
    config: Mapping[str, Any], tokens: int, recomputed: float, *, fused: bool, tp: int = 1, along: int = 1, flight: float = 1.0
) -> int:
    """Of `tokens` tokens in all layers. `recomputed`: layers of which only the input is kept. `flight`: micro-batches under way."""
    layers = int(config["num_hidden_layers"])
    whole, inputs = _layer_bytes(config, fused=fused, tp=tp, along=along)
    kept = flight * ((layers - recomputed) * whole + recomputed * inputs)
    return int(tokens * (kept + (whole if recomputed == layers else 0)))


def recomputed(layers: int, checkpointing: bool, first: int) -> int:
    """Of so many layers those whose input alone is kept: the `first`, 0 for all, where the torch backend checkpoints."""
    return min(first or layers, layers) if checkpointing else 0


def gathers(fsdp_shard: str, trained: int, ranks: int, activations: int, gpu_bytes: int | None) -> bool:
    """Whether each of several ranks holds the weights and gradients of its `trained` parameters whole in a step, beside so many
    bytes of activations. gpu_bytes: of one GPU; None where there is none, or nobody knows."""
    if ranks == 1 or fsdp_shard != "auto":
        return ranks > 1 and fsdp_shard == "optimizer"
    need = (GATHERED_BYTES + SHARED_BYTES / ranks) * trained + activations
    return not gpu_bytes or need <= FULL * gpu_bytes
