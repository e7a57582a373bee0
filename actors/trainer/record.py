"""A trained batch as a file: enough to train it again, bit for bit on a CPU. msgpack only, never pickle.

One file per step holds the step's manifest (StepDone), the groups in training order, and the values the step took from
live knobs. `replay` restores a checkpoint and trains recorded batches again; `debug_train_only` feeds them to a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.trainer.backend import BackendConfig, StepBatch, TrainBackend
from actors.trainer.checkpoint import iter_dir, latest, steps_in, write_durably
from actors.trainer.convert import to_samples
from bus.errors import UNREADABLE, CheckpointRefused
from bus.messages.groups import GroupKept
from bus.messages.policy import StepDone


class RecordedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `knobs`: live values of the step, as handed to the backend."""

    schema: int = 1
    done: StepDone
    groups: tuple[GroupKept, ...]
    knobs: dict[str, Any]
    images: dict[str, bytes] = {}  # pictures of its prompts, by blob


class ReplayedStep(msgspec.Struct, frozen=True):
    """What a step gave when it was trained again, beside what it gave first. `equal`: weights, loss and gradient norm
    agree bit for bit."""

    step: int
    equal: bool
    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    weights_hash: tuple[str, str]


def named(pattern: str, rollout_id: int, rank: int = 0) -> Path:
    """File of one rollout batch, counted from 0, and rank; the pattern holds {rollout_id}, and {rank} where each has its own."""
    return Path(pattern.replace("{rollout_id}", str(rollout_id)).replace("{rank}", str(rank)))


def path_of(pattern: str, step: int) -> Path:
    """File of one step, counted from 1."""
    return named(pattern, step - 1)


def write_record(pattern: str, record: RecordedBatch) -> None:
    """Store one step."""
    write_durably(path_of(pattern, record.done.step), msgspec.msgpack.encode(record))


def read_record(path: Path) -> RecordedBatch:
    """One stored step; CheckpointRefused when the file is missing or damaged."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=RecordedBatch)
    except OSError as error:
        raise CheckpointRefused(
            f"recorded batch {path} not readable: {error.strerror}. Train with --save-debug-rollout-data to record."
        ) from error
    except UNREADABLE as error:
        raise CheckpointRefused(f"recorded batch {path} is damaged: {error}") from error


def batch_of(record: RecordedBatch) -> StepBatch:
    """The backend's view of a recorded step."""
    step = record.done.step - 1
    return StepBatch(
        samples=to_samples(record.groups, record.images), step=step, seed=record.done.seed, knobs=record.knobs
    )


def start_of(save: Path, first: int) -> int:
    """The newest checkpoint at or before the weights that step `first` started from; 0 = the initial weights."""
    newest = latest(save)
    usable = [s for s in steps_in(save) if s < first and (newest is None or s <= newest)]
    return max(usable, default=0)


def replay(
    open_backend: Callable[[], TrainBackend],
    config: BackendConfig,
    *,
    save: Path,
    pattern: str,
    first: int,
    last: int,
) -> Iterator[ReplayedStep]:
    """Train steps `first`..`last` (1-based, inclusive) again from the nearest checkpoint before them."""
    backend = open_backend()
    backend.setup(config)
    start = start_of(save, first)
    if start:
        backend.load(iter_dir(save, start))
    for step in range(start + 1, last + 1):
        record = read_record(path_of(pattern, step))
        result = backend.train_step(batch_of(record))
        if step < first:
            continue
        then, now = record.done.metrics, result.metrics
        hashes = (record.done.weights_hash, backend.weights_hash())
        losses = (then.get("train/loss", 0.0), now.get("train/loss", 0.0))
        norms = (then.get("train/grad_norm", 0.0), now.get("train/grad_norm", 0.0))
        yield ReplayedStep(
            step=step,
            equal=hashes[0] == hashes[1] and losses[0] == losses[1] and norms[0] == norms[1],
            loss=losses,
            grad_norm=norms,
            weights_hash=hashes,
        )
