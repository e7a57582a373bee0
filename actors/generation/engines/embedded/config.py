"""Reads a Hugging Face model directory's `config.json` into the few numbers the embedded forward needs.

Families: llama, qwen2, qwen3, qwen3_moe; with pictures qwen2_vl, qwen2_5_vl.
What the forward does not implement is refused here, by name, before any weight
is read; `decoders` then asks transformers (`classes`).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.runtime import vision
from actors.runtime.fp8 import Fp8Scheme, read_scheme

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", *vision.FAMILIES)


class ModelRefused(ValueError):
    """A model directory the embedded engine cannot serve; the text is one line for the operator. `unknown`: it has no code of its
    own for such a model."""

    def __init__(self, text: str, *, unknown: bool = False) -> None:
        super().__init__(text)
        self.unknown = unknown


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder. Lengths are in elements, `context` in tokens."""

    family: str
    architectures: tuple[str, ...]
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    norm_eps: float
    context: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    eos: frozenset[int]
    inv_freq: tuple[float, ...]
    """Rotary frequencies, [head_dim / 2]."""
    experts: int = 0
    """Of a layer that has them; 0: the model has none."""
    top_k: int = 0
    expert_inner: int = 0
    norm_top_k: bool = False
    """Weights of the chosen experts sum to 1."""
    dense: frozenset[int] = frozenset()
    """Layers without experts, of a model that has them."""
    fp8: Fp8Scheme | None = None
    """How FP8 weights of this model are stored; they are computed with in float32 all the same. None: plain weights."""
    axes: tuple[int, ...] = ()
    """Of a model that reads pictures: which of a token's three positions (time, height, width) turns each frequency."""

    def rotations(self) -> torch.Tensor:
        """complex64 [context, head_dim / 2]: cos + i sin of each position's angles (computed in float32, as the trainer
        does)."""
        angles = torch.outer(torch.arange(self.context, dtype=torch.float32), torch.tensor(self.inv_freq))
        return torch.complex(angles.cos(), angles.sin())


def read_config(model_dir: Path) -> ModelConfig:
    """Parse and check `config.json` (and `generation_config.json` for end-of-sequence ids). Raises ModelRefused."""
    raw = read_json(model_dir / "config.json")
    family = raw.get("model_type")
    sees = family in vision.FAMILIES
    raw = raw | (raw.get("text_config") or {}) if sees else raw
    if family not in FAMILIES:
        raise ModelRefused(
            f"{model_dir}: model_type {family!r} is not served here; use one of {', '.join(FAMILIES)} or SGLang.", unknown=True
        )
    for field, wanted in (("hidden_act", "silu"), ("use_sliding_window", False)):
        if raw.get(field, wanted) != wanted:
            raise ModelRefused(
                f"{model_dir}: {field}={raw[field]!r} is not served here, only {wanted!r}; use SGLang.", unknown=True
            )
    try:
        fp8 = read_scheme(raw)
    except ValueError as error:
        raise ModelRefused(f"{model_dir}: {error}; use SGLang.") from None
    try:
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        head_dim = raw.get("head_dim") or hidden // heads
        bias = bool(raw.get("attention_bias", False))
        return ModelConfig(
            family=family,
            architectures=tuple(raw.get("architectures") or ()),
            vocab=raw["vocab_size"],
            hidden=hidden,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            inner=raw["intermediate_size"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            context=raw["max_position_embeddings"],
            tied=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=bias or family == "qwen2" or sees,
            o_bias=bias and family != "qwen2" and not sees,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            eos=eos_ids(raw, model_dir),
            inv_freq=_inv_freq(raw, head_dim, model_dir),
            fp8=fp8,
            axes=_axes(raw, head_dim, model_dir) if sees else (),
            **(_experts(raw) if family == "qwen3_moe" else {}),
        )
    except KeyError as missing:
        raise ModelRefused(f"{model_dir / 'config.json'} lacks {missing}; write it with transformers' save_pretrained.") from None


def _experts(raw: dict[str, Any]) -> dict[str, Any]:
    every, dense = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    return {
        "experts": raw.get("num_experts") or raw["num_local_experts"],
        "top_k": raw["num_experts_per_tok"],
        "expert_inner": raw["moe_intermediate_size"],
        "norm_top_k": bool(raw.get("norm_topk_prob", False)),
        "dense": frozenset(i for i in range(raw["num_hidden_layers"]) if i in dense or (i + 1) % every),
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model directory. Raises ModelRefused."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ModelRefused(f"cannot read {path}: {error.strerror}; give a model directory.") from None
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{path} is not a JSON object.")
    return value


def eos_ids(raw: dict[str, Any], model_dir: Path) -> frozenset[int]:
    """End-of-sequence ids of config.json and generation_config.json."""
    extra = model_dir / "generation_config.json"
    found: set[int] = set()
    for source in (raw, read_json(extra) if extra.exists() else {}):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _axes(raw: dict[str, Any], head_dim: int, model_dir: Path) -> tuple[int, ...]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    found = tuple(i % 3 for i, n in enumerate(rope.get("mrope_section") or (16, 24, 24)) for _ in range(n))
    if len(found) != head_dim // 2:
        raise ModelRefused(f"{model_dir}: mrope_section has {len(found)} frequencies, a head has {head_dim // 2}.")
    return found


def _inv_freq(raw: dict[str, Any], head_dim: int, model_dir: Path) -> tuple[float, ...]:
    """Rotary frequencies for rope types default, linear and llama3 (the Llama 3.1 wavelength blend)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    base = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    freq = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelRefused(f"{model_dir}: partial rotary embedding is not served here; use SGLang.", unknown=True)
    if kind == "linear":
        freq = freq / rope["factor"]
    elif kind == "llama3":
        old = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wave = 2 * math.pi / freq
        blend = ((old / wave - low) / (high - low)).clamp(0.0, 1.0)
        freq = (1 - blend) * freq / rope["factor"] + blend * freq
    elif kind not in ("default", "mrope"):
        raise ModelRefused(f"{model_dir}: rope_type {kind!r} is not served here, only default, linear, llama3.", unknown=True)
    return tuple(freq.tolist())
