"""Weights under the names and in the shapes of the checkpoint that they came from.

transformers renames and fuses tensors when it loads some families; its own `revert_weight_conversion`, with which it saves, undoes
it. Buffers that a checkpoint holds (biases of routers) are published beside the weights, as they were loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from actors.trainer.training.export import Named

BLOCK = re.compile(r"^(.*?\.\d+)\.")


class Names:
    """Of one model."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        weights = [(name, p.detach().to("meta")) for name, p in hf.named_parameters()]
        self.whole = not self._same(weights)
        """A conversion needs tensors of several layers: the model is converted at once, not layer by layer."""

    def _same(self, weights: list[tuple[str, Tensor]]) -> bool:
        at_once = {name: t.shape for name, t in self._reverted(weights)}
        try:
            return {n: t.shape for part in _by_layer(weights) for n, t in self._reverted(part)} == at_once
        except (RuntimeError, KeyError, IndexError, ValueError):
            return False

    def published(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        """Weights of `named_parameters`, in its order, as files have them, and buffers."""
        parts = [list(weights)] if self.whole else _by_layer(weights)
        for part in parts:
            yield from self._reverted(part)
        if buffers := self.buffers():
            yield from self._reverted(list(buffers.items()))

    def buffers(self) -> dict[str, Tensor]:
        """Persistent ones, by their names in the model."""
        parameters = {name for name, _ in self._hf.named_parameters(remove_duplicate=False)}
        return {name: t for name, t in self._hf.state_dict().items() if name not in parameters and isinstance(t, Tensor)}

    def _reverted(self, part: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in revert_weight_conversion(self._hf, dict(part)).items():
            yield name, tensor.contiguous() if isinstance(tensor, torch.Tensor) else tensor


def _by_layer(weights: Named) -> Iterator[list[tuple[str, Tensor]]]:
    for _, part in groupby(weights, key=lambda pair: found.group(1) if (found := BLOCK.match(pair[0])) else ""):
        yield list(part)
