"""Weights of a class of transformers under the names and in the shapes of the checkpoint that they came from.

transformers renames and fuses tensors when it loads some families; its own `revert_weight_conversion`, with which it saves, undoes
it. A directory may also leave out, or bring, the prefix of the class's inner model: its own spelling is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

BLOCK = re.compile(r"^(.*?\.\d+)\.")
Named = Iterable[tuple[str, Tensor]]
UNCONVERTED = (RuntimeError, KeyError, IndexError, ValueError, AttributeError, NotImplementedError)


class CheckpointNames:
    """Of one model, `hf`, and the directory it came from."""

    def __init__(self, hf: Any, directory: Path) -> None:
        self._hf = hf
        weights = [(name, p.detach().to("meta")) for name, p in hf.named_parameters()]
        self._prefix = f"{hf.base_model_prefix}." if hf.base_model_prefix else ""
        self._spelled: dict[str, str] = {}
        self.whole = not self._by_layer_too(weights)
        """A conversion needs tensors of several layers: the model is converted at once, not layer by layer."""
        self._spelled = self._as_in(tensor_names(directory), [name for name, _ in self.reverted(weights)])

    def _as_in(self, there: set[str], ours: list[str]) -> dict[str, str]:
        """Our name -> the directory's, where only the inner model's prefix tells them apart."""
        found = {}
        for name in (n for n in ours if n not in there and self._prefix):
            other = name.removeprefix(self._prefix) if name.startswith(self._prefix) else self._prefix + name
            if other in there:
                found[name] = other
        return found

    def _by_layer_too(self, weights: list[tuple[str, Tensor]]) -> bool:
        at_once = {name: t.shape for name, t in self.reverted(weights)}
        try:
            return {n: t.shape for part in _by_layer(weights) for n, t in self.reverted(part)} == at_once
        except UNCONVERTED:
            return False

    def published(self, weights: Named) -> Iterator[tuple[str, Tensor]]:
        """Weights of `named_parameters`, in its order, as files have them, and then the buffers that files have."""
        parts = [list(weights)] if self.whole else _by_layer(weights)
        for part in parts:
            yield from ((name, t.contiguous()) for name, t in self.reverted(part))
        yield from ((name, t.contiguous()) for name, t in self.reverted(self.buffers().items()))

    def buffers(self) -> dict[str, Tensor]:
        """Persistent ones, by their names in the model: biases of routers and the like."""
        parameters = {name for name, _ in self._hf.named_parameters(remove_duplicate=False)}
        return {name: t for name, t in self._hf.state_dict().items() if name not in parameters and isinstance(t, Tensor)}

    def reverted(self, part: Named) -> Iterator[tuple[str, Tensor]]:
        """Some tensors, by their names in the model, as files have them: views where a conversion allows it."""
        from transformers.core_model_loading import revert_weight_conversion  # engines with code of their own do without it

        for name, tensor in revert_weight_conversion(self._hf, dict(part)).items():
            yield self._spelled.get(name, name), tensor


def tensor_names(directory: Path) -> set[str]:
    """Of all tensors in a directory's safetensors; empty where there are none that can be read."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            return set(json.loads(index.read_bytes())["weight_map"])
        names: set[str] = set()
        for file in sorted(directory.glob("model*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                names |= set(tensors.keys())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return set()
    return names


def _by_layer(weights: Named) -> Iterator[list[tuple[str, Tensor]]]:
    for _, part in groupby(weights, key=lambda pair: found.group(1) if (found := BLOCK.match(pair[0])) else ""):
        yield list(part)
