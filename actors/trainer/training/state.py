"""A copy of training state in host memory, and the files it becomes: those of a library whose rank 0 has it all.

    model.safetensors (float32), config.json and tokenizer: a model directory for whoever wants one
    optimizer.safetensors, reference.safetensors (when it moves), old_actors.safetensors (with keep_old_actor),
    critic.safetensors and critic_optimizer.safetensors (with a critic), scalars.json

A copy shares no memory with the model: training goes on while it is written. Tensors are whole, so a checkpoint can be
loaded by any number of ranks.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from actors.trainer.training.export import unfused
from actors.trainer.training.files import (
    FileEntry,
    fsync_dir,
    read_index,
    read_tensors,
    shape_fingerprint,
    write_bytes,
    write_tensors,
)
from bus.errors import CheckpointRefused

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
OLD_ACTORS = "old_actors.safetensors"
SCALARS = "scalars.json"
COMPLETE = ".complete"


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

    model_type: str
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    reference: dict[str, Tensor]
    scalars: Scalars
    critic: dict[str, Tensor] = field(default_factory=dict)
    critic_optimizer: dict[str, Tensor] = field(default_factory=dict)
    old_actors: dict[str, Tensor] = field(default_factory=dict)
    """step/name -> weight"""
    beside: dict[str, bytes] = field(default_factory=dict)
    """config.json, tokenizer and the like: what makes the directory one of a Hugging Face model"""
    dtype: torch.dtype = torch.float32
    """type the model computes in, and engines serve"""
    hf_beside: dict[str, bytes] = field(default_factory=dict)
    """`beside` for weights of that type"""

    def write(self, directory: Path) -> dict[str, FileEntry]:
        """Write every file but the index, flush each. A file of an earlier attempt is replaced. Raises OSError."""
        files: dict[str, FileEntry] = {}
        for name, tensors in (
            (MODEL, self.weights),
            (OPTIMIZER, self.optimizer),
            (REFERENCE, self.reference),
            (CRITIC, self.critic),
            (CRITIC_OPTIMIZER, self.critic_optimizer),
            (OLD_ACTORS, self.old_actors),
        ):
            if tensors:
                files[name] = write_tensors(directory / name, tensors, durable=True)
        for name, data in self.beside.items():
            files[name] = write_bytes(directory / name, data, durable=True)
        files[SCALARS] = write_bytes(directory / SCALARS, msgspec.json.encode(self.scalars), durable=True)
        return files

    def write_hf(self, directory: Path) -> None:
        """The model alone, in the type it computes in, as a Hugging Face directory with tokenizer and chat template. It appears
        at once, `.complete` in it, and replaces an earlier export; FileExistsError for any other directory. Raises OSError."""
        if directory.exists() and not (directory / COMPLETE).is_file():
            raise FileExistsError(errno.EEXIST, "it exists and is no earlier export", str(directory))
        part = directory.with_name(f".{directory.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name, data in self.hf_beside.items():
            write_bytes(part / name, data, durable=True)
        served = {name: t.to(self.dtype) for fused, whole in self.weights.items() for name, t in unfused(fused, whole)}
        write_tensors(part / MODEL, served, durable=True)
        write_bytes(part / COMPLETE, b"", durable=True)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(part, directory)
        fsync_dir(directory.parent)


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


def read_state(
    directory: Path,
    *,
    model_type: str,
    shapes: Mapping[str, tuple[int, ...]],
    optimizer: str,
    optimizer_names: Set[str],
    moving_reference: bool,
    critic_shapes: Mapping[str, tuple[int, ...]],
    critic_optimizer_names: Set[str],
    needs_optim: bool = True,
) -> TrainingState:
    """What `TrainingState.write` wrote, every byte checked, for a model (and critic; empty: none) of the given shapes.

    `optimizer_names`: tensors the optimizer has after at least one step. Raises CheckpointRefused, in one line, for a
    missing, cut or damaged file, another model or another optimizer.
    """
    index = read_index(directory)
    if index.model_type != model_type or index.fingerprint != shape_fingerprint(shapes):
        n = sum(_numel(s) for s in shapes.values())
        raise CheckpointRefused(
            f"checkpoint {directory} refused: it holds a {index.model_type} of {index.n_params} parameters, this run trains "
            f"a {model_type} of {n}, or their layers differ. Nothing was changed. Use the hf_checkpoint it was made with."
        )
    wanted = {MODEL, SCALARS} | ({REFERENCE} if moving_reference else set()) | ({CRITIC} if critic_shapes else set())
    if lost := sorted(wanted - index.files.keys()):
        remedy = "advantage_estimator" if lost[0] == CRITIC else "ref_update_interval"
        raise CheckpointRefused(
            f"checkpoint {directory} refused: it has no {lost[0]}. Nothing was changed. Set {remedy} as it was."
        )
    try:
        scalars = msgspec.json.decode((directory / SCALARS).read_bytes(), type=Scalars)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointRefused(f"checkpoint {directory} refused: {SCALARS} is damaged ({error}).") from error
    if scalars.optimizer != optimizer:
        raise CheckpointRefused(
            f"checkpoint {directory} refused: its optimizer is {scalars.optimizer}, this run's is {optimizer}. Nothing was "
            f"changed. Set optimizer={scalars.optimizer}."
        )
    if scalars.no_optim and needs_optim:
        raise no_optimizer(directory)
    state = TrainingState(
        model_type=index.model_type,
        weights=read_tensors(directory, MODEL),
        optimizer=read_tensors(directory, OPTIMIZER) if OPTIMIZER in index.files else {},
        reference=read_tensors(directory, REFERENCE) if moving_reference else {},
        scalars=scalars,
        critic=read_tensors(directory, CRITIC) if critic_shapes else {},
        critic_optimizer=read_tensors(directory, CRITIC_OPTIMIZER)
        if critic_shapes and CRITIC_OPTIMIZER in index.files
        else {},
        old_actors=read_tensors(directory, OLD_ACTORS) if OLD_ACTORS in index.files else {},
    )
    expected = optimizer_names if scalars.optimizer_steps else frozenset()
    critic_expected = critic_optimizer_names if scalars.critic_steps else frozenset()
    for what, tensors, names, known in (
        ("weights", state.weights, shapes.keys(), shapes),
        ("optimizer state", state.optimizer, expected, shapes),
        ("reference", state.reference, shapes.keys() if moving_reference else frozenset(), shapes),
        ("critic", state.critic, critic_shapes.keys(), critic_shapes),
        ("old actors", state.old_actors, {f"{s}/{n}" for s in scalars.old_actors for n in shapes}, shapes),
        ("critic's optimizer state", state.critic_optimizer, critic_expected, critic_shapes),
    ):
        for name in sorted(tensors.keys() ^ names):
            raise CheckpointRefused(f"checkpoint {directory} refused: its {what} and this run's differ in {name}.")
        for name, t in tensors.items():
            shape = known[name.split("/", 1)[-1]]
            if tuple(t.shape) != shape:
                raise CheckpointRefused(
                    f"checkpoint {directory} refused: {what} {name} has shape {list(t.shape)}, the model has {list(shape)}."
                )
    return state


def no_optimizer(directory: Path) -> CheckpointRefused:
    """A checkpoint without optimizer state where one is wanted."""
    return CheckpointRefused(
        f"checkpoint {directory} refused: it was written without the optimizer's state (--no-save-optim). Nothing was changed. Add "
        "--no-load-optim to go on with a new optimizer."
    )


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n
