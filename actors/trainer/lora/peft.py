"""Which matrices get adapters, and what a PEFT directory says of them.

A PEFT directory is what the package peft writes and reads: `adapter_model.safetensors`, whose names are those of the base with a
prefix, and `adapter_config.json`. Everything here raises Refused, in one line, and needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.lora import PREFIX
from actors.runtime.run import Refused
from actors.runtime.safetensors_header import BadHeader, header_of

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ALL_LINEAR = "all-linear"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last names of the matrices of a decoder layer that can have adapters."""
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
}
"""What a config must say, or leave out, to mean W + alpha / rank * B A of whole matrices and nothing else."""
Shapes = Mapping[str, tuple[int, ...]]


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the same names; `path`: PEFT directory that training starts from, empty = random A and B of zeros."""

    rank: int
    alpha: int
    targets: str
    exclude: str = ""
    path: str = ""

    @classmethod
    def of(cls, settings: Any) -> Lora:
        """`settings`: the run's, or the backend's, with the settings of LoRA as attributes."""
        s = settings
        return cls(
            rank=s.lora_rank,
            alpha=s.lora_alpha,
            targets=s.target_modules or "",
            exclude=s.exclude_modules or "",
            path=s.lora_adapter_path or "",
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def chosen(names: Iterable[str], lora: Lora) -> list[str]:
    """Matrices with adapters, of the weights' names, without `.weight`. Refused for a word that matches none."""
    names = list(names)
    matrices = [n.removesuffix(".weight") for n in names if n.endswith(".weight") and ".layers." in n and ".experts." not in n]
    matrices = [n for n in matrices if n.rpartition(".")[2] in LINEAR]
    if lora.targets == ALL_LINEAR and any(".experts." in n for n in names):
        raise Refused(
            "target_modules=all-linear: the model's experts get no adapters here. Name the others: --target-modules "
            "q_proj,k_proj,v_proj,o_proj."
        )
    wanted = _matched(matrices, lora.targets, "target_modules")
    left_out = _matched(matrices, lora.exclude, "exclude_modules") if lora.exclude else set()
    found = [n for n in matrices if n in wanted - left_out]
    if not found:
        raise Refused(f"exclude_modules={lora.exclude}: it leaves none of target_modules={lora.targets}. Exclude less.")
    return found


def last_names(targets: str) -> tuple[str, ...]:
    """Last names that matrices of `targets` may have.

    >>> last_names("layers.1*.mlp.*_proj,o_proj")
    ('down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj')
    """
    words = [part.strip().rpartition(".")[2] for part in targets.split(",") if part.strip()]
    return tuple(sorted(name for name in LINEAR if any(word == ALL_LINEAR or fnmatchcase(name, word) for word in words)))


def _matched(matrices: list[str], text: str, field: str) -> set[str]:
    found: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        patterns = [f"*.{name}" for name in LINEAR] if word == ALL_LINEAR else [word, f"*.{word}"]
        mine = {n for n in matrices if any(fnmatchcase(n, pattern) for pattern in patterns)}
        if not mine:
            known = ", ".join(sorted({n.rpartition(".")[2] for n in matrices})) or "none"
            raise Refused(f"{field}={text}: {word} matches no matrix of the model's layers. It has: {known}.")
        found |= mine
    return found


def shapes_of(matrices: Shapes, rank: int) -> dict[str, tuple[int, ...]]:
    """PEFT name -> shape, of adapters of these matrices [out, in]: A [rank, in], B [out, rank]."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in matrices.items():
        found[f"{PREFIX}{name}.lora_A.weight"] = (rank, columns)
        found[f"{PREFIX}{name}.lora_B.weight"] = (rows, rank)
    return found


def config_text(lora: Lora, matrices: Iterable[str], every: Iterable[str], base: str) -> bytes:
    """`adapter_config.json`. `every`: all of the model's modules, of which last names alone must match no others."""
    matrices = list(matrices)
    last = sorted({name.rpartition(".")[2] for name in matrices})
    same = {n for n in every if n.rpartition(".")[2] in last} == set(matrices)
    own = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": last if same else matrices}
    about = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    known = ("peft_type", "bias", "use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save")
    return json.dumps({**{name: PLAIN[name] for name in known}, **about, **own}, indent=2).encode()


def read_config(directory: Path) -> tuple[int, float]:
    """(rank, alpha) of a PEFT directory that holds plain LoRA."""
    start = f"adapter {directory}:"
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text("utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except OSError as error:
        raise Refused(f"{start} {ADAPTER_CONFIG} cannot be read ({error.strerror}). Give a directory that peft wrote.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refused(f"{start} {ADAPTER_CONFIG} is not a config of LoRA. Give a directory that peft wrote.") from None
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in (rank, alpha))
    if not numbers or rank < 1 or rank != int(rank):
        raise Refused(f"{start} {ADAPTER_CONFIG} has r = {rank!r:.40} and lora_alpha = {alpha!r:.40}, not two numbers of LoRA.")
    for name, plain in PLAIN.items():
        if (value := config.get(name)) and value != plain:
            raise Refused(f"{start} {name} = {value!r:.80} is not carried here. Give an adapter of plain LoRA, without it.")
    return int(rank), alpha


def tensors_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in a safetensors file."""
    try:
        return header_of(file).shapes
    except OSError as error:
        raise Refused(f"{file} cannot be read ({error.strerror}). Give a directory with safetensors.") from None
    except BadHeader as error:
        raise Refused(f"{file} {error}. Copy it again.") from None


def model_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all weights of a Hugging Face directory."""
    return {name: shape for file in sorted(directory.glob("*.safetensors")) for name, shape in tensors_in(file).items()}


def check_adapter(directory: Path, lora: Lora, wanted: Shapes) -> None:
    """A PEFT directory of these settings, with the tensors that this base and these targets have."""
    rank, alpha = read_config(directory)
    for field, value, there in (("lora_rank", lora.rank, rank), ("lora_alpha", lora.alpha, alpha)):
        if value != there:
            flag = f"--{field.replace('_', '-')} {there:g}"
            raise Refused(f"{field}={value}: the adapter in {directory} has {there:g}. Set {flag}, or give another adapter.")
    check_shapes(directory, tensors_in(directory / ADAPTER), wanted)


def check_shapes(directory: Path, found: Shapes, wanted: Shapes) -> None:
    """The tensors of an adapter against those that it must have."""
    start = f"adapter {directory} is of another base or of other target modules:"
    for name in sorted(found.keys() ^ wanted.keys()):
        what = f"it has no {name}" if name in wanted else f"{name} has no place in this model"
        raise Refused(f"{start} {what}. Give the base and the --target-modules that it was made with.")
    for name, shape in wanted.items():
        if tuple(found[name]) != tuple(shape):
            raise Refused(f"{start} {name} has shape {list(found[name])}, this model wants {list(shape)}. Give its own base.")
