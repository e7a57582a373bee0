"""(pure) Rules of the Megatron backend's settings that need neither the model nor megatron-core."""

from miles_async.settings.errors import nearest, refusal
from miles_async.settings.flat import Flat
from miles_async.settings.megatron_fields import FIELDS, asked_for

HERE = {
    "lr": "--lr", "min_lr": "--min-lr", "weight_decay": "--weight-decay", "clip_grad": "--clip-grad", "bf16": "--model-dtype",
    "fp16": "--model-dtype bfloat16", "optimizer": "--optimizer", "adam_beta1": "--adam-beta1", "adam_beta2": "--adam-beta2",
    "adam_eps": "--adam-eps", "calculate_per_token_loss": "--calculate-per-token-loss",
}  # fmt: skip
NOT_YET = {
    "moe_aux_loss_coeff": "balancing losses of experts are not trained yet",
    "moe_z_loss_coeff": "losses of the router are not trained yet",
    "mtp_num_layers": "layers that predict several tokens are not trained",
    "fp8": "matrices are multiplied in bfloat16; FP8 is for engines", "fp4": "matrices are multiplied in bfloat16",
    "use_megatron_fsdp": "use --train-backend fsdp", "hybrid_context_parallel": "not supported",
    "attention_dropout": "the policy that is trained must be the one that sampled",
    "hidden_dropout": "the policy that is trained must be the one that sampled",
}  # fmt: skip
"""Field -> why it must be off or 0."""


def megatron_trains(s: Flat) -> None:
    if s.train_backend in ("torch", "fsdp") and (name := asked_for(s.values)):
        raise refusal("train_backend", s.train_backend, f"{name} is of Megatron", "Set --train-backend megatron or leave it out.")


def megatron_fields_are_known(s: Flat) -> None:
    for given, value in s.megatron.items():
        name = given.replace("-", "_")
        if name not in FIELDS:
            raise refusal(f"megatron.{name}", value, "megatron-core has no such field", nearest(name, FIELDS))
        if name in HERE:
            raise refusal(f"megatron.{name}", value, f"it is {HERE[name]}", f"Write {HERE[name]} instead.")
        if name in s.values:
            raise refusal(f"megatron.{name}", value, "it is a setting of its own", f"Write --{name.replace('_', '-')} instead.")
        if name in NOT_YET and value not in (False, 0, 0.0, "0", "0.0"):
            raise refusal(f"megatron.{name}", value, NOT_YET[name], "Leave it out.")


def ranks_make_whole_blocks(s: Flat) -> None:
    block, ranks = s.model_parallel_ranks, s.train_ranks
    if block > 1 and ranks % block:
        fits = [n for n in (ranks // block * block, -(-ranks // block) * block) if n]
        raise refusal(
            "actor_num_gpus_per_node", s.actor_num_gpus_per_node,
            f"tensor x pipeline x context parallel = {s.tensor_model_parallel_size} x {s.pipeline_model_parallel_size} x "
            f"{s.context_parallel_size} = {block} does not divide {ranks} ranks", f"Nearest: {' or '.join(map(str, fits))}.",
        )  # fmt: skip


RULES = (megatron_trains, megatron_fields_are_known, ranks_make_whole_blocks)
