"""(pure) Rules of the trainer: hooks that do something, one way to reduce the loss, and work for every rank."""

import json
import re
from collections.abc import Iterator

from actors.generation.engines.records import ENGINES, OF_MILES
from actors.trainer.objective_estimators import ESTIMATORS
from miles_async.settings.derive import CONSTANT_SUM, TOKEN_MEAN
from miles_async.settings.errors import parsed, refusal, show
from miles_async.settings.flat import Flat


def hooks_have_an_effect(s: Flat) -> None:
    own = s.custom_loss_function_path
    if (s.loss_type == "custom_loss") != (own is not None):
        why = f"custom_loss_function_path is {'unset' if own is None else repr(own)}"
        raise s.refusal("loss_type", why, "Leave out loss_type, and it follows.")
    if s.custom_tis_function_path is not None and not s.use_tis:
        raise s.refusal("custom_tis_function_path", "has no effect while use_tis is off", "Add --use-tis.")
    if own is not None and (s.off_policy_correction != "none" or s.use_opsm):
        why = "a loss of your own is not corrected for stale data by the trainer"
        remedy = "Correct inside it and set --no-correction instead of a correction."
        raise s.refusal("custom_loss_function_path", why, remedy)


def supervised_training_has_nothing_to_compare(s: Flat) -> None:
    if s.supervised != (s.policy_loss == "nll"):
        raise s.refusal("policy_loss", f"loss_type is {s.loss_type!r}", "Leave it out, and it follows.")
    if not s.supervised:
        return
    if s.n_samples_per_prompt != 1:
        raise s.refusal("n_samples_per_prompt", "the data has one response to a prompt", "Set it to 1.")
    for name in ("use_opd", "use_opsm", "keep_old_actor", "group_rm"):
        if s.values[name]:
            raise s.refusal(name, f"has no meaning with loss_type {s.loss_type}", "Leave it out.")
    if s.off_policy_correction != "none":
        raise refusal("off_policy_correction", True, f"has no meaning with loss_type {s.loss_type}", "Leave it out.")
    if s.advantage_estimator != "grpo":
        raise s.refusal("advantage_estimator", f"loss_type {s.loss_type} takes no rewards", "Leave it out.")


REPEATS = next(kind.name for kind in ENGINES.values() if kind.repeats)


def without_engines_nothing_is_generated(s: Flat) -> None:
    if s.engine_kind.generates:
        return
    if not s.supervised:
        remedy = f"Set --engine {OF_MILES.name}, or --loss-type sft."
        raise s.refusal("engine", "only supervised training generates nothing", remedy)
    for name in ("eval_prompt_data", "eval_config"):
        if s.values[name]:
            why = f"held-out prompts are answered by engines, and engine is {s.engine!r}"
            raise s.refusal(name, why, "Leave one of the two out.")


def a_loss_belongs_to_its_estimator(s: Flat) -> None:
    if s.supervised:
        return
    own, owned = s.estimator.policy_loss, {record.policy_loss for record in ESTIMATORS.values()} - {"ppo"}
    if s.policy_loss != own and (own in owned or s.policy_loss in owned):
        why = f"advantage_estimator is {s.advantage_estimator!r}, and gspo and cispo are each estimator and loss in one"
        raise s.refusal("policy_loss", why, "Leave it out.")
    if s.get_mismatch_metrics and s.off_policy_correction in ("none", "rollout_logprobs"):
        why = "no correction is chosen whose effect could be told"
        raise s.refusal("get_mismatch_metrics", why, "Add --use-tis or another.")


def masked_sequences_have_moved(s: Flat) -> None:
    elsewhere = s.keep_old_actor or s.use_rollout_logprobs or s.interpolate_proximal
    if s.use_opsm and s.num_steps_per_rollout == 1 and not elsewhere:
        why = "leaves nothing out with num_steps_per_rollout = 1: the policy before the only step is the policy in it"
        raise s.refusal("use_opsm", why, "Use several steps, --keep-old-actor or --use-rollout-logprobs, or drop it.")


