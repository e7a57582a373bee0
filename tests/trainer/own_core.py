"""A training library of a user's own, named by its dotted path: of its ranks each exports and stores what it holds itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig
from actors.trainer.torch_backend.core import Core
from actors.trainer.training.files import FileEntry, read_index, read_tensors, write_bytes, write_tensors
from actors.trainer.training.ranks import Ranks

FULL = "full"  # in the name of a directory that rank 1 cannot write to


class Shard:
    """This rank's shards, copied."""

    meets = True

    def __init__(self, directory: Path, ranks: Ranks, tensors: dict[str, Tensor]) -> None:
        self._directory, self._ranks = directory, ranks
        self._tensors = {name: t.clone() for name, t in tensors.items()}

    def write(self) -> dict[str, FileEntry]:
        if FULL in self._directory.name and self._ranks.rank == 1:
            raise OSError(28, "No space left on device")
        name = f"rank-{self._ranks.rank}.safetensors"
        return {name: write_tensors(self._directory / name, self._tensors, durable=True)}

    def finish(self) -> dict[str, FileEntry]:
        total = int(self._ranks.total(torch.tensor([sum(t.numel() for t in self._tensors.values())])))
        return {"total": write_bytes(self._directory / "total", str(total).encode(), durable=True)} if self._ranks.rank == 0 else {}

    def write_hf(self, directory: Path) -> None:
        raise OSError("this library cannot")


class OwnCore(Core):
    """Two ranks, each the holder of every second tensor."""

    @property
    def exporters(self) -> tuple[int, ...]:
        return (0, 1)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        sharded: dict[str, Any] = self.policy.named_weights()
        whole = {name: p.detach().full_tensor() for name, p in sharded.items()}  # before: no gathering over two exporters
        yield from list(whole.items())[self.ranks.rank :: 2]

    def _shards(self) -> dict[str, Tensor]:
        found: dict[str, Any] = self.weights.params
        return {name: p.detach().to_local() for name, p in found.items()}

    def save(self, directory: Path) -> Any:
        return Shard(directory, self.ranks, self._shards())

    def read(self, directory: Path, drops: tuple[str, ...] = ()) -> Any:
        return read_index(directory)

    def load(self, directory: Path, read: Any, drops: tuple[str, ...] = ()) -> None:
        held = read_tensors(directory, f"rank-{self.ranks.rank}.safetensors")
        for name, shard in self._shards().items():
            shard.copy_(held[name])


class OneHostLacksIt(OwnCore):
    """What rank 1 refuses before the ranks meet."""

    @classmethod
    def look(cls, config: BackendConfig, ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise Refused("its licence is missing on this host")
