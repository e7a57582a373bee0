"""The training libraries by name, and none: `--debug-rollout-only` runs everything else at full speed, with the weights it started
from."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from actors.trainer.backend import BackendConfig, Checkpoint, StepBatch, StepResult, TrainBackend
from bus.errors import CheckpointRefused

if TYPE_CHECKING:
    from actors.trainer.transports.flat import NamedTensors


class NullBackend:
    """Takes batches and learns nothing."""

    unchanged = ""

    def setup(self, config: BackendConfig) -> None:
        self.unchanged = config.hf_checkpoint

    def train_step(self, batch: StepBatch) -> StepResult:
        """Count tokens as if they were trained."""
        spans = [tuple(n for _, n in sample.train.spans or ()) for sample in batch.samples]
        return StepResult(metrics={}, packing=(), trained_spans=spans)

    def refuses(self, batch: StepBatch) -> str:
        return ""

    def export(self, limit_bytes: int) -> Generator[NamedTensors]:
        yield from ()

    def beside(self) -> dict[str, bytes]:
        return {}

    def save(self, directory: Path) -> Checkpoint:
        raise CheckpointRefused("--debug-rollout-only trains nothing, so there is nothing to save")

    def load(self, directory: Path, drops: tuple[str, ...] = ()) -> None:
        raise CheckpointRefused("--debug-rollout-only trains nothing, so there is nothing to load")

    def sleep(self) -> None:
        return

    def wake(self) -> None:
        return

    def weights_hash(self) -> str:
        return ""

    def close(self) -> None:
        return


def open_backend(name: str) -> TrainBackend:
    """`none`, or a training library as `core_of` finds it, imported only when asked for. Refused when there is no such."""
    if name == "none":
        return NullBackend()
    from actors.trainer.training.ranked import RankedBackend

    return RankedBackend(name)
