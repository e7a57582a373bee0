"""The training libraries by name, and none."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from actors.trainer.backend import BackendConfig, Checkpoint, StepBatch, StepResult, TrainBackend
from bus.errors import CheckpointRefused

if TYPE_CHECKING:  # it loads torch
    from actors.trainer.transports.flat import NamedTensors

UNTRAINED = "--debug-rollout-only trains nothing, so there is nothing to"


class NoTraining(TrainBackend):
    """--debug-rollout-only: takes batches and learns nothing; engines keep the weights they booted from."""

    def setup(self, config: BackendConfig) -> None:
        self.unchanged = config.hf_checkpoint

    def train_step(self, batch: StepBatch) -> StepResult:
        """Tokens are counted as if they were trained."""
        spans = [tuple(n for _, n in sample.train.spans or ()) for sample in batch.samples]
        return StepResult(metrics={}, packing=(), trained_spans=spans)

    def refuses(self, batch: StepBatch) -> str:
        return ""

    def export(self, limit_bytes: int) -> Generator[NamedTensors]:
        yield from ()

    def beside(self) -> dict[str, bytes]:
        return {}

    def save(self, directory: Path) -> Checkpoint:
        raise CheckpointRefused(f"{UNTRAINED} save")

    def load(self, directory: Path, drops: tuple[str, ...] = ()) -> None:
        raise CheckpointRefused(f"{UNTRAINED} load")

    def sleep(self) -> None:
        """There is nothing to move."""

    def wake(self) -> None:
        """Nor to bring back."""

    def weights_hash(self) -> str:
        return ""

    def close(self) -> None:
        """It holds nothing."""


def open_backend(name: str) -> TrainBackend:
    """`none`, or a training library as `core_of` finds it, imported only when asked for. Refused when there is no such."""
    if name == "none":
        return NoTraining()
    from actors.trainer.training.ranked import RankedBackend

    return RankedBackend(name)
