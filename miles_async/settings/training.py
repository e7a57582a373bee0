"""(pure) Rules of the trainer: hooks that do something, one way to reduce the loss, and work for every rank."""

from collections.abc import Iterator

from miles_async.settings.derive import CONSTANT_SUM, TOKEN_MEAN
from miles_async.settings.errors import refusal, show
from miles_async.settings.run import RunSettings


def hooks_have_an_effect(s: RunSettings) -> None:
    g = s.grpo
    own = g.custom_loss_function_path
    if (g.loss_type == "custom_loss") != (own is not None):
        raise refusal(
            "loss_type",
            g.loss_type,
            f"custom_loss_function_path is {'unset' if own is None else repr(own)}",
            "Leave out loss_type, and it follows.",
        )
    if g.custom_tis_function_path is not None and not g.use_tis:
        raise refusal(
            "custom_tis_function_path", g.custom_tis_function_path, "has no effect while use_tis is off", "Add --use-tis."
        )
    if own is not None and (g.off_policy_correction != "none" or g.use_opsm):
        raise refusal(
            "custom_loss_function_path",
            own,
            "a loss of your own is not corrected for stale data by the trainer",
            "Correct inside it and set --no-correction instead of a correction.",
        )


def ranks_have_work(s: RunSettings) -> None:
    p = s.perf
    if p.actor_num_nodes != 1:
        raise refusal(
            "actor_num_nodes",
            p.actor_num_nodes,
            "this launcher starts the trainer on its own host",
            "Set it to 1 and --actor-num-gpus-per-node to the GPUs of this host.",
        )
    if p.actor_num_gpus_per_node > s.grpo.global_batch_size:
        raise refusal(
            "actor_num_gpus_per_node",
            p.actor_num_gpus_per_node,
            f"more than global_batch_size = {s.grpo.global_batch_size}: a rank would have no sample",
            f"Set it to {s.grpo.global_batch_size} or less.",
        )


def loss_is_reduced_one_way(s: RunSettings) -> None:
    g = s.grpo
    if g.calculate_per_token_loss != (g.loss_agg_mode == TOKEN_MEAN):
        raise refusal(
            "loss_agg_mode",
            g.loss_agg_mode,
            f"calculate_per_token_loss = {show(g.calculate_per_token_loss)} says otherwise",
            "Keep one of the two, and the other follows.",
        )
    if g.loss_scale_factor is not None and g.loss_agg_mode != CONSTANT_SUM:
        raise refusal(
            "loss_scale_factor",
            g.loss_scale_factor,
            f"loss_agg_mode = {g.loss_agg_mode!r} divides by no constant",
            f"Set --loss-agg-mode {CONSTANT_SUM} or leave it out.",
        )


def ranks_have_equal_micro_batches(s: RunSettings) -> None:
    """Where micro-batches are of a fixed number of samples; with a token cap they are always made equal."""
    p, g = s.perf, s.grpo
    ranks, size = p.actor_num_gpus_per_node, p.micro_batch_size
    if p.use_dynamic_batch_size or ranks == 1:
        return
    if g.use_dynamic_global_batch_size and size > 1:
        raise refusal(
            "micro_batch_size",
            size,
            f"batches of any size (use_dynamic_global_batch_size) do not make as many micro-batches on each of "
            f"actor_num_gpus_per_node = {ranks}",
            "Set it to 1, or use --use-dynamic-batch-size.",
        )
    count = -(-g.global_batch_size // size)
    if not g.use_dynamic_global_batch_size and count % ranks:
        raise refusal(
            "micro_batch_size",
            size,
            f"global_batch_size = {g.global_batch_size} makes {count} micro-batches, not a multiple of "
            f"actor_num_gpus_per_node = {ranks}",
            "Change one of them, or use --use-dynamic-batch-size.",
        )


def balance_has_something_to_measure(s: RunSettings) -> None:
    if s.perf.balance_by_flops and not s.perf.balance_data:
        raise refusal(
            "balance_by_flops", True, "has no effect while balance_data = false", "Leave out --no-balance-data."
        )


def equal_logprobs_have_what_they_need(s: RunSettings) -> None:
    """true_on_policy_mode repeats one engine's kernels on one GPU."""
    if not s.model.true_on_policy_mode:
        return
    backend = s.sglang.server_args.get("attention-backend", "fa3")
    for field, value, wanted in (
        ("engine", s.sglang.engine, "sglang"),
        ("model_dtype", s.model.model_dtype, "bfloat16"),
        ("actor_num_gpus_per_node", s.perf.actor_num_gpus_per_node, 1),
        ("rollout_num_gpus_per_engine", s.sglang.rollout_num_gpus_per_engine, 1),
        ("--sglang-attention-backend", backend, "fa3"),
    ):
        if value != wanted:
            raise refusal(
                field, value, f"true_on_policy_mode needs {show(wanted)}", f"Set it to {wanted}, or leave the mode out."
            )


RULES = (
    equal_logprobs_have_what_they_need,
    hooks_have_an_effect,
    loss_is_reduced_one_way,
    ranks_have_work,
    ranks_have_equal_micro_batches,
    balance_has_something_to_measure,
)


def notes(s: RunSettings) -> Iterator[str]:
    """What is allowed but worth knowing before the run starts."""
    ranks, total = s.perf.actor_num_gpus_per_node, s.samples_per_rollout
    if s.grpo.use_dynamic_global_batch_size and total % ranks:
        yield (
            f"use_dynamic_global_batch_size leaves out {total % ranks} of {total} samples of every full rollout batch, "
            f"since actor_num_gpus_per_node = {ranks}"
        )
