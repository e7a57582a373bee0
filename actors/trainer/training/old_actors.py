"""Weights of earlier steps (`--keep-old-actor`): log-probs under the very weights that made a token. Reference A17.

Owns one copy of the weights for each step that a trained token may come from: in host memory with one process, as shards on
the device with several. Always true: outside `wearing` the model holds its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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

    @torch.no_grad()
    def keep(self, step: int, weights: Mapping[str, Tensor], *, depth: int) -> None:
        """Copy `weights`, which hold `step` updates, and forget what is out of reach of the next step. `depth`: how many steps
        back a token may have been made, as the live bound has it, so depth copies beside the present weights."""
        if depth < 1:
            self._kept.clear()
            return
        self._kept[step] = {name: self._copy(p) for name, p in weights.items()}
        for old in [s for s in self._kept if s > step or s <= step - depth]:
            del self._kept[old]

    def _copy(self, p: Tensor) -> Tensor:
        return _copied(p, on_host=self._on_host)

    @contextmanager
    def wearing(self, step: int, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The model computes with the weights of `step` while the body runs; `weights` are its own."""
        with worn(weights, self._kept[step], on_host=self._on_host):
            yield

    def tensors(self) -> dict[str, Tensor]:
        """All copies as "step/name", for a checkpoint."""
        return {f"{step}/{name}": t for step in self.steps for name, t in self._kept[step].items()}

    def put(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """A copy out of a checkpoint."""
        self._kept[step] = {name: self._copy(t) for name, t in weights.items()}

    def clear(self) -> None:
        """Forget all."""
        self._kept = {}


@contextmanager
def worn(weights: Mapping[str, Tensor], others: Mapping[str, Tensor], *, on_host: bool) -> Iterator[None]:
    """A model computes with `others` while the body runs; `weights` are its own, kept in the meantime in host memory or where they
    are."""
    own = {name: _copied(p, on_host=on_host) for name, p in weights.items()}
    try:
        _copy_into(weights, others)
        yield
    finally:
        _copy_into(weights, own)


def _copied(p: Tensor, *, on_host: bool) -> Tensor:
    return p.detach().to("cpu", copy=True) if on_host else p.detach().clone()


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, p in targets.items():
        p.copy_(sources[name])
