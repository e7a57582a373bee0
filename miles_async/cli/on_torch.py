"""A script that Miles would train on Megatron, with a model that Megatron does not know here, or with LoRA: torch trains it.

Reads  config.json of the model that the script names    Writes  nothing
Always true: a script, or a command line, that names a backend keeps it; what then has no effect is told flag by flag, and what
neither backend does is refused as ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_async.settings.load import FlagValue
from miles_async.settings.meant import Meant, Said
from miles_async.settings.megatron import NOT_YET
from miles_async.settings.megatron_fields import OF_MEGATRON, named

BACKEND = "train_backend"
GROUPS = ("parallel", "architecture")
NO_EFFECT = "without effect: torch trains"
OTHER_FORMAT = "left out: a checkpoint of Megatron; the reference is the model itself"
OFF = ("0", "0.0", "none", "false")


def instead(said: Said, ours: Sequence[Meant], values: Sequence[FlagValue]) -> tuple[list[Meant], dict[str, str]]:
    """(what the script means, flag as typed -> why it is not used): torch in the place of a Megatron that does not know the model
    or has no LoRA; else, and where the script asks for what no backend does, as given, and nothing. `values`: the script's."""
    means_megatron = any(one.field == BACKEND for one in ours)
    if not means_megatron:
        return list(ours), {}
    why = ""
    if said.one("lora_rank", "0") != "0":
        why = "LoRA is of this backend; the model is over the same GPUs by FSDP"
    elif family := _unknown_to_megatron(Path(said.one("hf_checkpoint"))):
        why = f"Megatron does not know {family} here; transformers' class of it is trained, over the same GPUs by FSDP"
    if not why:
        return list(ours), {}
    of_megatron = [value for value in values if value.spec.group in GROUPS or value.spec.name in ("megatron", *OF_MEGATRON)]
    if any(map(_changes_what_is_learned, of_megatron)):
        return list(ours), {}
    left = {value.typed: NO_EFFECT for value in of_megatron}
    left |= {value.typed: OTHER_FORMAT for value in values if value.spec.name == "ref_load" and _of_megatron(value.words)}
    found = [one._replace(words=("torch",), why=why) if one.field == BACKEND else one for one in ours]
    if "--recompute-granularity" in left and "gradient_checkpointing" not in said.values:
        found.append(Meant("gradient_checkpointing", ("true",), "the script recomputes"))
    return found, left


def _changes_what_is_learned(value: FlagValue) -> bool:
    """Whether a flag asks for what no backend does; the others say how Megatron computes, or repeat config.json."""
    field, _ = named(value.typed) or ("", False)
    return value.spec.name == "megatron" and field in NOT_YET and value.words[:1] not in [(word,) for word in OFF]


def _unknown_to_megatron(model: Path) -> str:
    """The model's type, where Megatron does not know it and the installed transformers has a causal class for it; else empty."""
    from actors.trainer.megatron_backend.families import ALIASES, FAMILIES, REFUSED  # takes half a second: only a script asks

    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    family = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(family, str) or family in {*FAMILIES, *ALIASES, *REFUSED}:
        return ""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL  # some seconds

    return family if family in CAUSAL else ""


def _of_megatron(words: Sequence[str]) -> bool:
    """Whether a directory is no Hugging Face one."""
    return bool(words) and Path(words[0]).is_dir() and not (Path(words[0]) / "config.json").is_file()
