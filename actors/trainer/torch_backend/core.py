"""One rank's share of the training: models, optimizers, what is loaded and stored (`Passes` computes with them).

Owns all device memory. Talks to nobody but the other ranks; what arrives from rank 0 arrives through `RankedBackend`
or the follower. Always true: after `load` (and only if it did not raise) everything that training depends on is as it was.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from actors.runtime.run import Refused
from actors.runtime.vision import Vision, family_of, vision_of
from actors.trainer.backend import BackendConfig, TorchConfig
from actors.trainer.batch.memory import SIZES, WORTH_COMPILING, activation_bytes, gathers, recomputed
from actors.trainer.batch.plan import cost_of
from actors.trainer.hooks import install
from actors.trainer.lora.adapters import adapted
from actors.trainer.torch_backend import attention, experts
from actors.trainer.torch_backend.compiled import compile_layers
from actors.trainer.torch_backend.critic import CriticTraining
from actors.trainer.torch_backend.fp8 import quantized, scheme_of
from actors.trainer.torch_backend.matched import MatchedPolicy
from actors.trainer.torch_backend.model import export_files, load_policy, resolve_device
from actors.trainer.torch_backend.optim import Optimizer, Weights
from actors.trainer.torch_backend.passes import Passes
from actors.trainer.torch_backend.policy import Policy
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.files import ModelIdentity, hash_tensors, shape_fingerprint
from actors.trainer.training.offload import Offload
from actors.trainer.training.old_actors import OldActors
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.routes import mode_of
from actors.trainer.training.state import (
    CRITIC,
    CRITIC_OPTIMIZER,
    OLD_ACTORS,
    OPTIMIZER,
    REFERENCE,
    Scalars,
    Shapes,
    StateFiles,
    TrainingState,
    read_state,
)
from actors.trainer.training.step import settle_objective
from bus.errors import CheckpointOfAnother

log = logging.getLogger(__name__)


class Core(Passes):
    """Built once per process; `ranks` must be connected."""

    def __init__(self, config: BackendConfig, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        if not isinstance(config.own, TorchConfig):
            raise Refused(f"the torch backend got {type(config.own).__name__}. Start it with --train-backend torch.")
        self.own = config.own
        hf_logging.disable_progress_bar()
        install(config.objective)
        self.objective = settle_objective(config)
        torch.set_num_threads(config.trainer_threads)
        torch.manual_seed(config.seed)
        self.device = resolve_device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.model_dtype)
        self.kernel = attention.select(self.own.attn_implementation, self.device, self.dtype)
        self.shards = TorchShards(ranks, self.device)
        self.vision = self._sees(config.hf_checkpoint)
        self.policy = self._load(config.hf_checkpoint, trainable=True)
        self.published_as = config.published_as or config.hf_checkpoint
        self.fp8 = scheme_of(self.published_as)
        if self.own.true_on_policy_mode and self.fp8 is not None:
            raise Refused("true_on_policy_mode: engines that serve FP8 compute other log-probs. Leave the mode out.")
        self.reference: nn.Module | None = self._load_reference() if self.objective.needs_ref_logp else None
        self.teacher = self._load_teacher()
        masters = ranks.alone and self.dtype != torch.float32
        self.weights = Weights(self.policy.named_weights(), masters=masters)
        if masters:
            narrow(self.policy, self.dtype)
            self.policy.prove_narrow(self.weights.params)
        if self.policy.proved_here:
            self.compiles = self.compiles and self.policy.prove_compiled(compile_layers)
        self.optimizer = Optimizer(self.weights, config)
        self.shapes = {n: tuple(p.shape) for n, p in self.weights.params.items()}
        self.cost = cost_of(self.policy.hf.config.get_text_config())
        self.replay = self._replay()
        self.old_actors = OldActors(on_host=ranks.alone)
        self.critic: CriticTraining | None = None
        if self.objective.estimator.critic:
            self.critic = CriticTraining(config, self._place, masters=masters, checkpointing=self.own.gradient_checkpointing)
            if masters:
                narrow(self.critic.model, self.dtype)
        self.offload = Offload(config.offload_train_target, config.offload_dir)

    def _sees(self, path: str) -> Vision | None:
        """Of a model that reads pictures, which not everything here can; Refused for what cannot."""
        config = self.config
        kind = family_of(path)
        others = (config.ref_load, config.opd_teacher_load)
        for name, wanted in (
            ("--true-on-policy-mode", self.own.true_on_policy_mode),
            ("a critic", self.objective.estimator.critic),
            ("FP8", scheme_of(config.published_as or path) is not None),
            ("routing replay", bool(mode_of(config))),
            ("LoRA", self.own.lora_rank > 0),
            ("a reference or teacher of another family", any(other and family_of(other) != kind for other in others)),
        ):
            if kind and wanted:
                raise Refused(f"{path} is a {kind}, which reads pictures: {name} is not carried with it. Leave it out.")
        return vision_of(path)

    def _load(self, path: str, *, trainable: bool) -> Policy:
        checkpointing = self.own.gradient_checkpointing and trainable
        policy = load_policy(
            path,
            trainable=trainable,
            gradient_checkpointing=checkpointing,
            implementation=self.own.model_implementation,
            trusted=self.own.trust_remote_code,
        )
        if trainable:
            policy = adapted(policy, path, self.own, seed=self.config.seed)
            self.compiles = self._compiles(policy)
            self.shards.gathers = self._gathers(policy)
        self._place(policy)
        policy.prove(self.shards, self.ranks, self.device)
        if self.ranks.alone and not trainable:
            narrow(policy, self.dtype)
            policy.prove_narrow({})
        if self.own.attn_implementation not in ("auto", attention.SDPA) and policy.proved_here:
            how = f"attn_implementation={self.own.attn_implementation}"
            raise Refused(f"{how} is for families with code of our own; {path} runs as a class of transformers. Use auto.")
        if self.own.true_on_policy_mode and policy.proved_here:
            raise Refused(f"true_on_policy_mode needs code of our own; {path} runs as a class of transformers. Leave it out.")
        return MatchedPolicy(policy.hf) if self.own.true_on_policy_mode else policy

    def _load_reference(self) -> nn.Module:
        """Of a policy with adapters its own base, unless another is named."""
        c = self.config
        own = self.policy.base() if c.ref_load in ("", c.hf_checkpoint) else None
        return own or self._load(c.ref_load or c.hf_checkpoint, trainable=False)

    def _compiles(self, policy: Policy) -> bool:
        """auto: where flash attention runs, and a step is slow enough to earn back what compiling takes."""
        own, large = self.own, sum(p.numel() for p in policy.parameters()) >= WORTH_COMPILING
        auto = own.compile == "auto" and self.kernel != attention.SDPA and large
        found = (own.compile == "on" or auto) and not own.true_on_policy_mode
        how = "uncompiled" if not found else "compiled where that is proved" if policy.proved_here else "compiled"
        log.info("attention: %s; layers: %s", self.kernel, how)
        return found

    def _gathers(self, policy: Policy) -> bool:
        """Rank 0's word, since the GPUs of hosts may differ."""
        if self.ranks.alone:
            return False
        own, shape = self.own, policy.hf.config.get_text_config().to_dict()
        trained = sum(p.numel() for p in policy.parameters()) * (2 if self.objective.estimator.critic else 1)
        kept, size = 0, None
        if self.config.use_dynamic_batch_size and all(isinstance(shape.get(name), int) for name in SIZES):
            again = recomputed(len(policy.blocks), own.gradient_checkpointing, own.gradient_checkpointing_layers)
            kept = activation_bytes(shape, self.config.max_tokens_per_gpu, again, fused=self.compiles)
        if self.device.type == "cuda":
            size = torch.cuda.get_device_properties(self.device).total_memory
        mine = gathers(own.fsdp_shard, trained, self.ranks.size, kept, size)
        found = self.ranks.broadcast(b"1" if mine else b"0") == b"1"
        log.info("FSDP over %d ranks, --fsdp-shard %s", self.ranks.size, "optimizer" if found else "all")
        return found

    def _replay(self) -> experts.Replay | None:
        if not mode_of(self.config):
            return None
        if (shape := experts.shape_of(self.policy.hf.config)) is None:
            raise Refused(
                f"{self.config.hf_checkpoint} has no experts: leave out --use-rollout-routing-replay and --use-routing-replay."
            )
        return experts.Replay(self.policy.blocks, shape, self.device)

    def _load_teacher(self) -> Policy | None:
        """The second model of on-policy distillation; None where no objective asks, or where samples bring its log-probs."""
        if not (self.objective.needs_student_logp and self.config.opd_teacher_load):
            return None
        teacher = self._load(self.config.opd_teacher_load, trainable=False)
        here, there = (m.hf.config.get_text_config().vocab_size for m in (self.policy, teacher))
        if here != there:
            raise Refused(
                f"opd_teacher_load={self.config.opd_teacher_load} has {there} tokens in its vocabulary, the policy has "
                f"{here}: their log-probs cannot be compared. Choose a teacher with the policy's tokenizer."
            )
        return teacher

    def _place(self, module: nn.Module) -> None:
        blocks: Any = module.blocks
        hf: Any
        for hf in (m for m in module.modules() if hasattr(m, "set_experts_implementation")):
            if getattr(hf.config, "num_experts", 0):  # others refuse to be told
                hf.set_experts_implementation(experts.implementation(self.device))
        for block in blocks[self.own.gradient_checkpointing_layers or len(blocks) :]:
            block.gradient_checkpointing = False
        if self.compiles and not getattr(module, "proved_here", False):
            compile_layers(blocks)
        if not self.ranks.alone:
            self.shards.shard(module, self.dtype)
        module.to(self.device)

    # -- the device, and others who want it ------------------------------------------------------------------------

    @property
    def less_memory(self) -> tuple[str, ...]:
        recompute = () if self.own.gradient_checkpointing else ("set --gradient-checkpointing",)
        return (*recompute, "set --fsdp-shard all") if self.shards.gathers else recompute

    def resident(self) -> Iterator[Tensor]:
        critic = self.critic
        models = (self.policy, self.reference, self.teacher, critic.model if critic else None)
        for model in models:
            if model is not None:
                yield from model.parameters()
        trained = [(self.weights, self.optimizer)] + ([(critic.weights, critic.optimizer)] if critic else [])
        for weights, optimizer in trained:
            yield from weights.params.values()
            yield from optimizer.state().values()
        yield from (t for t in self.old_actors.tensors().values() if t.device.type == self.device.type)

    # -- copies -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Weights in the computing type, or FP8 where that is served; nothing on other ranks than 0."""
        held = ((name, whole) for name, whole in self.policy.served(self.shards, self.dtype) if whole is not None)
        for part, tensor in self.policy.published(held):
            if self.ranks.rank != 0:
                continue
            if self.fp8 is None:
                yield part, tensor
            else:
                yield from quantized({part: tensor}, self.fp8).items()

    def beside(self) -> dict[str, bytes]:
        files = export_files(self.published_as, self.policy.hf, self.dtype, is_fp8=self.fp8 is not None)
        return self.policy.beside(files) if self.policy.serves_adapters else files

    def save(self, directory: Path) -> StateFiles:
        return StateFiles(self._copied(), directory)

    def identity(self) -> ModelIdentity:
        n_params = sum(p.numel() for p in self.weights.params.values())
        model_type, fingerprint = self.policy.hf.config.model_type, shape_fingerprint(self.shapes)
        return ModelIdentity(model_type=model_type, n_params=n_params, fingerprint=fingerprint)

    def _held(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint holds, by file; of the optimizers nothing where they are left out."""
        critic, optimizers = self.critic, not self.config.no_save_optim
        return {
            self.policy.file: self.weights.params,
            OPTIMIZER: self.optimizer.state() if optimizers else {},
            REFERENCE: self._moving_reference(),
            OLD_ACTORS: self.old_actors.tensors(),
            CRITIC: critic.weights.params if critic else {},
            CRITIC_OPTIMIZER: critic.optimizer.state() if critic and optimizers else {},
        }

    def _copied(self) -> TrainingState | None:
        """All training state, whole and float32; None on other ranks than 0."""
        tensors = {file: self._whole(held, torch.float32) for file, held in self._held().items()}
        if self.ranks.rank != 0:
            return None
        leave_out, critic = self.config.no_save_optim, self.critic
        export = partial(export_files, self.config.hf_checkpoint, self.policy.hf, with_tokenizer=True)
        return TrainingState(
            tensors,
            beside=self.policy.beside(export(torch.float32)),
            dtype=self.dtype,
            hf_beside=export(self.dtype),
            write_weights=self.policy.write_weights,
            scalars=Scalars(
                optimizer=self.config.optimizer,
                optimizer_steps=0 if leave_out else self.optimizer.steps,
                critic_steps=critic.optimizer.steps if critic and not leave_out else 0,
                no_optim=leave_out,
                old_actors=self.old_actors.steps,
                rng_cpu=torch.get_rng_state().numpy().tobytes().hex(),
                rng_cuda=torch.cuda.get_rng_state().numpy().tobytes().hex() if self.device.type == "cuda" else "",
                torch_version=str(torch.__version__),
            ),
        )

    def weights_hash(self) -> str:
        """XXH3-128 over the float32 weights, a critic's among them; empty on other ranks than 0."""
        tensors = self._whole(self.weights.params, torch.float32)
        if self.critic is not None:
            values = self._whole(self.critic.weights.params, torch.float32)
            tensors |= {f"critic/{name}": t for name, t in values.items()}
        return hash_tensors(tensors) if self.ranks.rank == 0 else ""

    def _whole(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        whole = {name: self.shards.whole(t, dtype) for name, t in tensors.items()}
        return {name: t for name, t in whole.items() if t is not None}

    def _moving_reference(self) -> dict[str, Tensor]:
        reference = self.reference if self.config.ref_update_interval else None
        return dict(reference.named_weights()) if isinstance(reference, Policy) else {}

    # -- restore ------------------------------------------------------------------------------------------------

    def read(self, directory: Path, drops: tuple[str, ...] = ()) -> TrainingState:
        """A checkpoint of this model and optimizer, verified; rank 0 only. Raises CheckpointRefused."""
        state = read_state(
            directory,
            model_type=self.policy.hf.config.model_type,
            shapes=self.shapes,
            optimizer=self.config.optimizer,
            needs_optim="optim" not in drops and not self.config.no_save_optim,
            expected=self._expected,
        )
        if why := self.policy.other_adapters(directory):
            raise CheckpointOfAnother(f"checkpoint {directory} refused: {why}. Nothing was changed. Set them as they were.")
        return state

    def _expected(self, scalars: Scalars) -> dict[str, Shapes]:
        """Tensors of a checkpoint that this run takes up, by file, with their shapes."""
        critic, shapes = self.critic, self.shapes
        return {
            self.policy.file: shapes,
            OPTIMIZER: _moments(self.optimizer, shapes, scalars.optimizer_steps),
            REFERENCE: shapes if self._moving_reference() else {},
            OLD_ACTORS: {f"{step}/{name}": shape for step in scalars.old_actors for name, shape in shapes.items()},
            CRITIC: critic.shapes if critic else {},
            CRITIC_OPTIMIZER: _moments(critic.optimizer, critic.shapes, scalars.critic_steps) if critic else {},
        }

    @torch.no_grad()
    def load(self, directory: Path, read: TrainingState | None, drops: tuple[str, ...] = ()) -> None:
        """Take over rank 0's verified state, which alone has read it; on other ranks `read` is None."""
        state, fresh = read, "optim" in drops
        scalars = msgspec.json.decode(self.ranks.broadcast(msgspec.json.encode(state.scalars) if state else None), type=Scalars)
        given: Mapping[str, Mapping[str, Tensor]] = defaultdict(dict, state.tensors if state else {})
        self._take(self.weights, self.optimizer, 0 if fresh else scalars.optimizer_steps, given[self.policy.file], given[OPTIMIZER])
        for name, ref in self._moving_reference().items():
            ref.copy_(self.shards.part(given[REFERENCE].get(name), ref))
        self.old_actors.clear()
        if self.objective.keep_old_actor:
            own, former = self.policy.named_weights(), given[OLD_ACTORS]
            for step in scalars.old_actors:
                self.old_actors.put(step, {n: self.shards.part(former.get(f"{step}/{n}"), p) for n, p in own.items()})
        if (critic := self.critic) is not None:
            steps = 0 if fresh else scalars.critic_steps
            self._take(critic.weights, critic.optimizer, steps, given[CRITIC], given[CRITIC_OPTIMIZER])
        if "rng" in drops:
            return
        torch.set_rng_state(_rng(scalars.rng_cpu))
        if scalars.rng_cuda and self.device.type == "cuda":
            torch.cuda.set_rng_state(_rng(scalars.rng_cuda))

    def _take(
        self,
        weights: Weights,
        optimizer: Optimizer,
        steps: int,
        given: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
    ) -> None:
        """Whole tensors of rank 0 into `weights` and `optimizer`; nothing is given on other ranks."""
        part, params = self.shards.part, weights.params
        for name, p in params.items():
            p.copy_(part(given.get(name), p))
        weights.publish()
        weights.clear()
        restored: dict[str, Tensor] = {}
        for key in sorted(optimizer.expected(steps)):
            restored[key] = part(moments.get(key), params[key.split("/", 1)[1]])
        optimizer.restore(steps, restored)


@torch.no_grad()
def narrow(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in `dtype`; buffers stay, since rotary frequencies need float32."""
    for p in module.parameters():
        p.data = p.data.to(dtype)


def _moments(optimizer: Optimizer, shapes: Shapes, steps: int) -> dict[str, tuple[int, ...]]:
    """What an optimizer has after so many steps, with its shapes."""
    return {key: shapes[key.split("/", 1)[1]] for key in optimizer.expected(steps)}


def _rng(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
