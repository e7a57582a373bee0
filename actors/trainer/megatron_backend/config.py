"""Start-up settings of the Megatron backend alone; importable without torch and megatron-core."""

from __future__ import annotations

from typing import Any

import msgspec


class MegatronConfig(msgspec.Struct, frozen=True, kw_only=True, tag="megatron"):
    """`BackendConfig.own` of it: what has the name of a setting is that setting, filled in by the launcher. Sizes are numbers of
    ranks. `megatron`: fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig by their
    own names, as a flag gave them."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    sequence_parallel: bool
    microbatch_group_size_per_vp_stage: int | None
    moe_expert_kernel: str  # torch or te
    data_pad_size_multiplier: int  # tokens: a packed stream is padded to a multiple of it on each rank
    gradient_checkpointing: bool
    megatron: dict[str, Any]
    spec: tuple[str, ...]  # module and function of the user's layer spec; empty: the family's own
    custom_model_provider_path: str
    no_rope_fusion: bool
    make_vocab_size_divisible_by: int
    custom_megatron_init_path: str
    custom_megatron_before_log_prob_hook_path: str
    custom_megatron_before_train_step_hook_path: str
