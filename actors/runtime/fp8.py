"""Block-scaled FP8 as Hugging Face directories carry it: which tensors are FP8, and what their bytes stand for (pure).

A weight W [rows, cols] is stored as float8_e4m3fn [rows, cols] beside `<name>_scale_inv` float32
[ceil(rows / block_rows), ceil(cols / block_cols)]; W is each element times the scale of its block. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCALE = "_scale_inv"
"""What a scale's name adds to its weight's."""
NEVER = ("embed_tokens", "lm_head")
# Fields of quantization_config that this form fixes, and what they may say.
_FIXED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float32", "float", None),
}


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """`block`: rows and columns that share a scale. `skip`: dotted module paths, or parts of them, that stay as they are."""

    block: tuple[int, int]
    skip: tuple[str, ...] = ()

    def converts(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor of this name is FP8: a matrix of a linear layer that is not left out."""
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(shape) != 2 or module.rpartition(".")[2] in NEVER:
            return False
        return not any(f".{part}." in f".{module}." for part in self.skip)

    def scales(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of the scales of a weight [rows, cols]."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def dequantize(self, weight: Tensor, scale: Tensor) -> Tensor:
        """float32 [rows, cols] from float8 [rows, cols] and its scales."""
        rows, cols = weight.shape
        spread = scale.float().repeat_interleave(self.block[0], 0)[:rows]
        return weight.float() * spread.repeat_interleave(self.block[1], 1)[:, :cols]


def read_scheme(config: Mapping[str, Any]) -> Fp8Scheme | None:
    """The scheme of a `config.json`; None for plain weights. ValueError, a clause, for any other quantisation."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ValueError(f"quantization_config is {found!r}, not an object")
    for field, allowed in _FIXED.items():
        if found.get(field) not in allowed:
            raise ValueError(f"quantization_config has {field} {found.get(field)!r}, only {allowed[0]!r} is understood")
    block = found.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"quantization_config has weight_block_size {block!r}, only [rows, cols] is understood")
    skip = found.get("ignored_layers") or found.get("modules_to_not_convert") or ()
    return Fp8Scheme((block[0], block[1]), tuple(skip))
