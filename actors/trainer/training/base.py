"""What the `Core` of every library does alike: live settings and rates of a step, sums over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from actors.trainer.backend import BackendConfig
from actors.trainer.objective import ObjectiveConfig, learning_rate
from actors.trainer.training.clockwork import Stopwatch
from actors.trainer.training.offload import Offload, storages
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.verbs import Rates


class CoreBase(ABC):
    """To be inherited; the library's part fills in what is named here."""

    config: BackendConfig
    objective: ObjectiveConfig
    """as `settle_objective` gives it"""
    ranks: Ranks
    device: torch.device
    offload: Offload
    updates = 0

    @property
    def cp_size(self) -> int:
        return 1

    @property
    def equal_passes(self) -> bool:
        return True

    @property
    def mb_group(self) -> int:
        return 1

    def watch(self) -> Stopwatch:
        return Stopwatch(self.device)

    def first_fault(self, fault: str) -> str:
        return self.ranks.first_said(fault)

    def total(self, x: Tensor) -> Tensor:
        return self.ranks.total(x)

    def largest(self, x: Tensor) -> Tensor:
        return self.ranks.largest(x)

    def objective_for(self, knobs: Mapping[str, Any]) -> ObjectiveConfig:
        """The objective with this step's live settings, which have the names of its fields."""
        changes = {name: knobs[name] for name in ObjectiveConfig.__struct_fields__ if name in knobs}
        if "max_weight_staleness" in knobs:  # in steps
            changes["max_staleness"] = knobs["max_weight_staleness"]
        return msgspec.structs.replace(self.objective, **changes)

    def rate(self, step: int, knobs: Mapping[str, Any]) -> float:
        """Learning rate of rollout batch `step`: the schedule, with the live knob as its peak."""
        c = self.config
        peak = float(knobs.get("lr", c.lr))
        return learning_rate(
            step,
            lr=peak,
            style=c.lr_decay_style,
            total=c.num_rollout,
            warmup=c.lr_warmup_iters,
            min_lr=min(c.min_lr, peak),
        )

    def rates(self, step: int, knobs: Mapping[str, Any]) -> Rates:
        """Of rollout batch `step`; the first ones may be the critic's alone."""
        critic = self.critic_rate(step)
        return Rates(
            lr=self.rate(step, knobs),
            critic_lr=critic or 0.0,
            clip=float(knobs.get("clip_grad", self.config.clip_grad)),
            policy_learns=critic is None or step >= self.config.num_critic_only_steps,
        )

    def critic_rate(self, step: int) -> float | None:
        """Learning rate of the critic; None without one."""
        return None

    # -- the device, and others who want it ---------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether training state is off the device."""
        return self.offload.away

    def sleep(self) -> None:
        """Weights of all models, masters and optimizer state off the device; gradients are none between steps."""
        self.offload.store(self._resident())

    def wake(self) -> None:
        """Everything back, to the last bit."""
        self.offload.fetch()

    def resident_bytes(self) -> int:
        """Bytes on the device between steps, of this rank."""
        return sum(storage.nbytes() for storage in storages(self._resident()))

    @abstractmethod
    def _resident(self) -> Iterable[Tensor]:
        """What lies on the device between steps; copies on the host stay."""

    def close(self) -> None:
        return
