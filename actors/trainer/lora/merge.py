"""Whole weights of a base and an adapter: for engines, `--save-hf` and `miles-async convert merge`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from actors.runtime.lora import PREFIX, merged
from actors.runtime.run import Refused
from actors.trainer.lora import peft
from actors.trainer.lora.peft import ADAPTER
from actors.trainer.training.files import export_at, write_bytes, write_tensors


def written(base: Path, adapter: Mapping[str, Tensor], scale: float, target: Path, *, dtype: torch.dtype | None) -> None:
    """Every file of safetensors in `base` with the adapter in it, one after the other, and their index, into `target`. `dtype`: of
    all of them; None: each stays as it is. Raises OSError."""
    for file in sorted(base.glob("*.safetensors")):
        tensors = load_file(file)
        for name, w in tensors.items():
            a, b = (adapter.get(f"{PREFIX}{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB")
            wide = dtype or w.dtype
            tensors[name] = w.to(wide) if a is None or b is None else merged(w, a, b, scale, wide)
        write_tensors(target / file.name, tensors, durable=True)
    index = "model.safetensors.index.json"
    if (base / index).is_file():
        write_bytes(target / index, (base / index).read_bytes(), durable=True)


def merge(base: Path, adapter: Path, target: Path) -> None:
    """A Hugging Face directory of `base` with the PEFT directory `adapter` in it, in the type of the base; new or an earlier
    export. Refused, before anything is written, where they do not fit."""
    if not (base / "config.json").is_file():
        raise Refused(f"{base} is not a model directory: it has no config.json. Give the base that the adapter was trained on.")
    rank, alpha = peft.read_config(adapter)
    shapes, found = peft.model_shapes(base), peft.tensors_in(adapter / ADAPTER)
    ends = (".lora_A.weight", ".lora_B.weight")
    mine = {n.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for n in found if n.startswith(PREFIX) and n.endswith(ends)}
    matrices = {n: shapes[f"{n}.weight"] for n in mine if len(shapes.get(f"{n}.weight", ())) == 2}
    if not matrices:
        raise Refused(f"adapter {adapter} has no matrix of the model in {base}. Give the base that it was trained on.")
    peft.check_shapes(adapter, found, peft.shapes_of(matrices, rank))
    try:
        tensors = load_file(adapter / ADAPTER)
        with export_at(target) as part:
            part.mkdir(parents=True)
            for file in sorted(base.iterdir()):
                if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")):
                    shutil.copyfile(file, part / file.name)
            written(base, tensors, alpha / rank, part, dtype=None)
    except (OSError, SafetensorError) as error:
        raise Refused(f"{target} cannot be written from {base} and {adapter}: {error}. Nothing was left there.") from error
