"""The training libraries by name, and none: `--debug-rollout-only` runs everything else at full speed, with the weights it started
from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from actors.trainer.backend import BackendConfig, Checkpoint, StepBatch, StepResult, TrainBackend, WeightCopy
from bus.errors import CheckpointRefused
from bus.messages.policy import WeightManifest

if TYPE_CHECKING:
    from torch import Tensor


class SameWeights:
    """The checkpoint directory itself; nothing is written."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.tensors: dict[str, Tensor] = {}
        self.beside: dict[str, bytes] = {}

    def write(self, directory: Path) -> WeightManifest:
        """A manifest that names the directory the engines booted from."""
        return WeightManifest(path=self._directory)


class NullBackend:
    """Takes batches and learns nothing."""

    def setup(self, config: BackendConfig) -> None:
        self._directory = config.hf_checkpoint

    def train_step(self, batch: StepBatch) -> StepResult:
        """Count tokens as if they were trained."""
        spans = [tuple(n for _, n in sample.train.spans or ()) for sample in batch.samples]
        return StepResult(metrics={}, packing=(), trained_spans=spans)

    def refuses(self, batch: StepBatch) -> str:
        return ""

    def copy_weights(self, *, live: bool = False) -> WeightCopy:
        return SameWeights(self._directory)

    def save(self, directory: Path) -> Checkpoint:
        raise CheckpointRefused("--debug-rollout-only trains nothing, so there is nothing to save")

    def load(self, directory: Path) -> None:
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
