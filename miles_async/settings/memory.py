"""Whether models fit the GPUs: the trainer alone, or trainer and engines in turns (--colocate).

`check_memory` reads the sizes in the model directory and asks nvidia-smi; where either is silent nothing is checked here, and
torch and SGLang have the only word. The rest is pure.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_async.settings.colocate import memory_fraction
from miles_async.settings.errors import refusal, show
from miles_async.settings.run import RunSettings

GIB = 1 << 30
HEADER_BYTES = 100 << 20  # the format's own limit
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_memory(s: RunSettings, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse, before anything starts, what cannot fit; notes of what may not. config: the model's config.json."""
    if s.model.builtin_name is not None or s.launch.debug_rollout_only:
        return ()
    total, params = gpu_bytes(), parameters(Path(s.model.hf_checkpoint))
    if total is None or not params:
        return ()
    if s.sglang.colocate and s.sglang.engine == "sglang":
        fits(s, total, params)
    trainer_fits(s, total, params)
    return tuple(activation_notes(s, total, params, config))


def fits(s: RunSettings, total: int, params: int) -> None:
    """(pure) SettingsError when a turn needs more than `total` bytes of one GPU; `params` of the policy."""
    g, ranks = s.sglang, s.perf.actor_num_gpus_per_node
    fraction = memory_fraction(s.flat)
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


def trainer_fits(s: RunSettings, total: int, params: int) -> None:
    """SettingsError when the trainer's weights and optimizer state alone are more than `total` bytes of each of its GPUs."""
    ranks, need = s.perf.actor_num_gpus_per_node, trainer_bytes(s, params)
    if need > total:
        raise refusal(
            "actor_num_gpus_per_node",
            ranks,
            f"weights, gradients and optimizer state need {_gib(need)} of {_gib(total)} on each of the trainer's GPUs",
            f"Set it to at least {-(-need * ranks // total)}.",
        )


def activation_notes(s: RunSettings, total: int, params: int, config: Mapping[str, Any]) -> Iterator[str]:
    """Whether a full micro-batch may not fit beside the trainer. An estimate, since kernels differ."""
    p = s.perf
    if p.gradient_checkpointing or not p.use_dynamic_batch_size or not all(isinstance(config.get(n), int) for n in SIZES):
        return
    beside, need = trainer_bytes(s, params), activation_bytes(config, p.max_tokens_per_gpu)
    if beside + need > total:
        yield (
            f"max_tokens_per_gpu = {p.max_tokens_per_gpu} may take {_gib(need)} of activations beside {_gib(beside)} of weights "
            f"and optimizer state, of {_gib(total)}: --gradient-checkpointing takes a fraction of them"
        )


def activation_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """Bytes that the layers of a dense model keep of `tokens` tokens for the backward pass, in bfloat16. Counted, with what norms
    and rotations keep in float32, so that it gives the one peak that was measured: 45 GiB on an H200 for 16,384 tokens of
    Qwen3-0.6B's shape, 10 of them weights and optimizer state."""
    hidden, inner, layers, heads = (int(config[name]) for name in SIZES)
    width = int(config.get("head_dim") or hidden // heads)
    attention = width * (heads + 2 * int(config.get("num_key_value_heads") or heads))
    return tokens * layers * (16 * hidden + 8 * inner + 10 * attention)


def trainer_bytes(s: RunSettings, params: int) -> int:
    """Bytes of one GPU in a training step without activations: weights, float32 masters, gradients, two moments; with
    several ranks float32 shards; a second model for each of reference, critic and teacher."""
    ranks, g = s.perf.actor_num_gpus_per_node, s.grpo
    narrow = s.model.model_dtype != "float32"
    trained = 16 if ranks > 1 or not narrow else 18
    frozen = 2 if narrow and ranks == 1 else 4
    each = trained * (2 if g.advantage_estimator == "ppo" else 1)
    each += frozen * (int(s.flat.needs_reference) + int(bool(s.ckpt.opd_teacher_load)))
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
