"""A rank's part of a torch_dist checkpoint on its way to files, and back.

Every rank writes its own shards; who gathers what the ranks say of their files, and writes the index, is `training.saving`.
Always true: nothing of a running training changes before a checkpoint is found whole and of this model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from actors.runtime.checksum import checksum_of
from actors.runtime.run import Refused
from actors.trainer.megatron_backend import torch_dist
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.training.files import FileEntry, Identity, read_index, shape_fingerprint
from bus.errors import CheckpointRefused

OF_ALL = ("common.pt", "metadata.json")


class Counters(msgspec.Struct, frozen=True):
    """What is no tensor."""

    optimizer_steps: int


class Shards:
    """`Saving` of this library. `write_shards`: what `save_sharded` gave, collective over a group of its own."""

    meets = False

    def __init__(self, write_shards: Callable[[], None], directory: Path) -> None:
        self._write, self._directory = write_shards, directory

    def write(self) -> dict[str, FileEntry]:
        try:
            self._write()
        except CheckpointException as error:
            first = next(iter(error.failures.items()), (0, error))
            raise OSError(f"rank {first[0]} can't write its shards: {first[1]}") from error
        rank = dist.get_rank()
        mine = sorted(p.name for p in self._directory.glob(f"__{rank}_*.distcp"))
        return {name: self._entry(name) for name in [*mine, *(OF_ALL if rank == 0 else ())]}

    def _entry(self, name: str) -> FileEntry:
        path = self._directory / name
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return FileEntry(path.stat().st_size, checksum_of(path))

    def finish(self) -> dict[str, FileEntry]:
        return {}

    def write_hf(self, directory: Path) -> None:
        raise OSError(
            f"--save-hf {directory}: the Megatron backend writes torch_dist; use miles-async convert megatron-to-hf on the checkpoint"
        )


def identity_of(arch: Architecture) -> Identity:
    """Which model a checkpoint holds, whatever layout wrote it."""
    elements = arch.elements()
    return Identity(
        model_type=arch.family,
        n_params=sum(elements.values()),
        fingerprint=shape_fingerprint({name: (n,) for name, n in elements.items()}),
    )


def check(directory: Path, arch: Architecture) -> None:
    """Every byte as it was written, and of this model. Raises CheckpointRefused."""
    index, own = read_index(directory), identity_of(arch)
    if (index.model_type, index.fingerprint) != (own.model_type, own.fingerprint):
        raise CheckpointRefused(
            f"checkpoint {directory} refused: it holds a {index.model_type} of {index.n_params} parameters, this run trains a "
            f"{own.model_type} of {own.n_params}, or their layers differ. Nothing was changed. Use the hf_checkpoint it was made with."
        )
    try:
        torch_dist.check(directory, arch)
    except Refused as error:
        raise CheckpointRefused(f"checkpoint {directory} refused: {error}. Nothing was changed.") from error
