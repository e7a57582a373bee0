"""Loads safetensors from a directory into a Decoder, in place.

Always true: names, shapes and types of every tensor are checked before the first byte is copied, so a refused directory
leaves the model exactly as it was. Files are memory-mapped; nothing is unpickled.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from actors.generation.embedded.config import ModelRefused
from actors.generation.embedded.model import Decoder

FLOATS = ("F64", "F32", "F16", "BF16")


def load_weights(decoder: Decoder, model_dir: Path) -> int:
    """Copy `model*.safetensors` of `model_dir` into the decoder; returns the number of bytes of the decoder's own copy.

    Raises ModelRefused, with nothing changed, when a file is missing or damaged, or a tensor is missing, unknown,
    misshapen or not floating point.
    """
    files = sorted(model_dir.glob("model*.safetensors"))
    if not files:
        raise ModelRefused(
            f"{model_dir} has no model*.safetensors; weights unchanged. Give a directory of safetensors."
        )
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in files:
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelRefused(f"{path} cannot be read as safetensors ({error}); weights unchanged.") from None
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if name in where:
                    raise ModelRefused(f"{model_dir}: tensor {name} is in two files; weights unchanged.")
                where[name] = handle
        for problem in _problems(decoder, where):
            raise ModelRefused(f"{model_dir}: {problem}; weights unchanged.")
        for name, slot in decoder.slots.items():
            slot.fill(where[name].get_tensor(name))
    return sum(slot.view.nbytes for slot in decoder.slots.values())


def _problems(decoder: Decoder, where: dict[str, Any]) -> Iterator[str]:
    missing = sorted(decoder.slots.keys() - where.keys())
    if missing:
        yield f"{len(missing)} tensors are missing, first {missing[0]}"
    unknown = sorted(name for name in where.keys() - decoder.slots.keys() if not _harmless(name, decoder))
    if unknown:
        yield f"{len(unknown)} tensors are unknown to this model, first {unknown[0]}"
    for name, slot in decoder.slots.items():
        found = where[name].get_slice(name)
        if tuple(found.get_shape()) != slot.shape:
            yield f"{name} has shape {tuple(found.get_shape())}, the model has {slot.shape}"
        if found.get_dtype() not in FLOATS:
            yield f"{name} has type {found.get_dtype()}, only {', '.join(FLOATS)} are loaded"


def _harmless(name: str, decoder: Decoder) -> bool:
    """A tied head that was written out, and rotary tables that older files carry."""
    return (name == "lm_head.weight" and decoder.config.tied) or name.endswith("rotary_emb.inv_freq")
