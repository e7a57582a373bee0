"""A Hugging Face directory: what model it says it holds, and which file has which tensor. Only headers are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors import safe_open

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.families import describe

LEFT_OUT = re.compile(r"(rotary_emb\.inv_freq|\.mtp\.|^mtp\.)")
"""tensors that are not trained: constants of positions, layers that predict several tokens"""


def read(directory: str | Path) -> Architecture:
    """The architecture of a model directory. Raises Refused where there is no config.json or its family is not known."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else err
        raise Refused(f"{directory} is no Hugging Face model directory: {path.name} can't be read ({why})") from None
    return describe(config, where=str(directory))


def index(directory: str | Path, arch: Architecture) -> dict[str, Path]:
    """File of each tensor of the architecture. Raises Refused, in one line, where tensors are missing or belong to another
    architecture, or where there are only pickles."""
    folder = Path(directory)
    if "quantization_config" in (arch.config or {}):
        raise Refused(f"{directory} holds quantised weights (quantization_config in config.json); give the directory in bfloat16")
    listed = folder / "model.safetensors.index.json"
    if listed.is_file():
        names = {name: folder / file for name, file in json.loads(listed.read_bytes())["weight_map"].items()}
    else:
        names = {name: path for path in sorted(folder.glob("*.safetensors")) for name in _names(path)}
    if not names:
        pickled = next(folder.glob("*.bin"), None)
        why = (
            f"{pickled.name} is a pickle, which could run code; convert it to safetensors first" if pickled else "no *.safetensors"
        )
        raise Refused(f"{directory} holds no weights that can be read: {why}")
    if absent := sorted({path.name for path in names.values() if not path.is_file()}):
        raise Refused(
            f"{directory} is not whole: its index names {', '.join(absent[:3])}{' ...' if len(absent) > 3 else ''}, not there"
        )
    wanted = set(arch.hf_names())
    missing = sorted(wanted - names.keys())
    extra = sorted(n for n in names.keys() - wanted if not LEFT_OUT.search(n) and not _past(n, arch)
                   and not (arch.tied and n == "lm_head.weight"))  # fmt: skip
    if missing or extra:
        lacks = f"lacks {len(missing)} tensors of it ({', '.join(missing[:2])})" if missing else ""
        other = f"has {len(extra)} others ({', '.join(extra[:2])})" if extra else ""
        raise Refused(f"{directory}: config.json says {arch.family} with {arch.layers} layers, but the directory "
                      f"{' and '.join(filter(None, (lacks, other)))}; weights and config.json are of different models")  # fmt: skip
    return {name: names[name] for name in wanted}


def _past(name: str, arch: Architecture) -> bool:
    """Layers behind the last one predict further tokens (DeepSeek, GLM); they are not trained."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    further = int((arch.config or {}).get("num_nextn_predict_layers") or 0)
    return found is not None and arch.layers <= int(found[1]) < arch.layers + further


def _names(path: Path) -> list[str]:
    with safe_open(str(path), framework="pt") as opened:
        return list(opened.keys())
