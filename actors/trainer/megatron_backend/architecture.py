"""A model as its config.json describes it, in Megatron's terms (pure).

Always true: nothing of an architecture comes from flags; what Megatron can't compute exactly as the model was trained is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import mapping
from actors.trainer.megatron_backend.layout import ModelShape
from actors.trainer.megatron_backend.mapping import Rule

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class Architecture:
    """What builds the model and names its weights."""

    family: str
    """model_type of config.json"""
    transformer: Mapping[str, Any]
    """fields of megatron.core's TransformerConfig (MLATransformerConfig with multi_latent_attention); activation_func by name"""
    rules: tuple[Rule, ...]
    vocab: int
    max_positions: int
    tied: bool
    """input embedding and head are one matrix"""
    rotary: Mapping[str, Any]
    """rope_parameters as transformers writes them: rope_type, rope_theta, partial_rotary_factor, ..."""
    post_norms: bool = False
    """norms on the outputs of attention and feed-forward block as well"""
    wide_norms: bool = False
    """queries and keys are normed over all their heads together, not head by head"""
    local_rotary: Mapping[str, Any] | None = None
    """the same of layers with a window, where they have one of their own"""
    embedding_scale: float = 1.0
    """what embeddings are multiplied with"""
    score_cap: float = 0.0
    """scores of attention are cap * tanh(score / cap); 0: as they are"""
    logit_cap: float = 0.0
    """the same of logits"""
    config: Mapping[str, Any] | None = None
    """the whole config.json"""

    @property
    def layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def experts(self) -> int:
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def shape(self) -> ModelShape:
        """What a layout must divide."""
        t = self.transformer
        return ModelShape(
            heads=t["num_attention_heads"], groups=t["num_query_groups"], layers=t["num_layers"], ffn=t["ffn_hidden_size"],
            experts=self.experts, expert_ffn=t.get("moe_ffn_hidden_size") or 0,
            shared_ffn=t.get("moe_shared_expert_intermediate_size") or 0,
        )  # fmt: skip

    def is_expert_layer(self, n: int) -> bool:
        """Whether layer `n` has experts."""
        return bool(self.experts) and bool(self.transformer["moe_layer_freq"][n])

    @property
    def ffn_of_a_token(self) -> int:
        """Columns of the feed-forward blocks that a token meets, on average over the layers."""
        t, shape = self.transformer, self.shape
        sparse = sum(self.is_expert_layer(n) for n in range(self.layers))
        inside = int(t.get("moe_router_topk") or 0) * shape.expert_ffn + shape.shared_ffn
        return (sparse * inside + (self.layers - sparse) * shape.ffn) // self.layers

    def elements(self) -> dict[str, int]:
        """Elements of some parameters in all layers together, by their names in rules: they tell architectures apart."""
        t, h = self.transformer, self.transformer["hidden_size"]
        sparse = sum(self.is_expert_layer(n) for n in range(self.layers))
        heads, groups, width = t["num_attention_heads"], t["num_query_groups"], t["kv_channels"]
        block, expert = mapping.LAYER + "mlp.", sparse * self.experts * t.get("moe_ffn_hidden_size", 0)
        return {
            name: size
            for name, size in {
                block + "linear_fc1.weight": (self.layers - sparse) * 2 * t["ffn_hidden_size"] * h,
                block + "experts.{e}.linear_fc1.weight": 2 * expert * h,
                mapping.LAYER + "self_attention.linear_proj.weight": self.layers * heads * width * h,
                mapping.LAYER + "self_attention.linear_qkv.weight": self.layers * (heads + 2 * groups) * width * h,
            }.items()
            if size and name in {rule.megatron for rule in self.rules}
        }

    def hf_names(self) -> Iterator[str]:
        """Every tensor of the Hugging Face directory, once."""
        seen: set[str] = set()
        for rule in self.rules:
            for n in range(self.layers if "{n}" in rule.megatron else 1):
                if not self._in_layer(rule, n):
                    continue
                for e in range(self.experts if "{e}" in rule.megatron else 1):
                    yield from (name for name in rule.names(n, e) if name not in seen)
                    seen.update(rule.names(n, e) if "{n}" not in rule.megatron else ())

    def _in_layer(self, rule: Rule, n: int) -> bool:
        if not self.experts or ".mlp." not in rule.megatron:
            return True
        of_experts = any(part in rule.megatron for part in (".router.", ".experts.", ".shared_experts."))
        return of_experts == self.is_expert_layer(n)


