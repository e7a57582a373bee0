"""What the trainer asks of a library: a `Core` on each rank. Every rank enters each of its verbs, in the same order, with the same
batch; what is for rank 0 alone says so.

Always true: between two verbs every rank holds the same sums; only `apply` and `load` move weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.trainer.backend import BackendConfig, BatchSample
from actors.trainer.batch.batching import CostModel
from actors.trainer.objective import ObjectiveConfig, learning_rate
from actors.trainer.training.clockwork import Stopwatch
from actors.trainer.training.files import FileEntry, ModelIdentity
from actors.trainer.training.offload import Offload, storages
from actors.trainer.training.old_actors import OldActors
from actors.trainer.training.ranks import Ranks
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


class Core(ABC):
    """One rank's share of a training, its models loaded: what `core_of` (training/ranked.py) makes of (config, connected ranks). It
    is `rank` of `n_ranks` data-parallel ones. What libraries do alike stands here.

    Example of a library of your own (`--train-backend mine.lib.Mine`):
        class Mine(Core):
            def __init__(self, config: BackendConfig, ranks: Ranks) -> None: ...   # load the models; Refused where it cannot

    Example of a step, as training/step.py makes one (`work`: micro-batches of this rank):
        packed = core.pack(samples)
        for which in core.models(cfg):
            scores[which] = core.score(which, packed, work)     # float32 [N]
        core.forward_backward(work[0], policy, value, learns=True, entropy_gradient=False, watch=watch)
        norms, finite = core.apply(core.rates(step, knobs), update=True)
    """

    config: BackendConfig
    objective: ObjectiveConfig
    """as `settle_objective` gives it"""
    ranks: Ranks
    device: torch.device
    cost: CostModel
    offload: Offload
    old_actors: OldActors
    updates = 0
    """optimizer steps that this process made"""

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def n_ranks(self) -> int:
        return self.ranks.size

    @property
    def cp_size(self) -> int:
        """Ranks that share each sample; a micro-batch may have as many times the tokens."""
        return 1

    @property
    def mb_group(self) -> int:
        """Micro-batches of a rank come in multiples of it."""
        return 1

    @property
    @abstractmethod
    def average_over(self) -> float:
        """What gradients are averaged over, which the loss undoes."""

    @property
    def equal_passes(self) -> bool:
        """Equal weights give equal log-probs to the last bit, with and without gradients."""
        return True

    def total(self, x: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks."""
        return self.ranks.total(x)

    def largest(self, x: Tensor) -> Tensor:
        """Maximum of a CPU tensor over all ranks."""
        return self.ranks.largest(x)

    # -- live settings ------------------------------------------------------------------------------------------

    def objective_for(self, knobs: Mapping[str, Any]) -> ObjectiveConfig:
        """The objective with this step's live settings, which have the names of its fields."""
        changes = {name: knobs[name] for name in ObjectiveConfig.__struct_fields__ if name in knobs}
        if "max_weight_staleness" in knobs:  # in steps
            changes["max_staleness"] = knobs["max_weight_staleness"]
        return msgspec.structs.replace(self.objective, **changes)

    def rates(self, step: int, knobs: Mapping[str, Any]) -> Rates:
        """Of rollout batch `step`; the first ones may be the critic's alone."""
        c, critic = self.config, self.objective.estimator.critic
        return Rates(
            lr=_scheduled(c, step, float(knobs.get("lr", c.lr))),
            critic_lr=_scheduled(c, step, c.critic_lr) if critic else 0.0,
            clip=float(knobs.get("clip_grad", c.clip_grad)),
            policy_learns=not critic or step >= c.num_critic_only_steps,
        )

    # -- a step -------------------------------------------------------------------------------------------------

    @abstractmethod
    def pack(self, samples: Sequence[BatchSample]) -> Packed:
        """A rollout batch in the library's own layout, on every rank alike; nothing is computed yet."""

    @abstractmethod
    def models(self, cfg: ObjectiveConfig) -> tuple[str, ...]:
        """Fields of a sample that models here compute and the objective needs, each a name for `score`."""

    @abstractmethod
    def score(self, which: str, packed: Packed, work: Sequence[Work]) -> Tensor:
        """One number of a model per response token of the batch, float32 [N] on the CPU, equal on every rank. Forward only."""

    @abstractmethod
    def own_weights(self) -> Mapping[str, Tensor]:
        """The policy's, of this rank, by name: those that `old_actors` changes for a while."""

    @abstractmethod
    def forward_backward(
        self, work: Work, policy: PolicyLoss, value: ValueLoss, *, learns: bool, entropy_gradient: bool, watch: Stopwatch
    ) -> None:
        """Gradients of all micro-batches, added up; the library calls the losses where the numbers are. Without `learns` only the
        critic gets any."""

    @abstractmethod
    def apply(self, rates: Rates, *, update: bool) -> tuple[dict[str, float], bool]:
        """One update of all that learns -> (gradient norms before clipping, by metric; whether all are finite). Weights change only
        with `update` and finite norms."""

    @abstractmethod
    def refresh_reference(self) -> None:
        """The reference becomes the present policy."""

    # -- out and back -------------------------------------------------------------------------------------------

    @property
    def exporters(self) -> tuple[int, ...]:
        """Ranks that hold what `export` yields, in order, 0 first: one for each pipeline stage. While one yields, the others wait
        with a bucket in hand: what yields gathers with no other exporter."""
        return (0,)

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as engines load them, tensor by tensor: Hugging Face names, tied ones once, in the type that is served. Ranks
        that are no exporters yield what they like or nothing, and take part in what gathers. A tensor may be the weight itself, and
        is let go of when its bucket is used up."""

    @abstractmethod
    def beside(self) -> dict[str, bytes]:
        """Small files of a published version, config.json first of all. Rank 0."""

    @abstractmethod
    def save(self, directory: Path) -> Saving:
        """Copy all training state of this rank. The directory exists and is empty; hosts share it if more than rank 0 write."""

    @abstractmethod
    def identity(self) -> ModelIdentity:
        """Which model a checkpoint holds. Rank 0."""

    @abstractmethod
    def read(self, directory: Path, drops: tuple[str, ...] = ()) -> Any:
        """Rank 0 alone, before anything changes: what `load` needs of a checkpoint, found fit. Raises CheckpointRefused."""

    @abstractmethod
    def load(self, directory: Path, read: Any, drops: tuple[str, ...] = ()) -> None:
        """Take over a checkpoint, whatever number of ranks wrote it, but for what `drops` names (optim, rng). `read`: what rank 0
        has read, None on the others. If it raises, nothing has changed."""

    @abstractmethod
    def weights_hash(self) -> str:
        """XXH3-128 over the float32 weights, names, types and shapes; empty on other ranks than 0."""

    def close(self) -> None:
        """Let go of what the ranks do not own."""
        return

    # -- the device, and others who want it ---------------------------------------------------------------------

    @property
    @abstractmethod
    def less_memory(self) -> tuple[str, ...]:
        """What would make a step fit that does not, each a change of settings."""

    @abstractmethod
    def resident(self) -> Iterable[Tensor]:
        """What lies on the device between steps; copies on the host stay."""

    def resident_bytes(self) -> int:
        """Bytes on this rank's device between steps."""
        return sum(storage.nbytes() for storage in storages(self.resident()))

    @property
    def asleep(self) -> bool:
        """Whether training state is off the device."""
        return self.offload.away

    def sleep(self) -> None:
        """Weights of all models, masters and optimizer state off the device; gradients are none between steps."""
        self.offload.store(self.resident())

    def wake(self) -> None:
        """Everything back, to the last bit. Raises NoRoom."""
        self.offload.fetch()


def _scheduled(c: BackendConfig, step: int, peak: float) -> float:
    """Learning rate of rollout batch `step` by the schedule, with this peak."""
    style, total, warmup = c.lr_decay_style, c.num_rollout, c.lr_warmup_iters
    return learning_rate(step, lr=peak, style=style, total=total, warmup=warmup, min_lr=min(c.min_lr, peak))
