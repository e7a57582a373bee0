"""Rules of engines on the trainer's GPUs (--colocate): who is there, and what they give back."""

from miles_async.settings.errors import refusal
from miles_async.settings.flat import Flat

MEMORY_FRACTION = 0.7  # of an engine beside a trainer, unless --sglang-mem-fraction-static says otherwise
LEVELS: dict[str, tuple[str, ...]] = {"kv_cache": ("kv_cache", "cuda_graph"), "weight": ("weights",)}
"""What an engine gives back -> SGLang's tags."""


def gives_back(s: Flat) -> tuple[str, ...]:
    """Tags that engines of this run give back in the trainer's turn; empty = there are no turns."""
    trains = not (s.debug_rollout_only or s.load_debug_rollout_data)
    if not (s.colocate and s.offload_rollout and trains):
        return ()
    return tuple(tag for level in s.offload_rollout_level for tag in LEVELS[level])


def engine_args(s: Flat) -> dict[str, bool | float]:
    """Flags of an SGLang server that shares its GPU."""
    if not s.colocate:
        return {}
    args: dict[str, bool | float] = {"mem-fraction-static": memory_fraction(s)}
    if tags := gives_back(s):
        args |= {"enable-memory-saver": True}
        args |= {"enable-weights-cpu-backup": True} if "weights" in tags else {}
    return args


def memory_fraction(s: Flat) -> float:
    """Part of a GPU's memory that an engine takes for weights and cache."""
    return float(s.server_args.get("mem-fraction-static", MEMORY_FRACTION))


def offloading_needs_sharing(s: Flat) -> None:
    for name in ("offload", "offload_train", "offload_rollout"):
        if getattr(s, name) and not s.colocate:
            raise refusal(
                name, True, "trainer and engines have GPUs of their own (colocate = false)", "Add --colocate, or leave it out."
            )
    if s.offload_rollout and not s.offload_rollout_level:
        raise refusal(
            "offload_rollout_level",
            (),
            "engines would give nothing back (offload_rollout = true)",
            "Name kv_cache, weight or both, or set --no-offload-rollout.",
        )


def engines_are_where_the_trainer_is(s: Flat) -> None:
    ours = s.actor_num_gpus_per_node
    if not s.colocate:
        return
    if s.engine == "external":
        raise refusal(
            "colocate",
            True,
            "engine is 'external', whose memory is not ours to give",
            "Set --engine sglang, or leave out --colocate.",
        )
    if s.update_weight_transport == "nccl":
        raise refusal(
            "update_weight_transport",
            "nccl",
            "NCCL joins no two processes on one GPU (colocate = true)",
            "Set --update-weight-transport ipc or disk.",
        )
    if s.engine != "sglang":
        return
    if s.rollout_num_gpus != ours:
        raise refusal(
            "rollout_num_gpus",
            s.rollout_num_gpus,
            f"with colocate engines have the trainer's actor_num_gpus_per_node = {ours} GPUs",
            "Leave it out, and set --rollout-num-gpus-per-engine to a divisor of them.",
        )
    if not set(s.rollout_gpu_ids) <= set(range(ours)):
        raise refusal(
            "rollout_gpu_ids", s.rollout_gpu_ids, f"the trainer has GPUs 0 to {ours - 1} (colocate = true)", "Leave it out."
        )


def fraction_is_a_part(s: Flat) -> None:
    given = s.server_args.get("mem-fraction-static")
    if not s.colocate or given is None:
        return
    try:
        held = 0.0 < memory_fraction(s) < 1.0
    except (TypeError, ValueError):
        held = False
    if not held:
        raise refusal(
            "sglang_mem_fraction_static", given, "not a part of the GPU's memory", f"Set one below 1, e.g. {MEMORY_FRACTION}."
        )


RULES = (offloading_needs_sharing, engines_are_where_the_trainer_is, fraction_is_a_part)
