"""Which Hugging Face tensors one Megatron parameter holds, under which names (pure).

Always true: the rules of an architecture name every Hugging Face tensor of the model once, those of tied weights apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["whole", "vocabulary", "qkv", "halves", "fused_halves"]
"""How tensors lie in the parameter: `whole` one tensor as it is; `vocabulary` its rows are padded; `qkv` queries, keys and
values of each key-value group one after the other; `halves` gate then up, each rank its part of both; `fused_halves` the same out
of one tensor. Where the parameter is cut over ranks stands in the parameter itself."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter. Names hold {n} for the layer and {e} for the expert."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "whole"
    rows: int = 0
    """of a whole tensor that some layers cut and others repeat on every rank: then this many; 0: the parameter says it"""

    def names(self, n: int = 0, e: int = 0) -> tuple[str, ...]:
        """The Hugging Face tensors of layer `n`, expert `e`."""
        return tuple(name.format(n=n, e=e) for name in self.hf)


Names = tuple[str, str, str]
NAMES: Names = ("gate_proj", "up_proj", "down_proj")
"""Of the matrices of a gated feed-forward block."""
LAYER = "decoder.layers.{n}."
HF_LAYER = "model.layers.{n}."
_ALIASES = (
    # Transformer Engine fuses a norm with the product behind it; the norm keeps its own name here.
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_"), "input_layernorm."),
    (re.compile(r"self_attention\.linear_q_up_proj\.layer_norm_"), "self_attention.q_layernorm."),
    (re.compile(r"self_attention\.linear_kv_up_proj\.layer_norm_"), "self_attention.kv_layernorm."),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_"), "pre_mlp_layernorm."),
    # Experts: all as one tensor (in checkpoints), a list of modules, or numbered weights of one module.
    (re.compile(r"mlp\.experts\.experts\.(?!\d)"), "mlp.experts.0."),
    (re.compile(r"mlp\.experts\.(?:local_)?experts\.(\d+)\."), r"mlp.experts.\1."),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)"), r"mlp.experts.\2.\1.weight"),
)
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.")


def canonical(name: str) -> tuple[str, int, int]:
    """(name of a rule, layer, expert) of a parameter whose layer and expert numbers are those of the whole model."""
    for pattern, plain in _ALIASES:
        name = pattern.sub(plain, name)
    layer, expert = _NUMBERED.search(name), _EXPERT.search(name)
    name = _EXPERT.sub("mlp.experts.{e}.", _NUMBERED.sub(LAYER, name))
    return name, int(layer[1]) if layer else 0, int(expert[1]) if expert else 0


def top(tied: bool) -> list[Rule]:
    """Embedding, last norm and head."""
    return [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Rule("output_layer.weight", ("model.embed_tokens.weight" if tied else "lm_head.weight",), "vocabulary"),
    ]


def norms(**named: str) -> list[Rule]:
    """Norms of a layer: Megatron's name -> Hugging Face's."""
    return [Rule(f"{LAYER}{ours}.weight", (f"{HF_LAYER}{theirs}.weight",)) for ours, theirs in named.items()]


def attention(*, bias: bool, qk_norm: bool) -> list[Rule]:
    """Grouped-query attention."""
    ours, theirs = LAYER + "self_attention.", HF_LAYER + "self_attn."
    parts = ["weight", *(["bias"] if bias else [])]
    return [
        *(Rule(f"{ours}linear_qkv.{p}", tuple(f"{theirs}{x}_proj.{p}" for x in "qkv"), "qkv") for p in parts),
        Rule(f"{ours}linear_proj.weight", (f"{theirs}o_proj.weight",)),
        *(Rule(f"{ours}{x}_layernorm.weight", (f"{theirs}{x}_norm.weight",)) for x in ("q", "k") if qk_norm),
    ]


def latent_attention(*, q_rank: int | None, kv_rows: int) -> list[Rule]:
    """Multi-head latent attention of DeepSeek: width of the latent queries, if any, and rows of what makes latent keys."""
    ours, theirs = LAYER + "self_attention.", HF_LAYER + "self_attn."
    query = (("linear_q_down_proj", "q_a_proj"), ("q_layernorm", "q_a_layernorm"), ("linear_q_up_proj", "q_b_proj"))
    pairs = (
        *(query if q_rank else (("linear_q_proj", "q_proj"),)),
        *(
            ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
            ("kv_layernorm", "kv_a_layernorm"),
            ("linear_kv_up_proj", "kv_b_proj"),
        ),
        ("linear_proj", "o_proj"),
    )
    rows = {"linear_q_down_proj": q_rank or 0, "linear_kv_down_proj": kv_rows}
    return [Rule(f"{ours}{a}.weight", (f"{theirs}{b}.weight",), rows=rows.get(a, 0)) for a, b in pairs]


def mlp(*, fused: bool = False, ours: str = "mlp", theirs: str = "mlp", names: Names = NAMES) -> list[Rule]:
    """A gated feed-forward block; `fused`: gate and up are one tensor."""
    up = ("gate_up_proj",) if fused else names[:2]
    return [
        Rule(f"{LAYER}{ours}.linear_fc1.weight", tuple(f"{HF_LAYER}{theirs}.{x}.weight" for x in up),
             "fused_halves" if fused else "halves"),
        Rule(f"{LAYER}{ours}.linear_fc2.weight", (f"{HF_LAYER}{theirs}.{names[2]}.weight",)),
    ]  # fmt: skip


def experts(*, bias: str = "", shared: bool = False, theirs: str = "mlp", names: Names = NAMES) -> list[Rule]:
    """Router, routed experts, shared experts. `bias`: of experts in the choice, its name; empty: none."""
    return [
        Rule(LAYER + "mlp.router.weight", (f"{HF_LAYER}{theirs}.gate.weight",)),
        *([Rule(LAYER + "mlp.router.expert_bias", (f"{HF_LAYER}{theirs}.{bias}",))] if bias else []),
        *mlp(ours="mlp.experts.{e}", theirs=theirs + ".experts.{e}", names=names),
        *(mlp(ours="mlp.shared_experts", theirs="mlp.shared_experts") if shared else []),
    ]
