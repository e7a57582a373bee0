"""What the trainer asks of a library: `Verbs` by a training step, `Core` by everything else. Every rank enters each, in the same
order, with the same batch; what is for rank 0 alone says so.

Always true: between two verbs every rank holds the same sums; only `apply` and `load` move weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from actors.trainer.backend import BackendConfig, BatchSample
from actors.trainer.batch.batching import CostModel
from actors.trainer.objective import ObjectiveConfig
from actors.trainer.training.files import FileEntry, Identity
from actors.trainer.training.routes import Routes


class Packed(Protocol):
    """A rollout batch, packed: the library's own layout."""

    total: np.ndarray
    """int64 [S]: tokens of each sample, prompt and response"""
    response: np.ndarray
    """int64 [S]: response tokens of each sample"""
    first_response: np.ndarray
    """int64 [S]: place of each sample's first response token among the batch's"""

    routes: Routes | None
    """experts of the tokens, where routers are told; None: they are not"""

    @property
    def response_tokens(self) -> int: ...

    def micro_batch(self, positions: Sequence[int], device: torch.device) -> Any:
        """The given samples, in the given order; its `response_slots`, int64 [R], are the places of its response tokens among the
        batch's."""
        ...


Work = list[tuple[tuple[int, ...], Any]]
"""This rank's micro-batches of one step, with the sample positions in them."""
PolicyLoss = Callable[[tuple[int, ...], Tensor, Tensor], Tensor]
"""(sample positions, log-probs [R], entropies [R]) -> loss []"""
ValueLoss = Callable[[tuple[int, ...], Tensor], Tensor]
"""(sample positions, values [R]) -> loss []"""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the live knobs and the schedule give a batch."""

    lr: float
    critic_lr: float
    clip: float
    policy_learns: bool


class Watch(Protocol):
    """Seconds by phase."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def read(self) -> tuple[float, dict[str, float]]: ...


class Verbs(Protocol):
    """A library with its models loaded, as the step sees it. `rank` of `ranks` data-parallel ones; gradients are averaged over
    `average_over`, which the loss undoes."""

    config: BackendConfig
    device: torch.device
    cost: CostModel

    @property
    def rank(self) -> int: ...

    @property
    def n_ranks(self) -> int: ...

    @property
    def cp_size(self) -> int:
        """Ranks that share each sample; a micro-batch may have as many times the tokens."""
        ...

    @property
    def mb_group(self) -> int:
        """Micro-batches of a rank come in multiples of it."""
        ...

    @property
    def average_over(self) -> float: ...

    @property
    def equal_passes(self) -> bool:
        """Equal weights give equal log-probs to the last bit, with and without gradients."""
        ...

    def objective_for(self, knobs: Mapping[str, Any]) -> ObjectiveConfig:
        """The objective with a step's live knobs; ObjectiveConfigError when they break a rule."""
        ...

    def rates(self, step: int, knobs: Mapping[str, Any]) -> Rates: ...

    def watch(self) -> Watch:
        """A new one, running."""
        ...

    def pack(self, samples: Sequence[BatchSample]) -> Packed: ...

    def models(self, cfg: ObjectiveConfig) -> tuple[str, ...]:
        """Fields of a sample that models here compute and the objective needs, each a name for `score`."""
        ...

    def score(self, which: str, packed: Packed, work: Sequence[Work]) -> Tensor:
        """One number of a model per response token of the batch, float32 [N] on the CPU, equal on every rank. Forward only."""
        ...

    def former_steps(self) -> tuple[int, ...]:
        """Steps whose weights are kept, oldest first."""
        ...

    def former_weights(self, step: int) -> AbstractContextManager[None]:
        """The policy computes with the weights of that step while the body runs."""
        ...

    def keep_weights(self, step: int, *, depth: int) -> None:
        """Keep the present weights, which hold `step` updates, and forget what no token can come from any more: `depth` is the
        bound in steps."""
        ...

    def forward_backward(
        self, work: Work, policy: PolicyLoss, value: ValueLoss, *, learns: bool, entropy_gradient: bool, watch: Watch
    ) -> None:
        """Gradients of all micro-batches, added up; the library calls the losses where the numbers are. Without `learns` only the
        critic gets any."""
        ...

    def apply(self, rates: Rates, *, update: bool) -> tuple[dict[str, float], bool]:
        """One update of all that learns -> (gradient norms before clipping, by metric; whether all are finite). Weights change only
        with `update` and finite norms."""
        ...

    def first_fault(self, fault: str) -> str:
        """What the first rank with a fault says of it, the same on every rank; empty where none has one."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Maximum of a CPU tensor over all ranks."""
        ...

    def refresh_reference(self) -> None:
        """The reference becomes the present policy."""
        ...


