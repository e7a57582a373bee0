"""Versions that are adapters alone: the engine keeps its base and computes with base and adapter added up.

Always true: each matrix holds its base plus one version's B A, never a sum of two versions', since it is made anew from the base;
and a version's label is stated with its last tensors, so a token's version is as exact as with whole weights. The same numbers as
when the trainer adds them up and sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.generation.engines.embedded.config import ModelRefused
from actors.runtime.lora import AdapterShape, matrix_of, merged


class Adapters:
    """Of one decoder. `base`: matrices as they were before their first adapter, float32 [out, in], by checkpoint name."""

    def __init__(self, shape: AdapterShape) -> None:
        self._shape = shape
        self.base: dict[str, Tensor] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}

    def check(self, slots: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], bool]]) -> None:
        """Names with their shapes, and whether they are floating point. ModelRefused for what has no place in this model."""
        for name, (shape, is_float) in tensors.items():
            matrix, part = matrix_of(name) or ("", "")
            slot = slots.get(matrix)
            if slot is None or len(slot.shape) != 2 or slot.view.numel() != slot.shape[0] * slot.shape[1]:
                raise ModelRefused(f"adapter {name} is of no matrix of this model; weights unchanged.")
            rows, columns = slot.shape
            wanted = (self._shape.rank, columns) if part == "A" else (rows, self._shape.rank)
            if tuple(shape) != wanted or not is_float:
                raise ModelRefused(f"adapter {name} has shape {tuple(shape)}, this model has floats {wanted}; weights unchanged.")

    def begin(self) -> None:
        """A whole version comes: halves of one that broke off are forgotten."""
        self._parts.clear()

    def put(self, slots: Mapping[str, Any], name: str, tensor: Tensor) -> None:
        """One part of a matrix's adapter, which `check` passed; the matrix changes with the second."""
        matrix, part = matrix_of(name) or ("", "")
        parts = self._parts.setdefault(matrix, {})
        parts[part] = tensor.clone()
        if len(parts) < 2:
            return
        slot = slots[matrix]
        if matrix not in self.base:
            self.base[matrix] = slot.view.reshape(slot.shape).clone()
        slot.fill(merged(self.base[matrix], parts["A"], parts["B"], self._shape.scale, torch.float32))
        del self._parts[matrix]

    def replaced(self, name: str) -> None:
        """Whole weights came: they are the base from now on."""
        self.base.pop(name, None)
