"""A rank's part of a torch_dist checkpoint on its way to files, and back.

Every rank writes its own shards; who gathers what the ranks say of their files, and writes the index, is `training.saving`.
Always true: nothing of a running training changes before a checkpoint is found whole and of this model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from actors.runtime.checksum import checksum_of
from actors.runtime.run import Refused
from actors.trainer.checkpoint import fsync
from actors.trainer.megatron_backend import torch_dist
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.training.files import (
    FileEntry,
    ModelIdentity,
    export_at,
    of_megatron,
    read_index,
    shape_fingerprint,
)
from bus.errors import CheckpointOfAnother, CheckpointRefused

CONVERT = """import sys
from pathlib import Path
from actors.trainer.megatron_backend.convert import megatron_to_hf
source, target, beside = map(Path, sys.argv[1:])
megatron_to_hf(source, target, print, hf=beside)"""
CONVERT_S = 3600.0
OF_ALL = ("common.pt", "metadata.json")


class Counters(msgspec.Struct, frozen=True):
    """What is no tensor."""

    optimizer_steps: int


class Shards:
    """`Saving` of this library. `write_shards`: what `save_sharded` gave, collective over a group of its own. `source`: the Hugging
    Face directory whose config.json and tokenizer an export gets."""

    meets = False

    def __init__(self, write_shards: Callable[[], None], directory: Path, source: str) -> None:
        self._write, self._directory, self._source = write_shards, directory, source

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
        fsync(path)
        return FileEntry(path.stat().st_size, checksum_of(path))

    def finish(self) -> dict[str, FileEntry]:
        return {}

    def write_hf(self, directory: Path) -> None:
        """By a process of its own, out of the checkpoint's files: there may be no rank that holds the whole model."""
        with export_at(directory) as part:
            words = [sys.executable, "-c", CONVERT, str(self._directory), str(part), self._source]
            hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            try:
                done = subprocess.run(words, env=hidden, capture_output=True, text=True, timeout=CONVERT_S)
            except subprocess.TimeoutExpired as error:
                raise OSError(f"{directory} wasn't converted in {CONVERT_S} s") from error
            if done.returncode:
                raise OSError(f"{directory}: {done.stderr.strip().splitlines()[-1:]}")


def identity_of(arch: Architecture) -> ModelIdentity:
    """Which model a checkpoint holds, whatever layout wrote it."""
    elements = arch.elements()
    return ModelIdentity(
        model_type=arch.family,
        n_params=sum(elements.values()),
        fingerprint=shape_fingerprint({name: (n,) for name, n in elements.items()}),
    )


def holds_optimizer(directory: Path) -> bool:
    """Whether a checkpoint has an optimizer's state."""
    return any(key.startswith(torch_dist.OPTIMIZER) for key in torch_dist.contents(directory))


def check(directory: Path, arch: Architecture, *, moving: bool = False) -> bool:
    """Every byte as it was written, and of this model, with a reference if it moves; whether an optimizer's state is there. Raises
    CheckpointRefused."""
    index, own = read_index(directory), identity_of(arch)
    if not of_megatron(index):
        raise CheckpointOfAnother(
            f"checkpoint {directory} refused: the torch backend wrote it. Nothing was changed. Set --train-backend torch, or begin "
            "with an export of it (--save-hf)."
        )
    if (index.model_type, index.fingerprint) != (own.model_type, own.fingerprint):
        raise CheckpointOfAnother(
            f"checkpoint {directory} refused: it holds a {index.model_type} of {index.n_params} parameters, this run trains a "
            f"{own.model_type} of {own.n_params}, or their layers differ. Nothing was changed. Use the model it was made of."
        )
    try:
        table = torch_dist.check(directory, arch)
    except Refused as error:
        raise CheckpointRefused(f"checkpoint {directory} refused: {error}. Nothing was changed.") from error
    if moving and not any(key.startswith(torch_dist.REFERENCE) for key in table):
        raise CheckpointRefused(
            f"checkpoint {directory} refused: it has no reference. Nothing was changed. Set ref_update_interval as it was."
        )
    return any(key.startswith(torch_dist.OPTIMIZER) for key in table)