def ranks_have_work(s: Flat) -> None:
    if s.actor_num_nodes != 1 and s.train_master is None and not s.launcher_kind.spreads:
        raise s.refusal(
            "actor_num_nodes",
            "this launcher starts the trainer on its own host",
            "Set it to 1 and --actor-num-gpus-per-node to the GPUs of this host, or --launcher ray, or --train-master HOST:PORT "
            "and start the others.",
        )
    if s.train_master is not None and not re.fullmatch(r"[^\s:]+:[0-9]{1,5}", s.train_master):
        raise s.refusal("train_master", "not an address", "Write HOST:PORT, reachable from all hosts of the trainer.")
    if s.data_ranks > s.global_batch_size:
        field, others = ("actor_num_gpus_per_node", 1) if s.actor_num_nodes == 1 else ("actor_num_nodes", s.actor_num_gpus_per_node)
        why = f"{s.data_ranks} ranks are more than global_batch_size = {s.global_batch_size}: a rank would have no sample"
        most = max(1, s.global_batch_size * s.model_parallel_ranks // others)
        raise s.refusal(field, why, f"Set it to {most} or less.")


def loss_is_reduced_one_way(s: Flat) -> None:
    if s.calculate_per_token_loss != (s.loss_agg_mode == TOKEN_MEAN):
        why = f"calculate_per_token_loss = {show(s.calculate_per_token_loss)} says otherwise"
        raise s.refusal("loss_agg_mode", why, "Keep one of the two, and the other follows.")
    if s.loss_scale_factor is not None and s.loss_agg_mode != CONSTANT_SUM:
        why = f"loss_agg_mode = {s.loss_agg_mode!r} divides by no constant"
        raise s.refusal("loss_scale_factor", why, f"Set --loss-agg-mode {CONSTANT_SUM} or leave it out.")


def ranks_have_equal_micro_batches(s: Flat) -> None:
    """Where micro-batches are of a fixed number of samples; with a token cap they are always made equal."""
    ranks, size = s.data_ranks, s.micro_batch_size
    if s.use_dynamic_batch_size or ranks == 1:
        return
    if s.use_dynamic_global_batch_size and size > 1:
        why = (
            f"batches of any size (use_dynamic_global_batch_size) do not make as many micro-batches on each of "
            f"actor_num_gpus_per_node = {ranks}"
        )
        raise s.refusal("micro_batch_size", why, "Set it to 1, or use --use-dynamic-batch-size.")
    count = -(-s.global_batch_size // size)
    if not s.use_dynamic_global_batch_size and count % ranks:
        why = (
            f"global_batch_size = {s.global_batch_size} makes {count} micro-batches, not a multiple of "
            f"actor_num_gpus_per_node = {ranks}"
        )
        raise s.refusal("micro_batch_size", why, "Change one of them, or use --use-dynamic-batch-size.")


def balance_has_something_to_measure(s: Flat) -> None:
    if s.balance_by_flops and not s.balance_data:
        raise s.refusal("balance_by_flops", "has no effect while balance_data = false", "Leave out --no-balance-data.")


def equal_logprobs_have_what_they_need(s: Flat) -> None:
    """true_on_policy_mode repeats one engine's kernels on one GPU."""
    if not s.true_on_policy_mode:
        return
    backend = s.server_args.get("attention-backend", "fa3")
    for field, value, wanted in (
        ("engine", s.engine, s.engine if s.engine_kind.repeats else REPEATS),
        ("train_backend", "torch" if s.train_backend == "fsdp" else s.train_backend, "torch"),
        ("model_dtype", s.model_dtype, "bfloat16"),
        ("actor_num_gpus_per_node", s.actor_num_gpus_per_node, 1),
        ("rollout_num_gpus_per_engine", s.rollout_num_gpus_per_engine, 1),
        ("--sglang-attention-backend", backend, "fa3"),
    ):
        if value != wanted:
            why = f"true_on_policy_mode needs {show(wanted)}"
            raise refusal(field, value, why, f"Set it to {wanted}, or leave the mode out.")


def routing_has_one_source(s: Flat) -> None:
    if s.use_routing_replay and s.use_rollout_routing_replay:
        why = "cannot go together with use_rollout_routing_replay: experts have one source"
        raise s.refusal("use_routing_replay", why, "Keep one of them.")
    if s.use_rollout_routing_replay and s.supervised:
        why = "no engine makes the responses of supervised training"
        raise s.refusal("use_rollout_routing_replay", why, "Leave it out.")
    passes = s.num_steps_per_rollout > 1 and not (s.use_rollout_logprobs or s.interpolate_proximal or s.supervised)
    if s.use_routing_replay and not passes:
        raise s.refusal(
            "use_routing_replay",
            "there is no log-prob pass whose experts the steps could take: the policy before the only step is the policy in it, or "
            "old log-probs come from elsewhere",
            "Leave it out, or use several steps per rollout without --use-rollout-logprobs and --interpolate-proximal.",
        )


def variables_are_text(s: Flat) -> None:
    if s.train_env_vars is None:
        return
    try:
        found = parsed(json.loads, s.train_env_vars)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        remedy = """Write '{"NCCL_DEBUG": "WARN"}'."""
        raise s.refusal("train_env_vars", "not a JSON object of texts", remedy)


RULES = (
    variables_are_text,
    routing_has_one_source,
    equal_logprobs_have_what_they_need,
    hooks_have_an_effect,
    supervised_training_has_nothing_to_compare,
    without_engines_nothing_is_generated,
    a_loss_belongs_to_its_estimator,
    masked_sequences_have_moved,
    loss_is_reduced_one_way,
    ranks_have_work,
    ranks_have_equal_micro_batches,
    balance_has_something_to_measure,
)


def notes(s: Flat) -> Iterator[str]:
    """What is allowed but worth knowing before the run starts."""
    ranks, total = s.data_ranks, s.samples_per_rollout
    if s.use_dynamic_global_batch_size and total % ranks:
        yield (
            f"use_dynamic_global_batch_size leaves out {total % ranks} of {total} samples of every full rollout batch, "
            f"since actor_num_gpus_per_node = {ranks}"
        )
