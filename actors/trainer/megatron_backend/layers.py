"""The layers that model chunks are made of: Megatron's with what plain torch and some families need, or the user's own.

Norms and attention of our own stand in only where Transformer Engine can't run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from actors.runtime.hooks import load_hook
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.attention import Attention
from actors.trainer.megatron_backend.flags import is_ours
from actors.trainer.megatron_backend.grouped import grouped

log = logging.getLogger(__name__)
Layers = Callable[[TransformerConfig, int | None], Any]
"""(config, virtual stage) -> layer spec"""


class RMSNorm(nn.Module):
    """RMSNorm in float32, as transformers computes it. Megatron's wrapper of torch's refuses sequence parallel. Zero-centred gains
    (Gemma) are kept without their 1, which is added in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).type_as(x) if self.centred else self.weight * normed.type_as(x)


class WideNorm(nn.Module):
    """RMSNorm over all heads of queries or keys together (MiniMax-M2), of which each tensor-parallel rank has its part. `heads`:
    the field of the configuration that counts them."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: str) -> None:
        super().__init__()
        self.eps, self.ranks = eps, config.tensor_model_parallel_size
        mine = getattr(config, heads) // self.ranks * hidden_size
        self.weight = nn.Parameter(torch.ones(mine, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, width] -> the same shape and type."""
        wide = x.float().flatten(-2)
        squares = wide.pow(2).sum(-1, keepdim=True)
        if self.ranks > 1:  # their sum goes on in every rank's part, so its gradient comes from all of them
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = wide * torch.rsqrt(squares / (wide.shape[-1] * self.ranks) + self.eps)
        return (self.weight * normed.type_as(x)).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        state = self.state_dict(prefix="", keep_vars=True)
        made: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
        return made


class PostNormLayer(TransformerLayer):
    """A layer that norms the outputs of attention and feed-forward block too, before they join the residual (GLM-4, Gemma)."""

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, **kw: Any) -> None:
        super().__init__(config, submodules, *args, **kw)
        made = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(self._norm(config), **made)
        self.post_mlp_layernorm = build_module(self._norm(config), **made)
        self._windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        self.self_attn_bda: Any = _normed(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda: Any = _normed(self.mlp_bda, self.post_mlp_layernorm)

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kw: Any) -> Any:
        """`rotary_pos_emb`: one, or those of layers without and with a window, one behind the other."""
        if rotary_pos_emb is not None and rotary_pos_emb.ndim == 5:
            rotary_pos_emb = rotary_pos_emb[int(self._windowed)]
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kw)

    @staticmethod
    def _norm(config: TransformerConfig) -> Any:
        if config.transformer_impl != "transformer_engine":
            return RMSNorm
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm


def _normed(add: Callable[..., Any], norm: Any) -> Callable[..., Any]:
    """The function that adds a block's output to the residual, with a norm on that output."""

    def chosen(training: bool, fused: bool) -> Callable[..., Any]:
        inner = add(training, fused)
        return lambda out, residual, dropout: inner((norm(out[0]), out[1]), residual, dropout)

    return chosen


def layers_of(spec: Sequence[str], arch: Architecture, *, expert_kernel: str) -> Layers:
    """What makes the layers: that of the user's `--spec MODULE FUNCTION`, else ours of the family. `expert_kernel`: see
    `--moe-expert-kernel`."""
    if spec and not is_ours(spec):
        made = load_hook(".".join(spec))
        return lambda config, stage: made(SimpleNamespace(**vars(config)), config, stage)
    if spec:
        log.info("--spec %s: layers are made as config.json says, by our own record of the family", " ".join(spec))
    changes = changes_of(arch, expert_kernel)
    return lambda config, stage: reduce(lambda block, change: change(block), changes, layer_specs(config, stage))


def changes_of(arch: Architecture, expert_kernel: str) -> list[Callable[[Any], Any]]:
    """What is made of Megatron's layers for this family, in order."""
    changes: list[Callable[[Any], Any]] = [grouped] if arch.experts and expert_kernel == "torch" else []
    changes += [wide_normed] if arch.wide_norms else []
    changes += [partial(capped, cap=arch.score_cap)] if arch.score_cap else []
    return [*changes, *([post_normed] if arch.post_norms else [])]


def layer_specs(config: TransformerConfig, stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's layers for this stage: Transformer Engine's where it can run, else plain torch."""
    engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=stage)
    if not engine:
        block.layer_norm = RMSNorm
        for layer in block.layer_specs:
            _plain(layer.submodules)
    return block


def _plain(layer: Any) -> None:
    """Our norm and attention in a layer of Megatron's own modules."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    attention = layer.self_attention.submodules
    attention.core_attention = Attention
    for part in (layer, attention):
        for name in ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(part, name, None) is WrappedTorchNorm:
                setattr(part, name, RMSNorm)


def wide_normed(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The same layers with norms over all heads of queries, and of keys."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = ModuleSpec(WideNorm, params={"heads": "num_attention_heads"})
        attention.k_layernorm = ModuleSpec(WideNorm, params={"heads": "num_query_groups"})
    return block


def capped(block: TransformerBlockSubmodules, cap: float) -> TransformerBlockSubmodules:
    """The same layers with capped scores of attention."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(Attention, params={"cap": cap})
    return block


def post_normed(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The same layers with norms on their outputs."""
    specs = [ModuleSpec(module=PostNormLayer, params=s.params, submodules=s.submodules) for s in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=block.layer_norm)
