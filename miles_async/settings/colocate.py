"""Rules of engines on the trainer's GPUs (--colocate, --lend-trainer-gpus): who is there, and what they give back."""

from actors.generation.engines.records import OF_MILES
from miles_async.settings.errors import refusal
from miles_async.settings.flat import Flat

MEMORY_FRACTION = 0.7  # of an engine beside a trainer, unless --sglang-mem-fraction-static says otherwise
LEVELS: dict[str, tuple[str, ...]] = {"kv_cache": ("kv_cache", "cuda_graph"), "weight": ("weights",)}
"""What an engine gives back -> SGLang's tags."""


def gives_back(s: Flat) -> tuple[str, ...]:
    """Tags that engines on the trainer's GPUs give back in its turn; empty = there are no turns."""
    if s.lend_trainer_gpus:
        return tuple(tag for tags in LEVELS.values() for tag in tags)
    trains = not (s.debug_rollout_only or s.load_debug_rollout_data)
    if not (s.colocate and s.offload_rollout and trains):
        return ()
    return tuple(tag for level in s.offload_rollout_level for tag in LEVELS[level])


def engine_args(s: Flat) -> dict[str, bool | float]:
    """Flags of an SGLang server on the trainer's GPU."""
    args: dict[str, bool | float] = {"mem-fraction-static": memory_fraction(s)}
    if tags := gives_back(s):
        args |= {"enable-memory-saver": True}
        args |= {"enable-weights-cpu-backup": True} if "weights" in tags else {}
    return args


def memory_fraction(s: Flat) -> float:
    """Part of the trainer's GPU that an engine takes for weights and cache."""
    if s.lend_trainer_gpus:
        return float(s.lend_mem_fraction)
    return float(s.server_args.get("mem-fraction-static", MEMORY_FRACTION))


def offloading_needs_sharing(s: Flat) -> None:
    for name in ("offload", "offload_train", "offload_rollout"):
        if getattr(s, name) and not s.colocate and not (s.lend_trainer_gpus and name == "offload_train"):
            why = "trainer and engines have GPUs of their own (colocate = false)"
            raise s.refusal(name, why, "Add --colocate, or leave it out.")
    if s.offload_rollout and not s.offload_rollout_level:
        why = "engines would give nothing back (offload_rollout = true)"
        raise refusal("offload_rollout_level", (), why, "Name kv_cache, weight or both, or set --no-offload-rollout.")


def engines_are_where_the_trainer_is(s: Flat) -> None:
    if not s.colocate:
        return
    if s.engine_kind.attached:
        why = f"engine is {s.engine!r}, whose memory is not ours to give"
        raise s.refusal("colocate", why, f"Set --engine {OF_MILES.name}, or leave out --colocate.")
    if not s.engine_kind.needs_gpu:
        return
    ours, each, hosts = s.actor_num_gpus_per_node, s.rollout_num_gpus_per_engine, s.sglang_nnodes
    nodes = s.actor_num_nodes if s.launcher_kind.spreads else 1
    if hosts > 1 and (each != ours * hosts or nodes % hosts):
        why = f"with colocate an engine over {hosts} nodes has whole ones, and the trainer has {nodes} of {ours} GPUs"
        raise s.refusal("rollout_num_gpus_per_engine", why, f"Set it to {ours} times a divisor of {nodes}.")
    if hosts == 1 and ours % each:
        why = f"with colocate an engine has GPUs of one node of the trainer, actor_num_gpus_per_node = {ours}"
        raise s.refusal("rollout_num_gpus_per_engine", why, f"Set it to a divisor of {ours}.")
    if s.rollout_num_gpus != ours * nodes:
        have = f"{ours * nodes} GPUs (actor_num_gpus_per_node = {ours}{f', actor_num_nodes = {nodes}' if nodes > 1 else ''})"
        remedy = "Leave it out, and set --rollout-num-gpus-per-engine to a divisor of them."
        raise s.refusal("rollout_num_gpus", f"with colocate engines have the trainer's {have}", remedy)
    if not set(s.rollout_gpu_ids) <= set(range(ours)):
        raise s.refusal("rollout_gpu_ids", f"the trainer has GPUs 0 to {ours - 1} (colocate = true)", "Leave it out.")


def fraction_is_a_part(s: Flat) -> None:
    given = s.server_args.get("mem-fraction-static")
    if not s.colocate or given is None:
        return
    try:
        held = 0.0 < memory_fraction(s) < 1.0
    except (TypeError, ValueError):
        held = False
    if not held:
        why = "not a part of the GPU's memory"
        raise refusal("sglang_mem_fraction_static", given, why, f"Set one below 1, e.g. {MEMORY_FRACTION}.")


def gpus_can_be_lent(s: Flat) -> None:
    if not s.lend_trainer_gpus:
        return
    for name, why in (
        ("colocate", "engines are on the trainer's GPUs in any case"),
        ("debug_rollout_only", "there is no trainer"),
        ("load_debug_rollout_data", "there is no rollout"),
    ):
        if getattr(s, name):
            raise s.refusal("lend_trainer_gpus", f"{why} ({name} is set)", "Leave it out.")
    if s.launcher_kind.spreads:
        raise s.refusal("lend_trainer_gpus", "Ray gives a GPU to one process (launcher = ray)", "Set --launcher local.")
    if (elsewhere := s.engine_kind.attached) or not s.num_generation_workers:
        what = f"engines that run elsewhere are not ours to start here (engine = {s.engine})" if elsewhere else (
            "a run whose only engines are lent would wait for ever (num_generation_workers = 0)"
        )  # fmt: skip
        raise s.refusal("lend_trainer_gpus", what, "Leave it out, or give the run engines of its own.")
    if not s.lent_workers or s.actor_num_nodes > 1:
        sizes = f"actor_num_nodes = {s.actor_num_nodes} with {s.actor_num_gpus_per_node} GPUs each"
        each = f"rollout_num_gpus_per_engine = {s.rollout_num_gpus_per_engine}"
        what = f"only a trainer on one host, with GPUs for at least one engine, can lend them ({sizes}; {each})"
        raise s.refusal("lend_trainer_gpus", what, "Leave it out.")
    if s.offload_train and s.transport_kind.passes and not s.update_weight_copy:
        what = "engines may still take a version from the weights themselves (update_weight_copy = false) when GPUs are lent"
        raise s.refusal("offload_train", what, "Leave out --offload-train or --no-update-weight-copy.")


RULES = (gpus_can_be_lent, offloading_needs_sharing, engines_are_where_the_trainer_is, fraction_is_a_part)
