"""Forward and backward over micro-batches, and the update: the verbs of a step that move numbers (`training.verbs`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from actors.runtime.vision import Vision
from actors.trainer.backend import BatchSample
from actors.trainer.objective import ObjectiveConfig
from actors.trainer.torch_backend.critic import CriticTraining
from actors.trainer.torch_backend.experts import Replay
from actors.trainer.torch_backend.layout import MicroBatch, PackedBatch
from actors.trainer.torch_backend.optim import Optimizer, Weights
from actors.trainer.torch_backend.policy import Policy
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.torch_backend.sight import Gallery
from actors.trainer.training.clockwork import Stopwatch
from actors.trainer.training.routes import Routes
from actors.trainer.training.verbs import Core, Packed, PolicyLoss, Rates, ValueLoss, Work


class Passes(Core):
    """The half of the torch `Core` that computes; the other half loads and stores what is named here."""

    policy: Policy
    reference: nn.Module | None
    teacher: Policy | None
    critic: CriticTraining | None
    weights: Weights
    optimizer: Optimizer
    shards: TorchShards
    compiles: bool  # layers run as torch compiled them
    vision: Vision | None
    """of a model that reads pictures"""
    replay: Replay | None
    """of the policy's routers, where they are told; None: they choose"""

    @property
    def equal_passes(self) -> bool:
        return not self.compiles

    @property
    def average_over(self) -> float:
        return float(self.ranks.size)  # FSDP averages gradients over ranks

    def pack(self, samples: Sequence[BatchSample]) -> PackedBatch:
        replay = self.replay
        routes = Routes(samples, replay.shape, records=self.config.use_routing_replay) if replay else None
        return PackedBatch(samples, routes, gallery=Gallery(samples, self.vision) if self.vision else None)

    # -- forward ------------------------------------------------------------------------------------------------

    def models(self, cfg: ObjectiveConfig) -> tuple[str, ...]:
        here = {
            "old_logp": cfg.needs_old_logp,
            "ref_logp": cfg.needs_ref_logp and self.reference is not None,
            "teacher_logp": self.teacher is not None,
            "values": self.critic is not None,
        }
        return tuple(name for name, wanted in here.items() if wanted)

    @torch.no_grad()
    def score(self, which: str, packed: Packed, work: Sequence[Work]) -> Tensor:
        model = self._model(which)
        micros = [micro for mine in work for _, micro in mine]
        found = []
        with self.shards.gathered(model):
            for micro in micros:  # fetched below: the device gets all its work first
                with self._routed(micro, records=True) if which == "old_logp" else nullcontext():
                    out = model(micro)
                    found.append((out if which == "values" else out[0]).float())
        values = torch.zeros(packed.response_tokens)
        for micro, logp in zip(micros, found, strict=True):
            values[torch.from_numpy(micro.response_slots)] = logp.cpu()
        return self.ranks.total(values)

    def _routed(self, micro: MicroBatch, *, records: bool = False) -> AbstractContextManager[None]:
        """The policy's routers choose what is known of this micro-batch, or what they choose is kept."""
        if self.replay is None or micro.routing is None:
            return nullcontext()
        if micro.routing.table is None and records:
            return self.replay.recording(micro.routing, micro.input_ids.shape[1])
        return self.replay.playing(micro.routing)

    def _model(self, which: str) -> nn.Module:
        critic = self.critic.model if self.critic else None
        others = {"ref_logp": self.reference, "teacher_logp": self.teacher, "values": critic}
        model = self.policy if which == "old_logp" else others[which]
        assert model is not None
        return model

    def own_weights(self) -> Mapping[str, Tensor]:
        return self.policy.named_weights()

    # -- backward and update ------------------------------------------------------------------------------------

    def forward_backward(
        self, work: Work, policy: PolicyLoss, value: ValueLoss, *, learns: bool, entropy_gradient: bool, watch: Stopwatch
    ) -> None:
        for weights, _ in self._learners(learns).values():
            weights.clear()
        with self.shards.gathered(*self._trained()):
            for k, (ids, micro) in enumerate(work):
                self._sync_gradients(k == len(work) - 1)
                with self._routed(micro):
                    with watch.phase("forward"), torch.set_grad_enabled(learns):
                        loss = policy(ids, *self.policy(micro, entropy_gradient))
                    if learns:
                        with watch.phase("backward"):
                            loss.backward()
                if self.critic is not None:
                    with watch.phase("critic"):
                        value(ids, self.critic.model(micro)).backward()

    def _trained(self) -> tuple[nn.Module, ...]:
        return (self.policy,) if self.critic is None else (self.policy, self.critic.model)

    def _learners(self, policy_learns: bool) -> dict[str, tuple[Weights, Optimizer]]:
        """By the metric of their gradient norm."""
        found = {"grad_norm": (self.weights, self.optimizer)} if policy_learns else {}
        if self.critic is not None:
            found["critic_grad_norm"] = (self.critic.weights, self.critic.optimizer)
        return found

    def _sync_gradients(self, now: bool) -> None:
        """Whether the next backward ends in a sum over ranks. Where gradients are held whole, those of earlier micro-batches add up
        locally."""
        if self.shards.gathers:
            sharded: Any
            for sharded in self._trained():
                sharded.set_requires_gradient_sync(now)
                sharded.set_is_last_backward(now)

    def apply(self, rates: Rates, *, update: bool) -> tuple[dict[str, float], bool]:
        learners = self._learners(rates.policy_learns)
        norms = {name: weights.clip(rates.clip) for name, (weights, _) in learners.items()}
        finite = all(map(math.isfinite, norms.values()))
        if finite and update:
            for name, (weights, optimizer) in learners.items():
                optimizer.step(rates.critic_lr if name == "critic_grad_norm" else rates.lr)
                weights.publish()
            self.updates += 1
        return norms, finite

    @torch.no_grad()
    def refresh_reference(self) -> None:
        if isinstance(self.reference, Policy):
            targets, sources = self.reference.named_weights(), self.policy.named_weights()
            for name, p in targets.items():
                p.copy_(sources[name])