class Saving(Protocol):
    """A rank's part of one checkpoint, copied to the host: training goes on while it is written."""

    meets: bool
    """whether `finish` needs all ranks, in the training's thread; the same on each"""

    def write(self) -> dict[str, FileEntry]:
        """Write and fsync this rank's files: name -> size and checksum. In a thread beside the training, so nothing that the
        training's ranks meet in. Raises OSError."""
        ...

    def finish(self) -> dict[str, FileEntry]:
        """When every rank has written; on all of them if it `meets`, else on rank 0. The files that it wrote."""
        ...

    def write_hf(self, directory: Path) -> None:
        """Rank 0, in a thread, after `write`: the model as a Hugging Face directory with tokenizer, all at once. Raises OSError,
        FileExistsError for a directory that is no earlier export."""
        ...


class Core(Verbs, Protocol):
    """One rank's share of a training: what `core_of` (training/ranked.py) makes, of (config, connected ranks)."""

    updates: int
    """optimizer steps that this process made"""

    @property
    def asleep(self) -> bool:
        """Whether training state is off the device."""
        ...

    @property
    def less_memory(self) -> tuple[str, ...]:
        """What would make a step fit that does not, each a change of settings."""
        ...

    def resident_bytes(self) -> int:
        """Bytes on this rank's device between steps."""
        ...

    @property
    def exporters(self) -> tuple[int, ...]:
        """Ranks that hold what `export` yields, in order, 0 first: one for each pipeline stage. While one yields, the others wait
        with a bucket in hand: what yields gathers with no other exporter."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as engines load them, tensor by tensor: Hugging Face names, tied ones once, in the type that is served. Ranks
        that are no exporters yield what they like or nothing, and take part in what gathers. A tensor may be the weight itself, and
        is let go of when its bucket is used up."""
        ...

    def beside(self) -> dict[str, bytes]:
        """Small files of a published version, config.json first of all. Rank 0."""
        ...

    def save(self, directory: Path) -> Saving:
        """Copy all training state of this rank. The directory exists and is empty; hosts share it if more than rank 0 write."""
        ...

    def identity(self) -> Identity:
        """Which model a checkpoint holds. Rank 0."""
        ...

    def read(self, directory: Path, drops: tuple[str, ...] = ()) -> Any:
        """Rank 0 alone, before anything changes: what `load` needs of a checkpoint, found fit. Raises CheckpointRefused."""
        ...

    def load(self, directory: Path, read: Any, drops: tuple[str, ...] = ()) -> None:
        """Take over a checkpoint, whatever number of ranks wrote it, but for what `drops` names (optim, rng). `read`: what rank 0
        has read, None on the others."""
        ...

    def sleep(self) -> None:
        """Training state off the device."""
        ...

    def wake(self) -> None:
        """Everything back, to the last bit. Raises NoRoom."""
        ...

    def weights_hash(self) -> str:
        """XXH3-128 over the float32 weights, names, types and shapes; empty on other ranks than 0."""
        ...

    def close(self) -> None:
        """Let go of what the ranks do not own."""
        ...
