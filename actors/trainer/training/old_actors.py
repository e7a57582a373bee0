"""Weights of earlier steps (`--keep-old-actor`): log-probs under the very weights that made a token. Reference A17.

Owns one copy of the weights for each step that a trained token may come from: in host memory with one process, as shards on
the device with several. Always true: outside `wearing` the model holds its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


class OldActors:
    """`on_host`: copies lie in host memory."""

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose weights are here, oldest first."""
        return tuple(sorted(self._kept))

    def keep(self, step: int, weights: Mapping[str, Tensor], *, depth: int) -> None:
        """Copy `weights`, which hold `step` updates, and forget what is out of reach of the next step. `depth`: how many steps
        back a token may have been made, as the live bound has it, so depth copies beside the present weights."""
        if depth > 0:
            self.put(step, weights)
        self._kept = {s: kept for s, kept in self._kept.items() if step - depth < s <= step}

    def wearing(self, step: int, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The model computes with the weights of `step` while the body runs; `weights` are its own."""
        return worn(weights, self._kept[step], on_host=self._on_host)

    def tensors(self) -> dict[str, Tensor]:
        """All copies as "step/name", for a checkpoint."""
        return {f"{step}/{name}": t for step in self.steps for name, t in self._kept[step].items()}

    def put(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of a step."""
        self._kept[step] = copies(weights, on_host=self._on_host)

    def clear(self) -> None:
        """Forget all."""
        self._kept = {}


@contextmanager
def worn(weights: Mapping[str, Tensor], others: Mapping[str, Tensor], *, on_host: bool) -> Iterator[None]:
    """A model computes with `others` while the body runs; `weights` are its own, kept in the meantime in host memory or where they
    are."""
    own = copies(weights, on_host=on_host)
    try:
        _copy_into(weights, others)
        yield
    finally:
        _copy_into(weights, own)


def copies(weights: Mapping[str, Tensor], *, on_host: bool) -> dict[str, Tensor]:
    """Of tensors by name, in host memory or where they are."""
    return {n: p.detach().to("cpu", copy=True) if on_host else p.detach().clone() for n, p in weights.items()}


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, p in targets.items():
        p.copy_(sources[name])
