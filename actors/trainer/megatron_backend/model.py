"""The model chunks of this rank, built out of an architecture: Transformer Engine's layers on CUDA, Megatron's own elsewhere.

Process groups must stand (`join`), weights are whatever memory held until `weights.load_hf` or a checkpoint fills them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import host
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.attention import Attention
from actors.trainer.megatron_backend.layout import Layout, refusals

ACTIVATIONS = {"silu": torch.nn.functional.silu}


class Norm(nn.Module):
    """RMSNorm in float32, as transformers computes it. Megatron's wrapper of torch's refuses sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class PostNormLayer(TransformerLayer):
    """A layer that norms the outputs of attention and feed-forward block too, before they join the residual (GLM-4)."""

    norm: Any = None

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, **kw: Any) -> None:
        super().__init__(config, submodules, *args, **kw)
        made = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(self._norm(), **made)
        self.post_mlp_layernorm = build_module(self._norm(), **made)
        self.self_attn_bda = _normed(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = _normed(self.mlp_bda, self.post_mlp_layernorm)

    @staticmethod
    def _norm() -> Any:
        if not torch.cuda.is_available():
            return Norm
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm


def _normed(add: Callable[..., Any], norm: Any) -> Callable[..., Any]:
    """The function that adds a block's output to the residual, with a norm on that output."""

    def chosen(training: bool, fused: bool) -> Callable[..., Any]:
        inner = add(training, fused)
        return lambda out, residual, dropout: inner((norm(out[0]), out[1]), residual, dropout)

    return chosen


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be used here: installed, and a GPU to run it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def join(layout: Layout, *, timeout_minutes: int = 30) -> None:
    """Cut torch.distributed's ranks, all of them, into Megatron's groups. Collective; once per process."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=timeout_minutes,
    )


def transformer_config(arch: Architecture, layout: Layout, *, dtype: torch.dtype, **given: Any) -> TransformerConfig:
    """megatron.core's configuration of the model under a layout. `given`: fields by name that say how to compute, never what.
    Raises Refused for a field that Megatron doesn't know, or that the architecture decides otherwise."""
    latent = bool(arch.transformer.get("multi_latent_attention"))
    kind = MLATransformerConfig if latent else TransformerConfig
    known = {f.name for f in dataclasses.fields(kind)}
    cuda = torch.cuda.is_available()
    decided = {
        **arch.transformer,
        "activation_func": ACTIVATIONS[arch.transformer["activation_func"]],
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.first,
        "num_layers_in_last_pipeline_stage": layout.last,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    free = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "variable_seq_lengths": True,
        # Routers as engines compute them; losses that balance experts are off unless their flag says otherwise.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "use_cpu_initialization": not cuda,
        "perform_initialization": False,
        "moe_grouped_gemm": bool(arch.experts) and has_transformer_engine(),
        "gradient_accumulation_fusion": False,
        "transformer_impl": "transformer_engine" if has_transformer_engine() else "local",
    }
    for name, value in given.items():
        if name not in known:
            raise Refused(f"{name}={value!r}: megatron-core's {kind.__name__} has no such field")
        if name in decided and decided[name] != value:
            raise Refused(f"{name}={value!r}: config.json and the layout say {decided[name]!r}; leave it out")
    return kind(**{**{k: v for k, v in free.items() if k in known}, **decided, **given})


def padded_vocab(vocab: int, tp: int, divisible_by: int = 1) -> int:
    """Rows of embedding and head: the vocabulary, filled up so that tensor-parallel ranks get equal parts. Rows past the vocabulary
    hold zeros and are no tokens: a loss leaves them out."""
    block = tp * divisible_by
    return -(-vocab // block) * block


def build(arch: Architecture, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, spec: Any = None,
          vocab_divisible_by: int = 1, **given: Any) -> list[GPTModel]:  # fmt: skip
    """This rank's model chunks, one per virtual stage. Collective only in that every rank builds its own.

    `spec`: (config, vp_stage) -> layer spec, in place of Megatron's; `given`: fields of TransformerConfig by name.
    Raises Refused before anything is allocated where the layout doesn't fit.
    """
    if said := refusals(layout, arch.shape):
        raise Refused("; ".join(said))
    device = host.prepare()
    config = transformer_config(arch, layout, dtype=dtype, **given)
    return [_chunk(arch, layout, config, stage if layout.vpp > 1 else None, device, spec, vocab_divisible_by)
            for stage in range(layout.vpp)]  # fmt: skip


def _chunk(arch: Architecture, layout: Layout, config: TransformerConfig, stage: int | None, device: torch.device, spec: Any,
           divisible_by: int) -> GPTModel:  # fmt: skip
    ends = {"ignore_virtual": False, "vp_stage": stage}
    made = (spec or layer_specs)(config, stage) if spec is None or callable(spec) else spec
    if arch.post_norms and spec is None:
        made = post_normed(made)
    model = GPTModel(
        config=config,
        transformer_layer_spec=made,
        vocab_size=padded_vocab(arch.vocab, layout.tp, divisible_by),
        max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_percent=arch.rotary.get("partial_rotary_factor", 1.0),
        rotary_base=arch.rotary["rope_theta"],
        vp_stage=stage,
    ).to(device)
    _mark(model)
    if not config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rotary, config.kv_channels).to(device)
    model.vocab = arch.vocab  # columns past it are padding
    return model


def _mark(model: nn.Module) -> None:
    """Say of each weight where it is cut. Megatron's own layers do when they draw first values, which are not wanted here; gradient
    norms and exports go by it."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            for weight in (module.weight, getattr(module, "bias", None) if dim == 0 else None):
                if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(weight, True, dim, 1)


def layer_specs(config: TransformerConfig, stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's layers for this stage: Transformer Engine's where it can run, else plain torch."""
    engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=stage
    )
    if not engine:
        block.layer_norm = Norm
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
                setattr(part, name, Norm)


def post_normed(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The same layers with norms on their outputs."""
    specs = [ModuleSpec(module=PostNormLayer, params=s.params, submodules=s.submodules) for s in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=block.layer_norm)


def inverse_frequencies(rotary: Mapping[str, Any], head: int) -> Tensor:
    """Of rotary embeddings, float32 [rotated channels / 2], scaled as Llama 3 does or linearly."""
    channels = int(head * rotary.get("partial_rotary_factor", 1.0))
    plain = 1.0 / (rotary["rope_theta"] ** (torch.arange(0, channels, 2, dtype=torch.int64).float() / channels))
    if rotary["rope_type"] == "linear":
        return plain / rotary["factor"]
    if rotary["rope_type"] != "llama3":
        return plain
    # Long waves are stretched by the factor, short ones stay, those between are mixed.
    factor, low, high = rotary["factor"], rotary["low_freq_factor"], rotary["high_freq_factor"]
    waves = rotary["original_max_position_embeddings"] * plain / (2 * torch.pi)
    mix = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - mix) * plain / factor + mix * plain
