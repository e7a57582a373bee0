"""The model chunks of this rank, built out of an architecture: Transformer Engine's layers on CUDA, Megatron's own elsewhere.

Process groups must stand (`parallel.Groups`), weights are whatever memory held until `weights.load_hf` or a checkpoint fills them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers as layers_module
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import host
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.layers import layers_of
from actors.trainer.megatron_backend.layout import RankLayout, refusals

Provider = Callable[..., GPTModel]
"""(pre_process, post_process, vp_stage) -> model chunk; of config, layers (a spec) and vocab_size (padded) it gets what it names"""
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can be used here: installed, and a GPU to run it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(arch: Architecture, layout: RankLayout, *, dtype: torch.dtype, **given: Any) -> TransformerConfig:
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
    if given.get("moe_aux_loss_coeff"):
        free["moe_router_load_balancing_type"] = "aux_loss"  # what Megatron means by a coefficient alone
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


def build(arch: Architecture, layout: RankLayout, *, dtype: torch.dtype = torch.bfloat16, spec: Sequence[str] = (),
          provider: Provider | None = None, vocab_divisible_by: int = 1, expert_kernel: str = "torch",
          **given: Any) -> list[GPTModel]:  # fmt: skip
    """This rank's model chunks, one per virtual stage. Collective only in that every rank builds its own.

    `spec`: module and function that make the layers; `provider`: what makes whole chunks; both in place of ours. `given`: fields of
    TransformerConfig by name.
    Raises Refused before anything is allocated where the layout doesn't fit.
    """
    if said := refusals(layout, arch.shape):
        raise Refused("; ".join(said))
    device = host.prepare()
    config = transformer_config(arch, layout, dtype=dtype, **given)
    if config.gradient_accumulation_fusion and has_transformer_engine():
        # Transformer Engine's layers add up by themselves. megatron-core's own would need APEX, and one is left: the output layer,
        # whose product is made by the vocabulary head.
        layers_module._grad_accum_fusion_available = True
    layers = layers_of(spec, arch, expert_kernel=expert_kernel)
    vocab = padded_vocab(arch.vocab, layout.tp, vocab_divisible_by)
    chunks = []
    for stage in range(layout.vpp):
        virtual = stage if layout.vpp > 1 else None
        ends: dict[str, Any] = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
            "vp_stage": virtual,
        }
        if provider:
            made = _provided(provider, {**ends, "config": config, "layers": layers(config, virtual), "vocab_size": vocab})
        else:
            made = _chunk(arch, config, layers(config, virtual), vocab, ends)
        chunks.append(_finished(made.to(device), arch))
        if layout.expert_tp != layout.tp:
            _mark_experts(made)
    return chunks


def _provided(provider: Provider, offered: Mapping[str, Any]) -> GPTModel:
    named = inspect.signature(provider).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in named.values())
    return provider(**{name: value for name, value in offered.items() if every or name in named})


def _chunk(arch: Architecture, config: TransformerConfig, layers: Any, vocab: int, ends: Mapping[str, Any]) -> GPTModel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=vocab,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_percent=arch.rotary.get("partial_rotary_factor", 1.0),
        rotary_base=arch.rotary["rope_theta"],
        **ends,
    )
    if not config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = inverse_frequencies(arch.rotary, config.kv_channels)
    if arch.local_rotary:
        model.rotary_pos_emb = _TwoRotary(model.rotary_pos_emb, inverse_frequencies(arch.local_rotary, config.kv_channels))
    if arch.embedding_scale != 1.0 and ends["pre_process"]:
        scale = torch.tensor(arch.embedding_scale, dtype=config.params_dtype).item()  # as transformers rounds it
        model.embedding.register_forward_hook(lambda _, args, out: out * scale)
    return model


class _TwoRotary(nn.Module):
    """Rotary embeddings of layers without and with a window, [2, ...]; a layer takes its own."""

    def __init__(self, whole: RotaryEmbedding, frequencies: Tensor) -> None:
        super().__init__()
        self.whole, self.local = whole, copy.copy(whole)
        self.local.inv_freq = frequencies
        self.get_rotary_seq_len = whole.get_rotary_seq_len

    def forward(self, *args: Any, **kw: Any) -> Tensor:
        return torch.stack((self.whole(*args, **kw), self.local(*args, **kw)))


def _finished(model: GPTModel, arch: Architecture) -> GPTModel:
    _mark(model)
    for rotary in (m for m in model.modules() if isinstance(m, RotaryEmbedding)):
        rotary.inv_freq = rotary.inv_freq.to(next(model.parameters()).device)
    model.vocab = arch.vocab  # columns past it are padding
    return model


def _mark(model: nn.Module) -> None:
    """Say of each weight where it is cut. Megatron's own layers do when they draw first values, which are not wanted here; gradient
    norms and exports go by it."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.gradient_accumulation_fusion = False
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            for weight in (module.weight, getattr(module, "bias", None) if dim == 0 else None):
                if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _mark_experts(model: nn.Module) -> None:
    """Let gradients of experts be summed over the ranks that hold copies of them. megatron-core says so only with several
    expert-parallel ranks, and forgets that fewer tensor-parallel ones for experts make copies too."""
    for name, weight in model.named_parameters():
        if ".mlp.experts." in name:
            vars(weight)["allreduce"] = False


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
