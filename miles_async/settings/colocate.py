"""Rules and checks of engines on the trainer's GPUs (--colocate): who is there, and whether both have room.

The rules are pure. `check_memory` reads the sizes in the model directory and asks nvidia-smi; where either is silent
nothing is checked here, and SGLang's own estimate has the only word.
"""

import json
import subprocess
from pathlib import Path

from miles_async.settings.errors import refusal, show
from miles_async.settings.run import RunSettings

MEMORY_FRACTION = 0.7  # of an engine beside a trainer, unless --sglang-mem-fraction-static says otherwise
LEVELS: dict[str, tuple[str, ...]] = {"kv_cache": ("kv_cache", "cuda_graph"), "weight": ("weights",)}
"""What an engine gives back -> SGLang's tags."""
GIB = 1 << 30
HEADER_BYTES = 100 << 20  # the format's own limit


def gives_back(s: RunSettings) -> tuple[str, ...]:
    """Tags that engines of this run give back in the trainer's turn; empty = there are no turns."""
    g = s.sglang
    trains = not (s.launch.debug_rollout_only or s.ckpt.load_debug_rollout_data)
    if not (g.colocate and g.offload_rollout and trains):
        return ()
    return tuple(tag for level in g.offload_rollout_level for tag in LEVELS[level])


def engine_args(s: RunSettings) -> dict[str, bool | float]:
    """Flags of an SGLang server that shares its GPU."""
    g = s.sglang
    if not g.colocate:
        return {}
    args: dict[str, bool | float] = {"mem-fraction-static": memory_fraction(s)}
    if tags := gives_back(s):
        args |= {"enable-memory-saver": True}
        args |= {"enable-weights-cpu-backup": True} if "weights" in tags else {}
    return args


def memory_fraction(s: RunSettings) -> float:
    """Part of a GPU's memory that an engine takes for weights and cache."""
    return float(s.sglang.server_args.get("mem-fraction-static", MEMORY_FRACTION))  # type: ignore[arg-type]


def offloading_needs_sharing(s: RunSettings) -> None:
    g = s.sglang
    for name in ("offload", "offload_train", "offload_rollout"):
        if getattr(g, name) and not g.colocate:
            raise refusal(
                name, True, "trainer and engines have GPUs of their own (colocate = false)", "Add --colocate, or leave it out."
            )
    if g.offload_rollout and not g.offload_rollout_level:
        raise refusal(
            "offload_rollout_level",
            (),
            "engines would give nothing back (offload_rollout = true)",
            "Name kv_cache, weight or both, or set --no-offload-rollout.",
        )


def engines_are_where_the_trainer_is(s: RunSettings) -> None:
    g, ours = s.sglang, s.perf.actor_num_gpus_per_node
    if not g.colocate:
        return
    if g.engine == "external":
        raise refusal(
            "colocate",
            True,
            "engine is 'external', whose memory is not ours to give",
            "Set --engine sglang, or leave out --colocate.",
        )
    if g.update_weight_transport == "nccl":
        raise refusal(
            "update_weight_transport",
            "nccl",
            "NCCL joins no two processes on one GPU (colocate = true)",
            "Set --update-weight-transport ipc or disk.",
        )
    if g.engine != "sglang":
        return
    if g.rollout_num_gpus != ours:
        raise refusal(
            "rollout_num_gpus",
            g.rollout_num_gpus,
            f"with colocate engines have the trainer's actor_num_gpus_per_node = {ours} GPUs",
            "Leave it out, and set --rollout-num-gpus-per-engine to a divisor of them.",
        )
    if not set(g.rollout_gpu_ids) <= set(range(ours)):
        raise refusal(
            "rollout_gpu_ids", g.rollout_gpu_ids, f"the trainer has GPUs 0 to {ours - 1} (colocate = true)", "Leave it out."
        )


def fraction_is_a_part(s: RunSettings) -> None:
    given = s.sglang.server_args.get("mem-fraction-static")
    if not s.sglang.colocate or given is None:
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


def check_memory(s: RunSettings) -> None:
    """Refuse, before anything starts, an engine and a trainer that cannot both do their work on one GPU."""
    if not s.sglang.colocate or s.sglang.engine != "sglang" or s.model.builtin_name is not None:
        return
    total, params = gpu_bytes(), parameters(Path(s.model.hf_checkpoint))
    if total is not None and params:
        fits(s, total, params)


def fits(s: RunSettings, total: int, params: int) -> None:
    """(pure) SettingsError when a turn needs more than `total` bytes of one GPU; `params` of the policy."""
    g, ranks = s.sglang, s.perf.actor_num_gpus_per_node
    fraction = memory_fraction(s)
    engine = int(fraction * total)
    awake = trainer_bytes(s, params)
    copy = 2 * params if g.update_weight_transport == "ipc" else 0
    aside = engine if not g.offload_rollout else 0 if "weight" in g.offload_rollout_level else 2 * params // ranks
    asleep = 0 if g.offload_train else awake
    margin = g.train_memory_margin_bytes
    for turn, need, parts in (
        ("engine", engine + asleep + copy + margin, f"engine {_gib(engine)}, trainer {_gib(asleep)}"),
        ("trainer", aside + awake + copy + margin, f"engine {_gib(aside)}, trainer {_gib(awake)}"),
    ):
        if need > total:
            most = (total - asleep - copy - margin) / total
            less = turn == "engine" and most > 0.05
            lower = f"Lower --sglang-mem-fraction-static to {most:.2f}" if less else "Train on more GPUs"
            raise refusal(
                "sglang_mem_fraction_static",
                fraction,
                f"the {turn}'s turn on a shared GPU needs {_gib(need)} of {_gib(total)} ({parts}, weights on their way "
                f"{_gib(copy)}, train_memory_margin_bytes {_gib(margin)}; offload_train = {show(g.offload_train)}, "
                f"offload_rollout = {show(g.offload_rollout)})",
                f"{lower}, or use GPUs apart (leave out --colocate).",
            )


def trainer_bytes(s: RunSettings, params: int) -> int:
    """Bytes of one GPU in a training step without activations: weights, float32 masters, gradients, two moments; with
    several ranks float32 shards; a second model for each of reference, critic and teacher."""
    ranks, g = s.perf.actor_num_gpus_per_node, s.grpo
    narrow = s.model.model_dtype != "float32"
    trained = 16 if ranks > 1 or not narrow else 18
    frozen = 2 if narrow and ranks == 1 else 4
    each = trained * (2 if g.advantage_estimator == "ppo" else 1)
    each += frozen * (int(g.needs_reference) + int(bool(s.ckpt.opd_teacher_load)))
    return each * params // ranks


def parameters(directory: Path) -> int:
    """Elements of all tensors in a directory's safetensors, from their headers; 0 where they cannot be read."""
    count = 0
    try:
        for file in directory.glob("*.safetensors"):
            with file.open("rb") as data:
                length = int.from_bytes(data.read(8), "little")
                header = json.loads(data.read(min(length, HEADER_BYTES)))
            for name, facts in header.items():
                n = 1
                for size in facts["shape"] if name != "__metadata__" else (0,):
                    n *= size
                count += n
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return count


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this host; None without nvidia-smi."""
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) << 20 for line in said.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _gib(n: int) -> str:
    return f"{n / GIB:.1f} GiB"


__all__ = ("RULES", "check_memory", "engine_args", "fits", "gives_back", "gpu_bytes", "parameters")
