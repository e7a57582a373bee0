"""Loads safetensors from a directory into a Decoder, in place.

Always true: names, shapes and types of every tensor are checked before the first byte is copied, so a refused directory
leaves the model exactly as it was. Files are memory-mapped; nothing is unpickled. FP8 weights of a model whose config.json
says so are widened with the scales beside them. The library checks a file, and the bytes are taken from it here: in version 0.8.0
each tensor that it gives leaves two objects behind, and an engine loads a version after each step.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.generation.engines.embedded.config import ModelRefused
from actors.generation.engines.embedded.decoders import Decodes
from actors.runtime.fp8 import SCALE
from actors.runtime.lora import matrix_of

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8 = "F8_E4M3"
TYPES = {**FLOATS, FP8: torch.float8_e4m3fn}


def load_weights(decoder: Decodes, model_dir: Path) -> int:
    """Copy `model*.safetensors` of `model_dir` into the decoder; returns the number of bytes of the decoder's own copy.

    Raises ModelRefused, with nothing changed, when a file is missing or damaged, or a tensor is missing, unknown,
    misshapen or not floating point.
    """
    files = sorted(model_dir.glob("model*.safetensors"))
    if not files:
        raise ModelRefused(f"{model_dir} has no model*.safetensors; weights unchanged. Give a directory of safetensors.")
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
        if adapters := [name for name in where if matrix_of(name)]:
            _check_adapters(decoder, {name: _form(where[name].get_slice(name)) for name in where}, whole=True)
        for problem in _problems(decoder, where) if not adapters else ():
            raise ModelRefused(f"{model_dir}: {problem}; weights unchanged.")
    for path in files:
        for name, tensor in _floats(path):
            _put(decoder, name, tensor)
    return sum(slot.view.nbytes for slot in decoder.slots.values())


def _floats(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The floating point tensors of a file that was checked, each a copy of its own."""
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    begin = 8 + int.from_bytes(whole[:8].tolist(), "little")
    header = json.loads(bytes(whole[8:begin].tolist()))
    for name, facts in header.items():
        if name != "__metadata__" and facts["dtype"] in TYPES:
            first, end = facts["data_offsets"]
            yield name, whole[begin + first : begin + end].clone().view(TYPES[facts["dtype"]]).view(facts["shape"])


