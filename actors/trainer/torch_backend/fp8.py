"""BF16 training, FP8 serving: weights into block-scaled FP8 when they are published, and an FP8 directory back into masters.

Always true: a published scale is the largest magnitude of its block / 448 (1 for a block of zeros), so no element overflows,
and an element w comes back within max(|w| / 16, scale / 1024). Nothing infinite or NaN is published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.runtime.fp8 import SCALE, Fp8Scheme, read_scheme
from actors.runtime.run import Refused
from bus.errors import InvariantBroken

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max  # 448
SMALLEST = torch.finfo(torch.float32).tiny  # a smaller scale would lose bits of its own


def scheme_of(directory: str | Path) -> Fp8Scheme | None:
    """How the weights of a model directory are quantised; None for plain ones. Refused for what is not understood."""
    try:
        config: Any = json.loads((Path(directory) / "config.json").read_bytes())
        return read_scheme(config)
    except OSError:
        return None  # whoever loads the model says so
    except ValueError as error:
        raise Refused(f"{directory}: {error}. Give hf_checkpoint a plain (bfloat16) or block-scaled FP8 directory.") from error


@torch.no_grad()
def quantize(weight: Tensor, scheme: Fp8Scheme) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [rows, cols], float32 scales) of a floating-point matrix, on its device. ValueError when not finite."""
    rows, cols = weight.shape
    high, wide = scheme.block
    padded = F.pad(weight.float(), (0, -cols % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = blocks.abs().amax((1, 3))
    if not bool(largest.isfinite().all()):
        raise ValueError("it holds values that are not finite")
    scale = torch.where(largest > 0, (largest / MAX).clamp_min(SMALLEST), 1.0)
    # A quotient may round to just above the largest FP8 number, which the conversion would turn into NaN.
    narrow = (blocks / scale[:, None, :, None]).clamp(-MAX, MAX).to(FP8)
    return narrow.view(padded.shape)[:rows, :cols].contiguous(), scale


def quantized(tensors: Mapping[str, Tensor], scheme: Fp8Scheme) -> dict[str, Tensor]:
    """What is published: FP8 weights, then their scales, then all other tensors as they are. Tensors of one type stand
    together because transports cut a bucket where the type changes."""
    weights: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not scheme.converts(name, tensor.shape):
            continue
        try:
            weights[name], scales[name + SCALE] = quantize(tensor, scheme)
        except ValueError as error:
            raise InvariantBroken(f"{name} is not published as FP8: {error}. Go back to an older checkpoint.") from error
    return {**weights, **scales, **{name: t for name, t in tensors.items() if name not in weights}}


def dequantized(directory: Path, scheme: Fp8Scheme) -> dict[str, Tensor]:
    """Tensors of an FP8 directory as float32, plain ones as they are, on the CPU. Refused when scales are missing or of
    another shape, or a file is damaged."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise Refused(f"{path} cannot be read as safetensors ({error}). Download it again.") from error
    made: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if name.endswith(SCALE):
            continue
        if tensor.dtype != FP8:
            made[name] = tensor
            continue
        scale = found.get(name + SCALE)
        if scale is None or tuple(scale.shape) != scheme.scales(tensor.shape):
            shape = None if scale is None else tuple(scale.shape)
            raise Refused(
                f"{directory}: {name} is FP8 and its scales have shape {shape} instead of {scheme.scales(tensor.shape)}. "
                "Give a whole block-scaled FP8 directory, or plain weights with --ref-load."
            )
        made[name] = scheme.dequantize(tensor, scale)
    return made