class ConfigReader:
    """config.json with what every family shares; a key that is missing and has no default is refused."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self._where = config, where

    def __getitem__(self, key: str) -> Any:
        if (value := self.config.get(key)) is None:
            raise Refused(f"{self._where}: {key} is missing; the model can't be built without it")
        return value

    def get(self, key: str, default: Any) -> Any:
        """A key's value, or the default where it is missing or null."""
        return default if (value := self.config.get(key)) is None else value

    def refuse(self, key: str, why: str) -> Refused:
        return Refused(
            f"{self._where}: {key}={self.config.get(key)!r} can't be trained on Megatron: {why}; use --train-backend torch"
        )

    def rotary(self) -> dict[str, Any]:
        """Rope parameters in the form of transformers 5, also out of the older keys."""
        given = self.config.get("rope_parameters")
        if given is None:
            old = dict(self.config.get("rope_scaling") or {})
            old["rope_type"] = old.pop("type", None) or old.get("rope_type") or "default"
            given = {**old, "rope_theta": self.get("rope_theta", 10000.0),
                     "partial_rotary_factor": self.get("partial_rotary_factor", 1.0)}  # fmt: skip
        known = {name: self.get(name, usual) for name, usual in (("partial_rotary_factor", 1.0), ("rope_theta", 10000.0))}
        return {"rope_type": "default", **known, **given}

    def dense(self, rules: list[Rule], *, transformer: Mapping[str, Any], tied: bool = False,
              rotary: Mapping[str, Any] | None = None, **own: Any) -> Architecture:  # fmt: skip
        """An architecture out of the keys that all share, and what a family adds to them. `own`: further fields of it."""
        heads = self["num_attention_heads"]
        key = "hidden_activation" if self.config.get("hidden_activation") else "hidden_act"
        if (act := self.get(key, "silu")) not in ACTIVATIONS:
            raise self.refuse(key, f"only {' and '.join(ACTIVATIONS)} are mapped")
        rotary = rotary or self.rotary()
        if rotary["rope_type"] not in (
            known := ("default", "llama3", "linear", *(["yarn"] if "kv_lora_rank" in self.config else []))
        ):
            raise self.refuse("rope_scaling", f"of the kinds of rope scaling {', '.join(known)} are mapped")
        if self.get("use_sliding_window", False):
            raise self.refuse("use_sliding_window", "windows are not mapped")
        if self.get("mlp_bias", False):
            raise self.refuse("mlp_bias", "biases of the feed-forward block are not mapped")
        tied = bool(self.get("tie_word_embeddings", tied))
        return Architecture(
            family=self["model_type"],
            config=self.config,
            vocab=self["vocab_size"],
            max_positions=self.get("max_position_embeddings", 4096),
            tied=tied,
            rotary=rotary,
            rules=(*mapping.top(tied), *rules),
            transformer={
                "num_layers": self["num_hidden_layers"],
                "hidden_size": self["hidden_size"],
                "ffn_hidden_size": self["intermediate_size"],
                "num_attention_heads": heads,
                "num_query_groups": self.get("num_key_value_heads", heads),
                "kv_channels": self.get("head_dim", self["hidden_size"] // heads),
                "layernorm_epsilon": self["rms_norm_eps"],
                "normalization": "RMSNorm",
                "gated_linear_unit": True,
                "activation_func": act,
                "add_bias_linear": False,
                "init_method_std": self.get("initializer_range", 0.02),
                **transformer,
            },
            **own,
        )
