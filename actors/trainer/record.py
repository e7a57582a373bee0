"""A trained batch as a file: enough to train it again, bit for bit on a CPU. msgpack only, never pickle.

One file per step holds the step's manifest (StepDone), the groups in training order, and the values the step took from
live knobs. `replay.py` trains recorded batches again; `debug_train_only` feeds them to a trainer. Whoever only reads them loads no
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from actors.trainer.checkpoint import write_durably
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
