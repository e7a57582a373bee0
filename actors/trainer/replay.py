"""Recorded batches trained again: from a checkpoint, step by step, to compare bit for bit.

Reads the files of `record.py` and a checkpoint; writes nothing. The backend is the caller's, and nobody else's meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from actors.trainer.backend import BackendConfig, StepBatch, TrainBackend
from actors.trainer.checkpoint import iter_dir, latest, steps_in
from actors.trainer.convert import to_samples
from actors.trainer.record import RecordedBatch, path_of, read_record


class ReplayedStep(msgspec.Struct, frozen=True):
    """What a step gave when it was trained again, beside what it gave first. `equal`: weights, loss and gradient norm
    agree bit for bit."""

    step: int
    equal: bool
    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    weights_hash: tuple[str, str]


def batch_of(record: RecordedBatch) -> StepBatch:
    """The backend's view of a recorded step."""
    step = record.done.step - 1
    return StepBatch(samples=to_samples(record.groups, record.images), step=step, seed=record.done.seed, knobs=record.knobs)


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
