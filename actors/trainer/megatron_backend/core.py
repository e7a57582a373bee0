"""One rank's share of a Megatron training: the policy's chunks, its optimizer, and the weights of other models on the host.

There is one model on the device. Reference, teacher and former actors are copies of weights in host memory that the policy's
chunks wear while they score; always true: outside `wearing` the chunks hold the policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from actors.runtime.checksum import checksum
from actors.runtime.hooks import load_hook
from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig, BatchSample
from actors.trainer.hooks import install
from actors.trainer.megatron_backend import setup
from actors.trainer.megatron_backend.balance import Balance
from actors.trainer.megatron_backend.checkpoint import check_can_save, load_sharded, save_sharded
from actors.trainer.megatron_backend.host import on_device
from actors.trainer.megatron_backend.layout import layout_of
from actors.trainer.megatron_backend.optimizer import Update
from actors.trainer.megatron_backend.packing import StreamBatch
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.megatron_backend.passes import Schedule
from actors.trainer.megatron_backend.replay import RoutingReplay
from actors.trainer.megatron_backend.saving import Counters, Shards, check, holds_optimizer, identity_of
from actors.trainer.megatron_backend.weights import export_hf
from actors.trainer.objective import ObjectiveConfig
from actors.trainer.torch_backend.fp8 import quantized, scheme_of
from actors.trainer.torch_backend.model import export_files
from actors.trainer.training.clockwork import Stopwatch
from actors.trainer.training.export import gathered
from actors.trainer.training.files import ModelIdentity, hash_tensors
from actors.trainer.training.offload import Offload
from actors.trainer.training.old_actors import OldActors, copies
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.routes import Routes, RouteShape, mode_of
from actors.trainer.training.state import no_optimizer
from actors.trainer.training.step import settle_objective
from actors.trainer.training.verbs import Core, Packed, PolicyLoss, Rates, ValueLoss, Work

PREFIXES = {"ref_logp": "ref_", "teacher_logp": "teacher_"}
"""What Miles calls the log-probs of a model, before log_probs."""
HASHED_BYTES = 1 << 30  # of a bucket on its way to be hashed


class MegatronCore(Core):
    """Built once per process; `ranks` must be connected."""

    @classmethod
    def look(cls, config: BackendConfig, ranks: Ranks) -> None:
        """Refused, before anything is allocated and before ranks meet: a layout, a setting, a directory that cannot be trained."""
        setup.check(config, setup.own(config), ranks.size)

    def __init__(self, config: BackendConfig, ranks: Ranks) -> None:
        own = setup.own(config)
        self.config, self.own, self.ranks = config, own, ranks
        install(config.objective)
        self.objective = settle_objective(config)
        torch.set_num_threads(config.trainer_threads)
        with on_device():
            self.groups = Groups(layout_of(own, ranks.size))
        try:
            self._load_all()
        except BaseException:
            self.groups.close()  # or a later start in this process would find them taken
            raise

    def _load_all(self) -> None:
        config, own = self.config, self.own
        with on_device():
            self.model = setup.Model(config, own, self.groups)
            self.device, self.cost = self.model.device, self.model.cost
        self.old_actors = OldActors(on_host=True)
        self.others: dict[str, dict[str, Tensor]] = {}
        for which, directory in self._others():
            self._fill(directory)
            self.others[which] = copies(self.model.weights(), on_host=True)
        self._fill(config.hf_checkpoint)
        self.fp8 = scheme_of(self.model.source)
        self.offload = Offload(config.offload_train_target, config.offload_dir)
        with on_device():
            with setup.told_by_megatron():
                self.update = Update(self.model.optimizer_config, self.model.chunks)
            cap = self.model.architecture.logit_cap
            self.schedule = Schedule(self.model.chunks, self.groups, vocab=self.model.vocab, cap=cap)
        if mode_of(config):
            arch, parts = self.model.architecture, self.groups.tp if own.sequence_parallel and self.groups.tp.size() > 1 else None
            shape = RouteShape(arch.layers, int(arch.transformer["moe_router_topk"]), arch.experts)
            self.schedule.replay = RoutingReplay(self.model.bare, shape, parts, self.device)
        transformer = self.schedule.config
        if self.model.architecture.experts and (transformer.moe_aux_loss_coeff or transformer.moe_z_loss_coeff):
            with on_device():
                self.schedule.balance = Balance(self.model.bare, transformer, self.groups, self.device)
        with on_device():
            optimizer, reference = self._saved_optimizer(), self._moving_reference()
            self._agreed(lambda: check_can_save(self.model.bare, optimizer=optimizer, reference=reference))
        self._hooks = {name: load_hook(path) for name, path in setup.hooks_of(own).items()}
        self._place = 0, 0  # rollout batch, and optimizer step in it
        self._call_hook("init")

    def _fill(self, directory: str) -> None:
        """The chunks with a model's weights."""
        self._agreed(lambda: self.model.load(directory))

    def _agreed(self, check: Callable[[], None]) -> None:
        """What one rank finds wrong in its own part is refused by all: they would wait for it in what comes next."""
        fault = ""
        try:
            check()
        except Refused as error:
            fault = str(error)
        if said := self.ranks.first_said(fault):
            raise Refused(said)

    def _others(self) -> Iterator[tuple[str, str]]:
        if self.objective.needs_ref_logp:
            yield "ref_logp", self.config.ref_load or self.config.hf_checkpoint
        if self.objective.needs_student_logp and self.config.opd_teacher_load:
            yield "teacher_logp", self.config.opd_teacher_load

    # -- this rank among the others --------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.groups.dp.rank()

    @property
    def n_ranks(self) -> int:
        return self.groups.dp.size()

    @property
    def cp_size(self) -> int:
        return self.groups.cp.size()

    @property
    def mb_group(self) -> int:
        """Micro-batches of a rank come in multiples of it: interleaved stages take them in groups."""
        stages = self.groups.stages
        return (self.own.microbatch_group_size_per_vp_stage or stages) if len(self.model.chunks) > 1 else 1

    @property
    def average_over(self) -> float:
        return 1.0  # gradients are sums

    def total(self, x: Tensor) -> Tensor:
        return self.groups.over_data(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        return self.groups.over_data(x, dist.ReduceOp.MAX)

    def pack(self, samples: Sequence[BatchSample]) -> StreamBatch:
        cp = self.groups.cp
        block = self.own.data_pad_size_multiplier * self.groups.tp.size()
        replay = self.schedule.replay
        routes = None if replay is None else Routes(samples, replay.shape, records=self.config.use_routing_replay)
        return StreamBatch(samples, routes, cp_size=cp.size(), cp_rank=cp.rank(), block=block)

    # -- forward ------------------------------------------------------------------------------------------------------

    def models(self, cfg: ObjectiveConfig) -> tuple[str, ...]:
        here = {"old_logp": cfg.needs_old_logp, "ref_logp": cfg.needs_ref_logp and "ref_logp" in self.others}
        here["teacher_logp"] = "teacher_logp" in self.others
        return tuple(name for name, wanted in here.items() if wanted)

    def score(self, which: str, packed: Packed, work: Sequence[Work]) -> Tensor:
        values = torch.zeros(packed.response_tokens)
        every = [one for mine in work for one in mine]
        self._call_hook("before_log_prob", self.model.chunks, PREFIXES.get(which, ""))
        routed = self._routed(every, records=True) if which == "old_logp" else nullcontext()  # other models choose themselves
        with self._wearing(self.others.get(which)), routed, on_device():
            for (_, micro), logp in zip(every, self.schedule.forward_only(every), strict=True):
                values[torch.from_numpy(micro.response_slots)] = logp.float().cpu()
        return self.total(values)

    def _routed(self, work: Work, *, records: bool = False) -> AbstractContextManager[None]:
        """Routers choose what is known of these micro-batches, or what they choose is kept."""
        if self.schedule.replay is None:
            return nullcontext()
        micros = [(micro.routing, micro.input_ids.shape[1]) for _, micro in work]
        unknown = all(routing is None or routing.table is None for routing, _ in micros)
        return self.schedule.replay.passing("record" if records and unknown else "play", micros)

    def own_weights(self) -> Mapping[str, Tensor]:
        return self.model.weights()

    def refresh_reference(self) -> None:
        if "ref_logp" in self.others:
            self.others["ref_logp"] = copies(self.model.weights(), on_host=True)

    def _saved_optimizer(self) -> Any:
        return None if self.config.no_save_optim else self.update.optimizer

    def _moving_reference(self) -> Mapping[str, Tensor] | None:
        return self.others.get("ref_logp") if self.config.ref_update_interval else None

    def _wearing(self, weights: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
        return nullcontext() if weights is None else self.old_actors.worn(self.model.weights(), weights)

    # -- backward and update ------------------------------------------------------------------------------------------

    def forward_backward(
        self, work: Work, policy: PolicyLoss, value: ValueLoss, *, learns: bool, entropy_gradient: bool, watch: Stopwatch
    ) -> None:
        self._call_hook("before_train_step", *self._place, self.model.chunks, self.update.optimizer, None)
        self._place = self._place[0], self._place[1] + 1
        with watch.phase("forward_backward"), on_device():
            self.update.clear()
            with self._routed(work):
                self.schedule.forward_backward(work, policy, entropy_gradient=entropy_gradient)

    def apply(self, rates: Rates, *, update: bool) -> tuple[dict[str, float], bool]:
        with on_device():
            measured = {} if self.schedule.balance is None else self.schedule.balance.measured()
            norm = self.update.norm()
            finite = norm < float("inf")  # false for nan too
            if finite and update:
                self.update.step(norm, lr=rates.lr, limit=rates.clip)
                self.updates += 1
        return {"grad_norm": norm, **measured}, finite

    def rates(self, step: int, knobs: Mapping[str, Any]) -> Rates:
        self._place = step, 0
        return super().rates(step, knobs)

    def _call_hook(self, name: str, *as_miles: Any) -> None:
        """With this core; a function whose first parameter is `args` as Miles calls it, with what follows them there."""
        if (hook := self._hooks.get(name)) is None:
            return
        if next(iter(inspect.signature(hook).parameters), "") == "args":
            hook(setup.args_of(self.config, self.own, self.schedule.config), *as_miles)
        else:
            hook(self)

    # -- out: versions and checkpoints ------------------------------------------------------------------------------

    @property
    def exporters(self) -> tuple[int, ...]:
        """The first rank of each pipeline stage."""
        stages = self.groups.stages
        return tuple(stage * self.ranks.size // stages for stage in range(stages))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in export_hf(self.model.bare, self.model.architecture):
            if self.fp8 is None:
                yield name, tensor
            else:
                yield from quantized({name: tensor}, self.fp8).items()

    def beside(self) -> dict[str, bytes]:
        return export_files(self.model.source, None, self.model.dtype, is_fp8=self.fp8 is not None)

    def weights_hash(self) -> str:
        each = {n: hash_tensors({n: t.cpu()}) for bucket in gathered(self, self.ranks, HASHED_BYTES) for n, t in bucket}
        total = checksum()
        for name in sorted(each):
            total.update(each[name].encode())
        return total.hexdigest() if self.ranks.rank == 0 else ""

    def identity(self) -> ModelIdentity:
        return identity_of(self.model.architecture)

    def save(self, directory: Path) -> Shards:
        counters = msgspec.to_builtins(Counters(self.update.steps))
        with on_device():
            write = save_sharded(
                self.model.bare, directory, extra=counters, group=self.groups.files,
                optimizer=self._saved_optimizer(), reference=self._moving_reference(),
            )  # fmt: skip
        return Shards(write, directory, self.model.source)

    def read(self, directory: Path, drops: tuple[str, ...] = ()) -> None:
        held = check(directory, self.model.architecture, moving=self._moving_reference() is not None)
        if not (held or "optim" in drops or self.config.no_save_optim):
            raise no_optimizer(directory)

    def load(self, directory: Path, read: None, drops: tuple[str, ...] = ()) -> None:
        fresh = "optim" in drops or not holds_optimizer(directory)
        optimizer = None if fresh else self.update.optimizer
        said = load_sharded(
            self.model.bare, self.model.architecture, directory, optimizer=optimizer, reference=self._moving_reference(),
            with_extra=True,
        )  # fmt: skip
        if fresh:
            self.update.begin_anew()
        self.update.steps = 0 if fresh else msgspec.convert(said, Counters).optimizer_steps
        self.old_actors.clear()

    # -- the device, and others who want it ----------------------------------------------------------------------------

    @property
    def less_memory(self) -> tuple[str, ...]:
        full = self.schedule.config.recompute_granularity == "full"
        return () if full else ("set --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",)

    def resident(self) -> Iterator[Tensor]:
        yield from self.model.weights().values()
        for chunk in self.model.chunks:
            yield from (b.grad_data for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
        yield from self.update.tensors()

    def close(self) -> None:
        self.groups.close()
