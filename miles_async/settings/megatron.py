"""(pure) Rules of the Megatron backend's settings that need neither the model nor megatron-core."""

import math

from miles_async.settings.errors import listing, nearest, refusal
from miles_async.settings.flat import Flat
from miles_async.settings.megatron_fields import CHOICES, FIELDS, asked_for

HERE = {
    "lr": "--lr", "min_lr": "--min-lr", "weight_decay": "--weight-decay", "clip_grad": "--clip-grad", "bf16": "--model-dtype",
    "fp16": "--model-dtype bfloat16", "optimizer": "--optimizer", "adam_beta1": "--adam-beta1", "adam_beta2": "--adam-beta2",
    "adam_eps": "--adam-eps", "calculate_per_token_loss": "--calculate-per-token-loss",
}  # fmt: skip
_SAMPLED = "the policy that is trained must be the one that sampled"
_DROPS = "engines drop no tokens, so the policy that is trained would not be the one that sampled"
_GRAPHS = "lengths of packed samples change with every micro-batch, and a CUDA graph holds one"
NOT_YET = {
    "mtp_num_layers": "layers that predict several tokens are not trained",
    "fp8": "matrices are multiplied in bfloat16; FP8 is for engines", "fp4": "matrices are multiplied in bfloat16",
    "use_megatron_fsdp": "use --train-backend fsdp", "use_custom_fsdp": "use --train-backend fsdp",
    "hybrid_context_parallel": "not supported",
    "hierarchical_context_parallel_sizes": "context-parallel ranks are one ring or one exchange (cp_comm_type p2p or a2a)",
    "attention_dropout": _SAMPLED, "hidden_dropout": _SAMPLED, "moe_input_jitter_eps": _SAMPLED,
    "moe_router_force_load_balancing": _SAMPLED, "test_mode": _SAMPLED,
    "moe_expert_capacity_factor": _DROPS, "moe_token_dropping": _DROPS, "moe_pad_expert_input_to_capacity": _DROPS,
    "enable_cuda_graph": _GRAPHS, "external_cuda_graph": _GRAPHS, "cuda_graph_impl": _GRAPHS,
    "average_in_collective": "gradients are sums over all ranks, and the loss brings its own divisor",
    "num_distributed_optimizer_instances": "its state is cut over all data-parallel ranks",
    "overlap_param_gather_with_optimizer_step": "weights are whole before anything reads them; overlap_param_gather is there",
    "overlap_moe_expert_parallel_comm": "passes are made one after the other",
    "tp_comm_overlap": "its buffers are of one length, and packed streams are of any",
    "apply_query_key_layer_scaling": "it is for float16; scores are made as the model says",
    "check_for_nan_in_grad": "every step looks for gradients that are not finite, and changes nothing then",
    "check_for_large_grads": "clip_grad bounds them",
    "qk_clip": "it belongs to Muon; the optimizer is adam",
    "decoupled_lr": "there is one rate for all weights", "decoupled_min_lr": "there is one rate for all weights",
}  # fmt: skip
"""Field -> why it must be off, 0 or 'none'."""
ONE = ("num_distributed_optimizer_instances",)
"""Numbers of which 1 is off."""
OF_TORCH = (
    ("compile", "auto", "Leave it out: layers of Megatron run as Transformer Engine has them."),
    ("fsdp_shard", "auto", "Write --use-distributed-optimizer for that, or leave it out."),
    ("attn_implementation", "auto", "Write --attention-backend flash, fused or unfused instead."),
)
"""Setting that the torch backend alone reads, what it is when nobody gives it, and what to do."""


def megatron_trains(s: Flat) -> None:
    if s.train_backend in ("torch", "fsdp") and (name := asked_for(s.values)):
        raise s.refusal("train_backend", f"only Megatron has {name}", "Set --train-backend megatron or leave it out.")


def megatron_fields_are_known(s: Flat) -> None:
    for given, value in s.megatron.items():
        name = given.replace("-", "_")
        if name not in FIELDS:
            raise refusal(f"megatron.{name}", value, "megatron-core has no such field", nearest(name, FIELDS))
        if name in HERE:
            raise refusal(f"megatron.{name}", value, f"it is {HERE[name]}", f"Write {HERE[name]} instead.")
        if name in s.values:
            raise refusal(f"megatron.{name}", value, "it is a setting of its own", f"Write --{name.replace('_', '-')} instead.")
        if name in NOT_YET and not _off(name, value):
            raise refusal(f"megatron.{name}", value, NOT_YET[name], "Leave it out.")
        if value not in CHOICES.get(name, (value,)):
            remedy = nearest(str(value), CHOICES[name]) or f"It is {listing(CHOICES[name])}."
            raise refusal(f"megatron.{name}", value, "megatron-core does not know it", remedy)
        if name == "moe_router_load_balancing_type" and "sinkhorn" in value:
            raise refusal(f"megatron.{name}", value, "engines choose the experts with the best scores", "Leave it out.")
        if name == "moe_router_load_balancing_type" and isinstance(value, list | tuple) and len(value) > 1:
            raise refusal(f"megatron.{name}", value, "there is one coefficient, so one loss", "Name one.")
        if name in ("moe_aux_loss_coeff", "moe_z_loss_coeff") and isinstance(value, int | float) and not 0 <= value < math.inf:
            raise refusal(f"megatron.{name}", value, "must be a number >= 0", "Give for example 0.001, or leave it out.")
    fields = {given.replace("-", "_"): value for given, value in s.megatron.items()}
    if (coefficient := fields.get("moe_aux_loss_coeff")) and fields.get("moe_router_load_balancing_type") == "none":
        why = "moe_router_load_balancing_type = none has no loss that it could weigh"
        remedy = "Name one (aux_loss), or leave the coefficient out."
        raise refusal("megatron.moe_aux_loss_coeff", coefficient, why, remedy)


def _off(name: str, value: object) -> bool:
    return value in (False, 0, 0.0, "0", "0.0", "none") or (name in ONE and value == 1)


def megatron_reads_it(s: Flat) -> None:
    if not s.on_megatron:
        return
    for name, unset, remedy in OF_TORCH:
        if s.values[name] != unset:
            raise s.refusal(name, "only the torch backend has it, and this run trains on Megatron", remedy)
    if s.gradient_checkpointing and (n := s.gradient_checkpointing_layers):
        raise s.refusal(
            "gradient_checkpointing_layers",
            "only the torch backend has it, and this run trains on Megatron",
            f"Write --recompute-granularity full --recompute-method block --recompute-num-layers {n} (on each stage) instead.",
        )


def ranks_make_whole_blocks(s: Flat) -> None:
    block, ranks = s.model_parallel_ranks, s.train_ranks
    if block > 1 and ranks % block:
        fits = [n for n in (ranks // block * block, -(-ranks // block) * block) if n]
        raise s.refusal(
            "actor_num_gpus_per_node",
            f"tensor x pipeline x context parallel = {s.tensor_model_parallel_size} x {s.pipeline_model_parallel_size} x "
            f"{s.context_parallel_size} = {block} does not divide {ranks} ranks",
            f"Nearest: {' or '.join(map(str, fits))}.",
        )


RULES = (megatron_trains, megatron_fields_are_known, megatron_reads_it, ranks_make_whole_blocks)
