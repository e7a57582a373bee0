"""Fields of megatron-core 0.16.1's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, each a flag by its own
name, and Megatron's flags of other names for them. A test compares the table with the megatron-core that is installed.

Here, because the launcher loads no torch. What is left out is no value of a flag: functions, and types that --model-dtype says.
"""

from collections.abc import Mapping
from typing import Literal

Kind = Literal["bool", "int", "float", "str", "ints", "strs"]

_NAMES: dict[Kind, str] = {
    "bool": (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func_fp8_input_store "
        "add_bias_linear add_qkv_bias align_param_gather apply_query_key_layer_scaling apply_residual_connection_post_layernorm "
        "apply_rope_fusion apply_wd_to_qk_layernorm async_tensor_model_parallel_allreduce attention_output_gate "
        "attention_softmax_in_fp32 average_in_collective barrier_with_L1_time batch_invariant_mode batch_p2p_comm "
        "batch_p2p_sync bf16 bias_activation_fusion bias_dropout_fusion cache_mla_latents calculate_per_token_loss "
        "check_for_large_grads check_for_nan_in_grad clone_scatter_output_in_embedding cpu_offloading "
        "cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_weights cross_entropy_loss_fusion "
        "cuda_graph_retain_backward_graph cuda_graph_use_single_mempool deallocate_pipeline_outputs decoupled_weight_decay "
        "defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode disable_bf16_reduced_precision_matmul "
        "disable_parameter_transpose_cache disable_symmetric_registration distribute_saved_activations "
        "dsa_indexer_use_sparse_loss enable_autocast enable_cuda_graph ep_overlap_early_attn_memory_release external_cuda_graph "
        "fine_grained_activation_offloading first_last_layers_bf16 flash_decode fp16 fp32_residual_connection fp4_param "
        "fp8_dot_product_attention fp8_multi_head_attention fp8_param fp8_param_gather fp8_wgrad fsdp_double_buffer "
        "fsdp_manual_registration fused_single_qkv_rope gated_linear_unit grad_reduce_in_fp32 gradient_accumulation_fusion "
        "gradient_reduce_div_fusion hetereogenous_dist_checkpoint heterogeneous_block_specs hybrid_context_parallel "
        "inference_fuse_tp_communication inference_rng_tracker init_model_with_meta_device is_hybrid_model "
        "keep_fp8_transpose_cache layernorm_zero_centered_gamma log_max_attention_logit log_num_zeros_in_grad "
        "masked_softmax_fusion memory_efficient_layer_norm moe_apply_probs_on_input moe_enable_deepep moe_enable_routing_replay "
        "moe_extended_tp moe_grouped_gemm moe_layer_recompute moe_pad_expert_input_to_capacity moe_per_layer_logging "
        "moe_permute_fusion moe_router_enable_expert_bias moe_router_force_load_balancing moe_router_fusion "
        "moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax moe_shared_expert_gate "
        "moe_shared_expert_overlap moe_token_dropping moe_use_legacy_grouped_gemm multi_latent_attention muon_split_qkv "
        "muon_use_nesterov nccl_ub optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d overlap_grad_reduce "
        "overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush overlap_param_gather "
        "overlap_param_gather_with_optimizer_step pad_buckets_for_high_nccl_busbw perform_initialization persist_layer_norm "
        "pin_cpu_grads pin_cpu_params preserve_fp32_weights qk_clip qk_l2_norm qk_layernorm "
        "reduce_scatter_with_fp32_accumulation reuse_grad_buf_for_mxfp8_param_ag rotary_interleaved sequence_parallel "
        "store_param_remainders test_mode tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bulk_dgrad tp_comm_bulk_wgrad "
        "tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red use_cpu_initialization use_custom_fsdp "
        "use_distributed_optimizer use_fused_weighted_squared_relu use_inference_optimized_layers use_kitchen "
        "use_kitchen_attention use_mamba_mem_eff_path use_megatron_fsdp use_precision_aware_optimizer use_ring_exchange_p2p "
        "use_te_activation_func use_te_rng_tracker use_torch_optimizer_for_cpu_offload variable_seq_lengths"
    ),
    "int": (
        "bucket_size context_parallel_size cpu_offloading_num_layers cuda_graph_warmup_steps dsa_indexer_head_dim "
        "dsa_indexer_n_heads dsa_indexer_topk expert_model_parallel_size expert_tensor_parallel_size ffn_hidden_size "
        "fp8_amax_history_len fp8_interval fp8_margin hidden_size hysteresis inference_sampling_seed kv_channels kv_lora_rank "
        "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
        "mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim max_seqlen_per_dp_cp_rank "
        "microbatch_group_size_per_vp_stage min_offloaded_tensor_size mlp_chunks_for_prefill moe_deepep_num_sms "
        "moe_ffn_hidden_size moe_hybridep_num_sms moe_latent_size moe_router_group_topk moe_router_num_groups moe_router_topk "
        "moe_router_topk_limited_devices moe_shared_expert_intermediate_size mtp_num_layers muon_num_ns_steps "
        "num_attention_heads num_distributed_optimizer_instances num_layers num_layers_at_end_in_bf16 "
        "num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "num_microbatches_with_partial_activation_checkpoints num_moe_experts num_query_groups original_max_position_embeddings "
        "pipeline_model_parallel_size q_lora_rank qk_head_dim qk_pos_emb_head_dim recompute_num_layers "
        "suggested_communication_unit_size tensor_model_parallel_size v_head_dim virtual_pipeline_model_parallel_size "
        "wgrad_deferral_limit"
    ),
    "float": (
        "activation_func_clamp_value adam_beta1 adam_beta2 adam_eps attention_dropout beta_fast beta_slow clip_grad "
        "decoupled_lr decoupled_min_lr dsa_indexer_loss_coeff embedding_init_method_std glu_linear_offset hidden_dropout "
        "init_method_std initial_loss_scale layernorm_epsilon loss_scale loss_scale_window lr min_loss_scale min_lr "
        "moe_aux_loss_coeff moe_expert_capacity_factor moe_input_jitter_eps moe_router_bias_update_rate "
        "moe_router_topk_scaling_factor moe_z_loss_coeff mscale mscale_all_dim mtp_loss_scaling_factor muon_extra_scale_factor "
        "muon_momentum optimizer_offload_fraction qk_clip_alpha qk_clip_threshold rotary_base rotary_percent "
        "rotary_scaling_factor sgd_momentum softmax_scale weight_decay"
    ),
    "str": (
        "attention_backend config_logger_dir cross_entropy_fusion_impl cuda_graph_impl data_parallel_sharding_strategy "
        "exp_avg_dtype exp_avg_sq_dtype experimental_attention_variant fp4 fp4_quantizer_factory fp4_recipe fp8 "
        "fp8_amax_compute_algo fp8_quantizer_factory fp8_recipe kitchen_attention_backend main_grads_dtype main_params_dtype "
        "moe_flex_dispatcher_backend moe_router_dtype moe_router_score_function moe_token_dispatcher_type moe_token_drop_policy "
        "muon_fp32_matmul_prec muon_scale_mode muon_tp_mode normalization optimizer outer_dp_sharding_strategy "
        "pipeline_model_parallel_comm_backend pipeline_model_parallel_layout recompute_granularity recompute_method rope_type "
        "softmax_type symmetric_ar_type tp_comm_bootstrap_backend transformer_impl"
    ),
    "ints": (
        "hierarchical_context_parallel_sizes linear_attention_freq moe_layer_freq mrope_section no_rope_freq "
        "window_attn_skip_freq window_size"
    ),
    "strs": "cp_comm_type cuda_graph_scope moe_router_load_balancing_type offload_modules recompute_modules",
}
FIELDS: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""Field -> kind of its value; `ints` and `strs` are one or several."""
WORDS: dict[Kind, str] = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "one word",
                          "ints": "whole numbers", "strs": "words"}  # fmt: skip
CHOICES = {
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    **dict.fromkeys(
        ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), ("fp32", "fp16", "bf16", "fp8")
    ),
}
"""Words that megatron-core takes, so that a wrong one is heard of before the trainer has loaded."""
LISTS = ("offload_modules", "recompute_modules")
"""Fields that are lists also where they have one item."""
RENAMED = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_bucket_size": "bucket_size",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "use_gated_attention": "attention_output_gate",
    "no_bias_swiglu_fusion": "no_bias_activation_fusion",
    "no_bias_gelu_fusion": "no_bias_activation_fusion",
}
"""Megatron's flag -> the field's name, with `no_` where it turns it off."""

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
OF_MEGATRON = ("custom_model_provider_path", "custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path",
               "custom_megatron_before_train_step_hook_path")  # fmt: skip
"""Functions of the user's that the trainer's ranks call."""
SIGNS = ("sequence_parallel", "virtual_pipeline_model_parallel_size", "megatron", "swiglu", "spec", *OF_MEGATRON)
"""What only a script for Megatron sets."""


def named(flag: str) -> tuple[str, bool] | None:
    """(field, what the bare flag says) of a flag; None for one that names no field."""
    name = flag.removeprefix("--").replace("-", "_")
    name = RENAMED.get(name, name)
    if name in FIELDS:
        return name, True
    turned_off = name.removeprefix("no_")
    return (turned_off, False) if turned_off != name and FIELDS.get(turned_off) == "bool" else None


def typed(field: str, words: tuple[str, ...]) -> bool | int | float | str | tuple[str, ...]:
    """A field's value as words of a command line say it. ValueError for one of another kind."""
    kind = FIELDS[field]
    if field in LISTS or (kind in ("ints", "strs") and len(words) != 1):
        return words
    if kind == "bool" and not words:
        return True
    [word] = words
    if kind == "bool":
        return {"true": True, "false": False}[word.lower()]
    if kind == "int":
        return int(word)
    return float(word) if kind == "float" else word


def asked_for(values: Mapping[str, object]) -> str:
    """The first setting that only Megatron has, empty if there is none."""
    found = [name for name in SIZES if values[name] != 1] + [name for name in SIGNS if values[name]]
    return found[0] if found else ""