def load_tensors(decoder: Decodes, tensors: Mapping[str, Tensor]) -> None:
    """Copy some tensors by their checkpoint names. Raises ModelRefused, with nothing changed, for an unknown name, another
    shape or a type that is not floating point. Adapters come by peft's names, and nothing else beside them."""
    if any(map(matrix_of, tensors)):
        _check_adapters(decoder, {name: (tuple(t.shape), t.dtype.is_floating_point) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        if matrix_of(name):
            continue
        slot, shape = decoder.slots.get(name), _shape_of(decoder, name)
        if shape is None:
            if not _harmless(name, decoder):
                raise ModelRefused(f"tensor {name} is unknown to this model; its bucket is left out.")
        elif tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            raise ModelRefused(
                f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, the model has floats {shape}; its bucket is left out."
            )
        elif slot is not None and tensor.dtype == torch.float8_e4m3fn and not _may_be_fp8(decoder, name):
            raise ModelRefused(f"tensor {name} is FP8, this engine's model has none; its bucket is left out.")
    for name, tensor in tensors.items():
        _put(decoder, name, tensor)


def _put(decoder: Decodes, name: str, tensor: Tensor) -> None:
    """One tensor into its place. An FP8 weight and its scales may come apart, in other buckets or other versions: both are
    kept, and what they stand for is filled in whenever one of them comes."""
    if matrix_of(name) and decoder.adapters is not None:
        decoder.adapters.put(decoder.slots, name, tensor)
        return
    weight, scheme = name.removesuffix(SCALE), decoder.config.fp8
    if weight not in decoder.slots:
        return
    if decoder.adapters is not None:
        decoder.adapters.replaced(weight)
    if scheme is not None and (name != weight or tensor.dtype == torch.float8_e4m3fn):
        parts = decoder.fp8_parts.setdefault(weight, {})
        parts[name] = tensor.clone()
        if len(parts) < 2:
            return
        tensor = scheme.dequantize(parts[weight], parts[weight + SCALE])
    else:
        decoder.fp8_parts.pop(weight, None)
    decoder.slots[weight].fill(tensor)


def _form(found: Any) -> tuple[tuple[int, ...], bool]:
    return tuple(found.get_shape()), found.get_dtype() in FLOATS


def _check_adapters(decoder: Decodes, forms: dict[str, tuple[tuple[int, ...], bool]], *, whole: bool = False) -> None:
    """`whole`: they are a version, both parts of each matrix; otherwise a bucket of one."""
    if decoder.adapters is None:
        raise ModelRefused("these are adapters, which this engine does not take: start it with --lora-rank; weights unchanged.")
    decoder.adapters.check(decoder.slots, forms)
    if whole:
        halves = Counter(found[0] for name in forms if (found := matrix_of(name)))
        if lone := [matrix for matrix, n in halves.items() if n != 2]:
            raise ModelRefused(f"of the adapter of {min(lone)} there is one part, not two; weights unchanged.")
        decoder.adapters.begin()


def _shape_of(decoder: Decodes, name: str) -> tuple[int, ...] | None:
    """The shape a tensor of this name must have; None for names without a place."""
    if name in decoder.slots:
        return decoder.slots[name].shape
    weight, scheme = name.removesuffix(SCALE), decoder.config.fp8
    return scheme.scales(decoder.slots[weight].shape) if scheme and _may_be_fp8(decoder, weight) else None


def _may_be_fp8(decoder: Decodes, name: str) -> bool:
    return decoder.config.fp8 is not None and name in decoder.slots and len(decoder.slots[name].shape) == 2


def checksums(decoder: Decodes) -> dict[str, str]:
    """blake2b-64 of each tensor's float32 values, by its checkpoint name."""
    found: dict[str, str] = {}
    for name, slot in decoder.slots.items():
        flat = slot.view.reshape(-1).contiguous().view(torch.uint8)
        copy = flat.clone().numpy()  # memory that numpy sees itself can never be given back (memory.py)
        found[name] = hashlib.blake2b(copy.data, digest_size=8).hexdigest()
    return found


def _problems(decoder: Decodes, where: dict[str, Any]) -> Iterator[str]:
    missing = sorted(decoder.slots.keys() - where.keys())
    if missing:
        yield f"{len(missing)} tensors are missing, first {missing[0]}"
    unknown = sorted(name for name in where.keys() - decoder.slots.keys() if not _harmless(name, decoder))
    if unknown:
        yield f"{len(unknown)} tensors are unknown to this model, first {unknown[0]}"
    for name, slot in decoder.slots.items():
        if name not in where:
            continue
        found = where[name].get_slice(name)
        if tuple(found.get_shape()) != slot.shape:
            yield f"{name} has shape {tuple(found.get_shape())}, the model has {slot.shape}"
        if found.get_dtype() == FP8:
            yield from _fp8_problems(decoder, name, where)
        elif found.get_dtype() not in FLOATS:
            yield f"{name} has type {found.get_dtype()}, only {', '.join(FLOATS)} are loaded"
        elif name + SCALE in where:
            yield f"{name} has scales but is {found.get_dtype()}, not {FP8}"


def _fp8_problems(decoder: Decodes, name: str, where: dict[str, Any]) -> Iterator[str]:
    scheme, scale = decoder.config.fp8, name + SCALE
    if len(decoder.slots[name].shape) != 2:
        yield f"{name} is {FP8}, only matrices are loaded from that"
    elif scheme is None:
        yield f"{name} is {FP8}, but this engine's config.json had no quantization_config"
    elif scale not in where:
        yield f"{name} is {FP8} and {scale} is missing"
    elif tuple(where[scale].get_slice(scale).get_shape()) != scheme.scales(decoder.slots[name].shape):
        shape, wanted = where[scale].get_slice(scale).get_shape(), scheme.scales(decoder.slots[name].shape)
        yield f"{scale} has shape {tuple(shape)}, its blocks make {wanted}"


def _harmless(name: str, decoder: Decodes) -> bool:
    """A tied head that was written out, rotary tables that older files carry, and the scales of FP8 weights."""
    if name.endswith(SCALE):
        return name.removesuffix(SCALE) in decoder.slots
    return name in decoder.ignored or (name == "lm_head.weight" and decoder.config.tied) or name.endswith("rotary_emb.inv_freq")
