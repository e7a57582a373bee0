"""Whether models fit the GPUs, the trainer alone, or trainer and engines in turns (--colocate, --lend-trainer-gpus); and whether
the host has room for what they leave there.

`check_memory` reads the sizes in the model directory and asks nvidia-smi; where either is silent nothing is checked here, and
torch and SGLang have the only word. The rest is pure. GPUs of other hosts (--train-master) are taken to be like this one's.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import psutil

from actors.runtime.run import Refused
from actors.runtime.safetensors_header import header_of
from actors.runtime.smi import of_gpus
from actors.trainer.batch.memory import (
    GATHERED_BYTES,
    SHARED_BYTES,
    SIZES,
    WORTH_COMPILING,
    activation_bytes,
    gathers,
    recomputed,
)
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.megatron_backend.families import describe
from actors.trainer.megatron_backend.layout import ModelShape, RankLayout, layout_of, refusals
from miles_async.launcher.lora import adapted
from miles_async.launcher.plan import told
from miles_async.settings.colocate import memory_fraction
from miles_async.settings.errors import SettingsError, refusal, show
from miles_async.settings.run import RunSettings

GIB = 1 << 30
WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
SURE = 0.85  # of an estimate of activations: what it exceeds by more than the rest cannot fit
GRAIN = 256  # tokens, that a cap is told in
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Sizes:
    """Elements of a model: of its layers without experts, of its experts, of embedding and head together and of the larger one."""

    layers: int
    experts: int = 0
    ends: int = 0
    end: int = 0
    adapters: int = 0
    """elements that LoRA trains in place of the others"""

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.ends


def check_memory(s: RunSettings, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse, before anything starts, what cannot fit; notes of what may not. config: the model's config.json."""
    if s.model.builtin_name is not None or s.launch.debug_rollout_only:
        return ()
    total, sizes = gpu_bytes(), parameters(Path(s.model.hf_checkpoint))
    if s.flat.lora_rank and sizes.total:
        with suppress(Refused):  # told elsewhere
            sizes = replace(sizes, adapters=adapted(s.flat, Path(s.model.hf_checkpoint)))
    if total is None or not sizes.total:
        return ()
    trainer = Trainer(s, sizes, config, total)
    if (s.sglang.colocate or s.sglang.lend_trainer_gpus) and s.flat.engine_kind.needs_gpu:
        fits(s, total, trainer)
    trainer.check(total)
    trainer.check_host(host_bytes(), total)
    return (*trainer.notes(total), *trainer.notes_of_host(host_bytes()))


def fits(s: RunSettings, total: int, trainer: "Trainer") -> None:
    """(pure) SettingsError when a turn needs more than `total` bytes of one GPU."""
    g, ranks, params = s.sglang, s.flat.train_ranks, trainer.sizes.total
    lent = g.lend_trainer_gpus
    field = "lend_mem_fraction" if lent else "sglang_mem_fraction_static"
    apart = "add --offload-train, or leave out --lend-trainer-gpus" if lent else "or use GPUs apart (leave out --colocate)"
    fraction = memory_fraction(s.flat)
    engine = s.flat.engine_kind.memory(fraction, total)
    awake = trainer.bytes()
    sent = trainer.sizes.adapters if s.flat.lora_publish == "adapters" else params
    copy = 2 * sent if s.flat.transport_kind.copies_beside(lent) else 0
    aside = engine if not g.offload_rollout else 0 if "weight" in g.offload_rollout_level else 2 * params // ranks
    aside = 0 if lent else aside
    asleep = 0 if g.offload_train else trainer.resident()
    margin = g.train_memory_margin_bytes
    for turn, need, parts in (
        ("engine", engine + asleep + copy + margin, f"engine {_gib(engine)}, trainer {_gib(asleep)}"),
        ("trainer", aside + awake + copy + margin, f"engine {_gib(aside)}, trainer {_gib(awake)}"),
    ):
        if need > total:
            most = (total - asleep - copy - margin) / total
            less = turn == "engine" and most > 0.05
            lower = f"Lower --{field.replace('_', '-')} to {most:.2f}" if less else "Train on more GPUs"
            if turn == "trainer" and need - awake + trainer.resident() <= total:
                lower = "Set --fsdp-shard all"
            why = (
                f"the {turn}'s turn on a shared GPU needs {_gib(need)} of {_gib(total)} ({parts}, weights on their way "
                f"{_gib(copy)}, train_memory_margin_bytes {_gib(margin)}; offload_train = {show(g.offload_train)}, "
                f"offload_rollout = {show(g.offload_rollout)})"
            )
            raise refusal(field, fraction, why, f"{lower}, {apart}.")


