"""Adapters as peft names them, and what they make of a matrix: what the trainer writes and an engine reads.

Needs no torch to be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PREFIX = "base_model.model."
PARTS = (".lora_A.weight", ".lora_B.weight")


class AdapterShape(msgspec.Struct, frozen=True):
    """What an engine is told of the adapters that it will get: their rank, the numerator of their weight, and the last names of
    the matrices that have them."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def matrix_of(name: str) -> tuple[str, str] | None:
    """(checkpoint name of the matrix, part) of a tensor's name; None: it is no adapter's.

    >>> matrix_of("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight")
    ('model.layers.0.mlp.up_proj.weight', 'A')
    """
    if not name.startswith(PREFIX) or not name.endswith(PARTS):
        return None
    matrix, _, part = name.removesuffix(".weight").removeprefix(PREFIX).rpartition(".lora_")
    return f"{matrix}.weight", part


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """W [out, in] + scale * B [out, r] A [r, in], in float32 and rounded once to `dtype`."""
    return (weight.float() + (b.float() @ a.float()) * scale).to(dtype)
