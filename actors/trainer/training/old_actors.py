"""Weights of others that a model computes with for a while: those of earlier steps (`--keep-old-actor`, reference A17), and where
there is one model on the device, reference and teacher.

Owns one copy of the weights for each step that a trained token may come from: in host memory with one process, as shards on
the device with several. Always true: outside `worn` the model holds its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from actors.trainer.training.offload import host_memory

ALIGNED = 256  # bytes, at which tensors begin in a copy


class OldActors:
    """`on_host`: copies lie in host memory."""

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._own: dict[str, Tensor] = {}

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
        return self.worn(weights, self._kept[step])

    @contextmanager
    def worn(self, weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
        """A model computes with `others` while the body runs; `weights` are its own, kept in the meantime in host memory, always at
        the same place, or where they are."""
        own = self._own or copies(weights, on_host=self._on_host)
        if self._own:
            _copy_into(own, weights)
        elif self._on_host:
            self._own = own
        try:
            _copy_into(weights, others)
            yield
        finally:
            _copy_into(weights, own)

    def tensors(self) -> dict[str, Tensor]:
        """All copies as "step/name", for a checkpoint."""
        return {f"{step}/{name}": t for step in self.steps for name, t in self._kept[step].items()}

    def put(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of a step."""
        self._kept[step] = copies(weights, on_host=self._on_host)

    def clear(self) -> None:
        """Forget all."""
        self._kept = {}


class Copies(dict[str, Tensor]):
    """Tensors by name, and the memory that they lie in."""

    memory: Tensor | None = None


def copies(weights: Mapping[str, Tensor], *, on_host: bool) -> Copies:
    """Of tensors by name, in host memory (one piece of it, which is pinned for a GPU) or where they are."""
    if not on_host:
        return Copies((name, p.detach().clone()) for name, p in weights.items())
    places, end = {}, 0
    for name, p in weights.items():
        places[name] = end
        end += -(-p.numel() * p.element_size() // ALIGNED) * ALIGNED
    memory = host_memory(end, pinned=any(p.is_cuda for p in weights.values()))
    made = Copies()
    made.memory = memory  # pinned as long as it lives
    for name, p in weights.items():
        place = memory[places[name] : places[name] + p.numel() * p.element_size()]
        made[name] = place.view(p.dtype).view(p.shape)
    _copy_into(made, weights)
    return made


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, p in targets.items():
        p.copy_(sources[name])
