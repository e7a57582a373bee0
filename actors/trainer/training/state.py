"""A copy of training state in host memory, and the files it becomes: those of a library whose rank 0 has it all.

    model.safetensors (float32), config.json and tokenizer: a model directory for whoever wants one; with LoRA
    adapter_model.safetensors (float32) and adapter_config.json: a PEFT directory
    optimizer.safetensors, reference.safetensors (when it moves), old_actors.safetensors (with keep_old_actor),
    critic.safetensors and critic_optimizer.safetensors (with a critic), scalars.json

A copy shares no memory with the model: training goes on while it is written. Tensors are whole, so a checkpoint can be
loaded by any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from actors.trainer.lora.peft import ADAPTER
from actors.trainer.training.export import as_files
from actors.trainer.training.files import (
    FileEntry,
    export_at,
    of_megatron,
    read_index,
    read_tensors,
    shape_fingerprint,
    write_bytes,
    write_tensors,
)
from bus.errors import UNREADABLE, CheckpointOfAnother, CheckpointRefused

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
OLD_ACTORS = "old_actors.safetensors"
SCALARS = "scalars.json"
NAMED = {
    MODEL: "weights",
    ADAPTER: "adapters",
    OPTIMIZER: "optimizer state",
    REFERENCE: "reference",
    OLD_ACTORS: "old actors",
    CRITIC: "critic",
    CRITIC_OPTIMIZER: "critic's optimizer state",
}
REMEDIES = {REFERENCE: "Set ref_update_interval", CRITIC: "Set advantage_estimator"}


class Scalars(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is not a tensor."""

    schema: int = 1
    optimizer: str
    optimizer_steps: int
    rng_cpu: str
    """torch's generator state, hex"""
    rng_cuda: str = ""
    torch_version: str = ""
    critic_steps: int = 0
    """steps of the critic's optimizer"""
    no_optim: bool = False
    """optimizers were left out; their steps are 0 then"""
    old_actors: tuple[int, ...] = ()
    """steps whose weights are kept"""


@dataclass(slots=True)
class TrainingState:
    """All of a training's state in host memory, float32. A copy of it is what lets training go on while it is written."""

    tensors: dict[str, dict[str, Tensor]]
    """By file, as NAMED lists them; what is empty has no file. Old actors: step/name -> weight."""
    scalars: Scalars
    beside: dict[str, bytes] = field(default_factory=dict)
    """config.json, tokenizer and the like: what makes the directory one of a Hugging Face model"""
    dtype: torch.dtype = torch.float32
    """type the model computes in, and engines serve"""
    hf_beside: dict[str, bytes] = field(default_factory=dict)
    """`beside` for weights of that type"""
    write_weights: Callable[[Path, dict[str, Tensor], torch.dtype], None] | None = None
    """`Policy.write_weights`, where more than `write_whole` does makes the model"""

    def write(self, directory: Path) -> dict[str, FileEntry]:
        """Write every file but the index, flush each. A file of an earlier attempt is replaced. Raises OSError."""
        held = {name: tensors for name, tensors in self.tensors.items() if tensors}
        files = {name: write_tensors(directory / name, tensors, durable=True) for name, tensors in held.items()}
        small = self.beside | {SCALARS: msgspec.json.encode(self.scalars)}
        return files | {name: write_bytes(directory / name, data, durable=True) for name, data in small.items()}

    def write_hf(self, directory: Path) -> None:
        """The model alone, in the type it computes in, as a Hugging Face directory with tokenizer and chat template; see
        `export_at`. Raises OSError."""
        with export_at(directory) as part:
            part.mkdir(parents=True)
            for name, data in self.hf_beside.items():
                write_bytes(part / name, data, durable=True)
            (self.write_weights or write_whole)(part, next(filter(None, map(self.tensors.get, (MODEL, ADAPTER))), {}), self.dtype)


def write_whole(directory: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """A checkpoint's weights as Hugging Face has them. Raises OSError."""
    whole = as_files((name, t.to(dtype)) for name, t in tensors.items())
    write_tensors(directory / MODEL, dict(whole), durable=True)


class StateFiles:
    """`Saving` of a library whose rank 0 has it all, whole; `state` is None elsewhere."""

    meets = False

    def __init__(self, state: TrainingState | None, directory: Path) -> None:
        self.state = state
        self._directory = directory

    def write(self) -> dict[str, FileEntry]:
        return self.state.write(self._directory) if self.state else {}

    def finish(self) -> dict[str, FileEntry]:
        return {}

    def write_hf(self, directory: Path) -> None:
        assert self.state is not None
        self.state.write_hf(directory)


Shapes = Mapping[str, tuple[int, ...]]


def read_state(
    directory: Path,
    *,
    model_type: str,
    shapes: Shapes,
    optimizer: str,
    needs_optim: bool,
    expected: Callable[[Scalars], dict[str, Shapes]],
) -> TrainingState:
    """What `TrainingState.write` wrote, every byte checked, for a model of the given shapes.

    `expected`: tensors that a run takes up, by file, with their shapes. Raises CheckpointRefused, in one line, for a missing, cut
    or damaged file, another model or another optimizer.
    """
    index, start = read_index(directory), f"checkpoint {directory} refused:"
    if of_megatron(index):
        raise CheckpointOfAnother(
            f"{start} the Megatron backend wrote it (torch_dist). Nothing was changed. Set --train-backend megatron, or begin with "
            "the directory that miles-async convert megatron-to-hf makes of it."
        )
    if index.model_type != model_type or index.fingerprint != shape_fingerprint(shapes):
        n = sum(map(math.prod, shapes.values()))
        raise CheckpointOfAnother(
            f"{start} it holds a {index.model_type} of {index.n_params} parameters, this run trains a {model_type} of {n}, or "
            "their layers differ. Nothing was changed. Use the hf_checkpoint it was made with."
        )
    try:
        scalars = msgspec.json.decode((directory / SCALARS).read_bytes(), type=Scalars)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointRefused(f"{start} {SCALARS} is damaged ({error}).") from error
    if scalars.optimizer != optimizer:
        raise CheckpointOfAnother(
            f"{start} its optimizer is {scalars.optimizer}, this run's is {optimizer}. Nothing was changed. Set "
            f"optimizer={scalars.optimizer}."
        )
    if scalars.no_optim and needs_optim:
        raise no_optimizer(directory)
    tensors: dict[str, dict[str, Tensor]] = {}
    for file, known in expected(scalars).items():
        if known and file not in index.files and (remedy := REMEDIES.get(file)):
            raise CheckpointRefused(f"{start} it has no {file}. Nothing was changed. {remedy} as it was.")
        held = tensors[file] = read_tensors(directory, file) if known and file in index.files else {}
        for name in sorted(held.keys() ^ known.keys()):
            raise CheckpointRefused(f"{start} its {NAMED[file]} and this run's differ in {name}.")
        for name, t in held.items():
            if tuple(t.shape) != known[name]:
                has = f"has shape {list(t.shape)}, the model has {list(known[name])}"
                raise CheckpointRefused(f"{start} {NAMED[file]} {name} {has}.")
    return TrainingState(tensors, scalars)


def no_optimizer(directory: Path) -> CheckpointRefused:
    """A checkpoint without optimizer state where one is wanted."""
    return CheckpointOfAnother(
        f"checkpoint {directory} refused: it was written without the optimizer's state (--no-save-optim). Nothing was changed. Add "
        "--no-load-optim to go on with a new optimizer."
    )