class Trainer:
    """(pure) What the fullest rank of the trainer holds. gpu: bytes of its GPU, where they decide what is sharded."""

    def __init__(self, s: RunSettings, sizes: Sizes, config: Mapping[str, Any], gpu: int | None = None) -> None:
        self.s, self.sizes, self.config, self.gpu = s, sizes, config, gpu
        self.narrow = s.model.model_dtype != "float32"
        self.layout = RankLayout(world=s.flat.train_ranks)
        self.shape: ModelShape | None = None
        self.megatron: dict[str, Any] = {}
        if s.flat.on_megatron:
            own = told(MegatronConfig, s.flat)
            self.layout = layout_of(own, s.flat.train_ranks)
            self.megatron = {name.replace("-", "_"): value for name, value in own.megatron.items()}
            with suppress(Refused):  # told elsewhere
                self.shape = describe(config).shape

    # -- weights, gradients, optimizer ------------------------------------------------------------------------------

    def bytes(self, layout: RankLayout | None = None) -> int:
        """Of one GPU in a training step without activations."""
        return self._sharded() if not self.s.flat.on_megatron else self._cut(layout or self.layout)

    def resident(self) -> int:
        """Of one GPU, between steps or with everything sharded."""
        return self._sharded(whole=0) if not self.s.flat.on_megatron else self._cut(self.layout)

    def _sharded(self, whole: int = GATHERED_BYTES) -> int:
        """Weights, float32 masters, gradients, two moments; with several ranks float32 shards; a second model for each of
        reference, critic and teacher. `whole`: bytes of a parameter that each of several ranks may hold besides in a step, its
        gradient among them."""
        s, ranks = self.s, self.layout.world
        models = 2 if s.flat.estimator.critic else 1
        trained = 16 if ranks > 1 or not self.narrow else 18
        frozen = 2 if self.narrow and ranks == 1 else 4
        others = int(s.flat.needs_reference) + int(bool(s.ckpt.opd_teacher_load))
        tokens = self._tokens()
        kept = self.activations(tokens) if tokens else 0
        if s.flat.lora_rank:
            others -= int(s.flat.needs_reference)  # it is the base, which stands here once, unless --ref-load names another
            others += int(s.flat.needs_reference and s.ckpt.ref_load != s.model.hf_checkpoint)
            mine = trained * (self.sizes.adapters + (models - 1) * self.sizes.total) + frozen * (1 + others) * self.sizes.total
            gathered = whole and gathers(s.perf.fsdp_shard, models * self.sizes.total, ranks, kept, self.gpu)
            return mine // ranks + (whole * self.sizes.total if gathered else 0)
        if not whole or not gathers(s.perf.fsdp_shard, models * self.sizes.total, ranks, kept, self.gpu):
            return (trained * models + frozen * others) * self.sizes.total // ranks
        return (SHARED_BYTES * models + frozen * others) * self.sizes.total // ranks + whole * models * self.sizes.total

    @property
    def offloaded(self) -> float:
        """The part of Megatron's optimizer that lies on the host."""
        given = self.megatron
        return float(given.get("optimizer_offload_fraction", 1.0)) if given.get("optimizer_cpu_offload") else 0.0

    def _cut(self, layout: RankLayout) -> int:
        """Of Megatron: whole weights and gradients of a rank's part; masters and moments too, or cut over its copies (distributed
        optimizer), or on the host. Other models lie on the host."""
        given, own = self.megatron, 2 if self.narrow else 4
        gradient = 4 if given.get("grad_reduce_in_fp32", True) else own
        moments = [WIDTH[given.get(name, "fp32")] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
        state: float = sum(moments) + (WIDTH[given.get("main_params_dtype", "fp32")] if self.narrow else 0)
        return self._of_rank(layout, own + gradient, state * (1 - self.offloaded))

    def _of_rank(self, layout: RankLayout, whole: float, state: float) -> int:
        """Bytes of the fullest rank, with so many for each of its elements, and for each that its optimizer holds."""
        cut = self.megatron.get("use_distributed_optimizer", self.narrow)
        stage = self._stage_share(layout)
        ends = self.sizes.ends if layout.pp == 1 else self.sizes.end
        dense = (self.sizes.layers * stage + ends) / layout.tp
        experts = self.sizes.experts * stage / (layout.ep * layout.expert_tp)
        copies = (layout.world // (layout.tp * layout.pp), layout.world // (layout.pp * layout.ep * layout.expert_tp))
        each = [whole + state / (max(1, n) if cut else 1) for n in copies]
        return int(dense * each[0] + experts * each[1])

    def _stage_share(self, layout: RankLayout) -> float:
        """The part of the layers that the fullest stage has."""
        layers = self.shape.layers if self.shape else layout.pp
        own = [n for n in (layout.first, layout.last) if n]
        middle = layout.pp - len(own)
        return max([*own, (layers - sum(own)) / middle if middle else 0]) / layers

    def check(self, total: int) -> None:
        """SettingsError when weights and optimizer state, or a full micro-batch beside them, need more than `total` bytes a GPU."""
        s, need = self.s, self.bytes()
        what = f"weights, gradients and optimizer state need {_gib(need)} of {_gib(total)} on each of the trainer's GPUs"
        if need > total and not s.flat.on_megatron:
            more = -(-self.resident() * self.layout.world // total)
            if self.resident() <= total:
                raise refusal("fsdp_shard", s.perf.fsdp_shard, what, "Set --fsdp-shard all.")
            raise refusal("actor_num_gpus_per_node", s.perf.actor_num_gpus_per_node, what, f"Set it to at least {more}.")
        if need > total:
            size = s.parallel.tensor_model_parallel_size
            raise refusal("tensor_model_parallel_size", size, what, self._nearest(total))
        tokens = self._tokens()
        dense = not self.config.get("num_experts_per_tok")
        if tokens and dense and need + SURE * (full := self.activations(tokens)) > total:
            raise self._too_long(total, need, full)

    # -- the host -----------------------------------------------------------------------------------------------------

    def on_host(self) -> dict[str, int]:
        """Bytes of this host's memory, of what is sure to lie there; what is rounded up, or written by the way, comes on top."""
        s, g, megatron = self.s, self.s.sglang, self.s.flat.on_megatron
        here, width = min(s.perf.actor_num_gpus_per_node, self.layout.world), 2 if self.narrow else 4
        others = int(s.flat.needs_reference) + int(bool(s.ckpt.opd_teacher_load)) if megatron else 0
        shared = g.colocate or g.lend_trainer_gpus
        engines = g.num_generation_workers if shared and s.flat.engine_kind.needs_gpu else 0
        aside = g.colocate and g.offload_rollout and "weight" in g.offload_rollout_level
        moved = shared and g.offload_train and g.offload_train_target == "cpu"
        found = {
            # masters, two moments and gradients, all float32 there
            "the optimizer": self._of_rank(self.layout, 0, 16 * self.offloaded) if megatron else 0,
            # and a place for the policy's own weights while others compute
            "other models": self._of_rank(self.layout, width * (others + 1), 0) if others else 0,
            "what --offload-train moves": self.resident() if moved else 0,
        }
        found = {name: here * n for name, n in found.items()}
        return found | {"the engines' weights": width * self.sizes.total * engines if aside else 0}

    def check_host(self, free: int, total: int) -> None:
        """SettingsError when that is more than the `free` bytes of this host. `total`: bytes of a GPU."""
        parts = {name: n for name, n in self.on_host().items() if n}
        if (over := sum(parts.values()) - free) <= 0:
            return
        what = f"the host needs {_gib(sum(parts.values()))} of memory and has {_gib(free)} free"
        what += f" ({', '.join(f'{name} {_gib(n)}' for name, n in parts.items())})"
        ways, optimizer = [], parts.get("the optimizer", 0)
        for part in (k / 20 for k in range(int(20 * self.offloaded), 0, -1)) if optimizer else ():
            less = Trainer(self.s, self.sizes, self.config)
            less.megatron = self.megatron | {"optimizer_offload_fraction": part}
            if sum(less.on_host().values()) <= free and less.bytes() <= total:
                ways.append(f"lower --optimizer-offload-fraction to {part:g}")
                break
        if parts.get("what --offload-train moves", 0) >= over:
            ways.append("set --offload-train-target disk")
        way = ", or ".join(ways) or "train on more hosts, or one with more memory"
        field, value = ("optimizer_cpu_offload", True) if optimizer else ("offload_train", self.s.sglang.offload_train)
        raise refusal(field, value, what, f"{way[0].upper()}{way[1:]}.")

    def in_checkpoint(self) -> int:
        """Bytes that this host's ranks of Megatron copy to its memory for a checkpoint: each its part of masters and moments, one
        of each data-parallel group the weights, and a reference that moves."""
        s = self.s
        weights = (2 if self.narrow else 4) * (2 if s.flat.needs_reference and s.grpo.ref_update_interval else 1)
        here = min(s.perf.actor_num_gpus_per_node, self.layout.world)
        first = min(here, self.layout.tp * self.layout.pp)
        state = 0 if s.ckpt.no_save_optim else 12
        holders = here if self.megatron.get("use_distributed_optimizer", self.narrow) else first
        return first * self._of_rank(self.layout, weights, 0) + holders * self._of_rank(self.layout, 0, state)

    def notes_of_host(self, free: int) -> Iterator[str]:
        """A note where what lies on the host and a checkpoint's copy of it need more than its `free` bytes."""
        if not self.s.flat.on_megatron or self.s.ckpt.no_save:
            return
        held, copied = sum(self.on_host().values()), self.in_checkpoint()
        if held + copied > free:
            yield (
                f"while a checkpoint is written the host needs {_gib(held + copied)} of memory, {_gib(copied)} for it, and has "
                f"{_gib(free)} free. Train on more hosts, or leave the optimizer out of checkpoints (--no-save-optim)."
            )

    def _nearest(self, total: int) -> str:
        """The smallest layout that has room, on these GPUs or on as few more as it takes."""
        if self.shape is None:
            return "Train on more GPUs."
        sizes = (1, 2, 4, 8, 16, 32)
        for world in (self.layout.world * k for k in (1, 2, 4, 8, 16, 32)):
            every = (
                replace(self.layout, world=world, tp=tp, pp=pp, ep=ep, vpp=1, first=None, last=None, sequence_parallel=tp > 1)
                for tp in sizes for pp in sizes for ep in (sizes if self.shape.experts else (1,))
            )  # fmt: skip
            good = [one for one in every if not refusals(one, self.shape) and self.bytes(one) <= total]
            if good:
                best = min(good, key=lambda one: (one.tp * one.pp * one.ep, one.tp * one.pp, one.pp))
                names = {"tensor": best.tp, "pipeline": best.pp, "expert": best.ep}
                flags = [f"--{name}-model-parallel-size {n}" for name, n in names.items() if n > 1]
                flags += ["--sequence-parallel"] if best.tp > 1 else []
                return f"Nearest: {' '.join(flags) or 'no model parallelism'} on {world} GPUs."
        return "No layout of up to 32 times the GPUs has room."

    # -- activations --------------------------------------------------------------------------------------------------

    def _tokens(self) -> int:
        """Of a full micro-batch on one rank; 0 where that is not known."""
        p, r = self.s.perf, self.s.rollout
        if not p.use_dynamic_batch_size or not all(isinstance(self.config.get(n), int) for n in SIZES):
            return 0
        longest = r.rollout_max_context_len or r.rollout_max_response_len + (r.rollout_max_prompt_len or r.rollout_max_response_len)
        return int(min(p.max_tokens_per_gpu, longest * -(-self.s.flat.global_batch_size // self.s.flat.data_ranks)))

    def activations(self, tokens: int, again: float | None = None) -> int:
        """Bytes that the layers keep of `tokens` tokens of a rank for the backward pass. `again`: layers of which only the
        input is kept; None: as the settings say."""
        again = self._recomputed(int(self.config["num_hidden_layers"])) if again is None else again
        p, layout = self.s.perf, self.layout
        # A pipeline's first stage holds as many micro-batches as there are stages, of its part of the layers each.
        flight = 1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1.0
        if self.s.flat.on_megatron:
            along = layout.tp if layout.sequence_parallel else 1
            return activation_bytes(self.config, tokens, again, fused=True, tp=layout.tp, along=along, flight=flight)
        auto = p.compile == "auto" and p.attn_implementation != "sdpa" and self.narrow
        fused = p.compile == "on" or (auto and self.sizes.total >= WORTH_COMPILING)
        return activation_bytes(self.config, tokens, again, fused=fused and not self.s.model.true_on_policy_mode)

    def _recomputed(self, layers: int) -> float:
        p, given = self.s.perf, self.megatron
        if not self.s.flat.on_megatron:
            return recomputed(layers, p.gradient_checkpointing, p.gradient_checkpointing_layers)
        if given.get("recompute_granularity", "full" if p.gradient_checkpointing else None) != "full":
            return 0
        some = int(given.get("recompute_num_layers") or 1) * self.layout.pp * self.layout.vpp
        return min(some, layers) if given.get("recompute_method") == "block" else layers

    def notes(self, total: int) -> Iterator[str]:
        """Whether a full micro-batch may not fit beside the trainer. An estimate, since kernels differ."""
        if not (tokens := self._tokens()):
            return
        beside, need = self.bytes(), self.activations(tokens)
        if beside + need > total:
            yield (
                f"max_tokens_per_gpu = {self.s.perf.max_tokens_per_gpu} may take {_gib(need)} of activations beside {_gib(beside)} "
                f"of weights and optimizer state, of {_gib(total)}: {self._less(total - beside, tokens)}"
            )

    def _too_long(self, total: int, beside: int, full: int) -> SettingsError:
        text = f"its activations need about {_gib(full)} beside {_gib(beside)} of weights and optimizer state, of {_gib(total)}"
        way = self._less(total - beside, self._tokens())
        return refusal("max_tokens_per_gpu", self.s.perf.max_tokens_per_gpu, text, f"{way[0].upper()}{way[1:]}.")

    def _less(self, room: int, tokens: int) -> str:
        """What makes a full micro-batch fit into `room` bytes."""
        layers = int(self.config["num_hidden_layers"])
        ways = []
        if self.resident() < self.bytes() and self.activations(tokens) <= room + self.bytes() - self.resident():
            ways.append("set --fsdp-shard all")
        if (most := int(room / self.activations(1000) * 1000) // GRAIN * GRAIN) >= GRAIN:
            ways.append(f"lower --max-tokens-per-gpu to {most}")
        if self.activations(tokens, layers) < min(room, self.activations(tokens)):
            if self.s.flat.on_megatron:
                ways.append(f"set {FULL}")
            else:
                some = next(n for n in range(layers + 1) if self.activations(tokens, n) <= room)
                ways.append(f"set --gradient-checkpointing{f' --gradient-checkpointing-layers {some}' if some < layers else ''}")
        return ", or ".join(ways) or "train on more GPUs"


def parameters(directory: Path) -> Sizes:
    """Elements of all tensors in a directory's safetensors, from their headers; none where they cannot be read."""
    layers, experts, ends = 0, 0, []
    try:
        for file in directory.glob("*.safetensors"):
            for name, shape in header_of(file).shapes.items():
                n = prod(shape)
                if "embed_tokens" in name or name.startswith("lm_head"):
                    ends.append(n)
                elif ".experts." in name:
                    experts += n
                else:
                    layers += n
    except (OSError, ValueError):
        return Sizes(0)
    return Sizes(layers, experts, sum(ends), max(ends, default=0))


def host_bytes() -> int:
    """Memory of this host that is free."""
    return int(psutil.virtual_memory().available)


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this host; None without nvidia-smi."""
    try:
        return min(int(mib) << 20 for [mib] in of_gpus("memory.total", units=False))
    except ValueError:
        return None


def _gib(n: int) -> str:
    return f"{n / GIB:.1f} GiB"
