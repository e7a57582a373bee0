"""(pure) Rules of the trainer: hooks that do something, and work for every rank."""

from miles_async.settings.errors import refusal
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


RULES = (hooks_have_an_effect, ranks_have_work)
