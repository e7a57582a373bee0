"""What a Megatron training is made of: settings checked before anything is allocated, model chunks wrapped, configurations filled.

Every field of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig may be given by its own name; what this backend
decides itself, or can't do, is refused in one line.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from actors.runtime.hooks import load_hook
from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig
from actors.trainer.batch.batching import CostModel
from actors.trainer.megatron_backend import checkpoint, directory, model, torch_dist, weights
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.megatron_backend.flags import OF_MODEL, fields_against, is_ours
from actors.trainer.megatron_backend.grouped import GroupedExperts
from actors.trainer.megatron_backend.layout import layout_of, refusals
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.training.routes import mode_of

log = logging.getLogger(__name__)
SHARED = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
NEEDS_ENGINE = "it needs a GPU and Transformer Engine; install transformer-engine[pytorch] beside torch, or leave it out"
ENGINE_FIELDS = ("use_precision_aware_optimizer", "apply_rope_fusion", "moe_grouped_gemm", "delay_wgrad_compute",
                 "fine_grained_activation_offloading", "gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion",
                 "fused_single_qkv_rope", "use_te_activation_func", "cpu_offloading")  # fmt: skip
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def own(config: BackendConfig) -> MegatronConfig:
    """The backend's own settings."""
    if not isinstance(config.own, MegatronConfig):
        raise TypeError(f"the Megatron backend was given {type(config.own).__name__}, of another backend")
    return config.own


def source_of(config: BackendConfig) -> str:
    """The Hugging Face directory that says what the model is."""
    return config.published_as or config.hf_checkpoint


def fields_of(kind: type) -> set[str]:
    """Names of a configuration's fields."""
    return {f.name for f in dataclasses.fields(kind)}


TRANSFORMER, OPTIMIZER, DDP = (fields_of(k) for k in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig))


def given_of(own: MegatronConfig) -> dict[str, Any]:
    """Fields of megatron-core that settings give, as it takes them: names with underscores, types and enumerations as such. Raises
    Refused for a value by a name that is none."""
    given = {name.replace("-", "_"): value for name, value in own.megatron.items()}
    for name, value in given.items():
        known: Mapping[str, Any] = TYPES if name.endswith("_dtype") and name in OPTIMIZER else {}
        known = AttnBackend.__members__ if name == "attention_backend" else known
        if known and isinstance(value, str):
            if value not in known:
                raise Refused(f"megatron.{name}={value}: it is one of {', '.join(known)}")
            given[name] = known[value]
    return given


def check(config: BackendConfig, own: MegatronConfig, world: int) -> None:
    """Raises Refused, all reasons in one line, before a process group or a model exists; then for directories, whose headers are
    read."""
    arch = directory.read(source_of(config))
    said = refusals(layout_of(own, world), arch.shape)
    given = given_of(own)
    said += [f"megatron.{name}: megatron-core has no such field" for name in given.keys() - TRANSFORMER - OPTIMIZER - DDP]
    said += fields_against(given, arch)
    if given.get("store_param_remainders"):
        said.append("megatron.store_param_remainders: no checkpoint of such masters can be read again; leave it out")
    if given.get("optimizer_cpu_offload") and not given.get("use_precision_aware_optimizer"):
        said.append("megatron.optimizer_cpu_offload: none can be loaded again; add --use-precision-aware-optimizer")
    if given.get("overlap_param_gather") and not given.get("use_distributed_optimizer", config.model_dtype != "float32"):
        said.append("megatron.overlap_param_gather: every rank has all weights; leave it out, or add --use-distributed-optimizer")
    if mode_of(config) and not arch.experts:
        said.append(f"{source_of(config)} has no experts: leave out --use-rollout-routing-replay and --use-routing-replay")
    if not arch.experts:
        losses = [name for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if given.get(name)]
        said += [f"megatron.{name}: {source_of(config)} has no experts; leave it out" for name in losses]
    for name, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")) if mode_of(config) else ():
        if given.get(name) == value:
            said.append(f"megatron.{name}={value}: such routers cannot be told what to choose; leave it out, or routing replay")
    if config.objective.estimator.critic:
        said.append("advantage_estimator=ppo: the Megatron backend has no critic yet; use --train-backend torch")
    if arch.transformer.get("window_size") and own.context_parallel_size > 1 and model.has_transformer_engine():
        said.append(f"context_parallel_size={own.context_parallel_size}: {arch.family} has windows, which are not cut; use 1")
    if config.optimizer != "adam":
        said.append(f"optimizer={config.optimizer}: the Megatron backend has adam; use it, or --train-backend torch")
    if not model.has_transformer_engine():
        said += [f"megatron.{name}: {NEEDS_ENGINE}" for name in ENGINE_FIELDS if given.get(name)]
        if (asked := given.get("transformer_impl", "local")) != "local":
            said.append(f"megatron.transformer_impl={asked}: {NEEDS_ENGINE}")
        if torch.cuda.is_available() and own.context_parallel_size > 1:
            said.append(f"context_parallel_size={own.context_parallel_size}: {NEEDS_ENGINE}")
    if said:
        raise Refused("; ".join(said))
    for path in (*hooks_of(own).values(), *filter(None, (own.custom_model_provider_path,)), *own_spec(own.spec)):
        load_hook(path)  # said here, or a model would be loaded before
    for path in {config.hf_checkpoint, config.ref_load, config.opd_teacher_load} - {""}:
        if _is_torch_dist(path):
            torch_dist.check(torch_dist.iteration(path), arch)
        else:
            directory.index(path, arch)


def _is_torch_dist(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in (torch_dist.TRACKER, torch_dist.CONTENTS))


@contextmanager
def told_by_megatron() -> Iterator[None]:
    """What megatron-core finds wrong with its settings while something is made of them, in one line."""
    try:
        yield
    except (AssertionError, ValueError, ImportError, NotImplementedError, OSError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or f"{where.line} ({Path(where.filename).name}, line {where.lineno})"
        raise Refused(f"megatron-core refuses these settings: {text}") from error


class Model:
    """This rank's chunks of the policy, each in Float16Module (bf16) and DistributedDataParallel."""

    def __init__(self, config: BackendConfig, own: MegatronConfig, groups: Groups) -> None:
        self.source = source_of(config)
        self.architecture = arch = directory.read(self.source)
        layout = layout_of(own, torch.distributed.get_world_size())
        cuda = torch.cuda.is_available()
        self.dtype: torch.dtype = getattr(torch, config.model_dtype)
        torch.manual_seed(config.seed)
        if cuda:
            model_parallel_cuda_manual_seed(config.seed)
        given = given_of(own)
        provider = load_hook(own.custom_model_provider_path) if own.custom_model_provider_path else None
        narrow = self.dtype != torch.float32
        with told_by_megatron():
            ddp = DistributedDataParallelConfig(**{
                "grad_reduce_in_fp32": True, "use_distributed_optimizer": narrow, **_only(given, DDP)
            })  # fmt: skip
            self.optimizer_config = self._optimizer(config, given, ddp)
            self.bare = model.build(
                arch, layout, dtype=self.dtype, spec=own.spec, provider=provider,
                vocab_divisible_by=own.make_vocab_size_divisible_by, expert_kernel=own.moe_expert_kernel,
                **self._transformer(own, given),
            )  # fmt: skip
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.vocab = arch.vocab
        self.chunks: list[Any] = []
        with told_by_megatron():
            for k, chunk in enumerate(self.bare):
                transformer = chunk.config
                transformer.calculate_per_token_loss = True  # gradients are summed: the loss brings its own divisor
                wrapped = Float16Module(transformer, chunk) if narrow else chunk
                self.chunks.append(DistributedDataParallel(transformer, ddp, wrapped, disable_bucketing=k > 0))
                for experts in (m for m in chunk.modules() if isinstance(m, GroupedExperts)):
                    experts.overlapped = ddp.overlap_grad_reduce
        shape = arch.shape
        transformer = arch.transformer
        self.cost = CostModel.of_shape(
            hidden=transformer["hidden_size"], layers=shape.layers, ffn=arch.ffn_of_a_token, vocab=arch.vocab, heads=shape.heads,
            kv_heads=shape.groups, head_dim=transformer["kv_channels"],
        )  # fmt: skip

    def _optimizer(self, config: BackendConfig, given: Mapping[str, Any], ddp: DistributedDataParallelConfig) -> OptimizerConfig:
        shared = {name: getattr(config, name) for name in SHARED}
        return OptimizerConfig(**{
            **shared, "bf16": self.dtype == torch.bfloat16, "params_dtype": self.dtype, "optimizer_offload_fraction": 1.0,
            "store_param_remainders": False,  # a checkpoint of masters that are kept as remainders can't be read
            "use_distributed_optimizer": ddp.use_distributed_optimizer, "overlap_param_gather": ddp.overlap_param_gather,
            **_only(given, OPTIMIZER), **({} if torch.cuda.is_available() else {"optimizer_cpu_offload": False}),  # it is there
        })  # fmt: skip

    def _transformer(self, own: MegatronConfig, given: Mapping[str, Any]) -> dict[str, Any]:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        latent = bool(self.architecture.transformer.get("multi_latent_attention"))
        # The fused kernel for packed samples doesn't know interleaved channels, and megatron-core doesn't say so.
        rope = not (own.no_rope_fusion or latent or self.architecture.transformer.get("rotary_interleaved"))
        silu = self.architecture.transformer["activation_func"] == "silu"  # of others Megatron's kernels round otherwise
        fast = {"apply_rope_fusion": rope, "bias_activation_fusion": silu, "bias_dropout_fusion": True}
        interleaved = {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # two stages would mix up what a batch of both ways sends
        return {
            "variable_seq_lengths": False,
            **(interleaved if own.virtual_pipeline_model_parallel_size else {}),
            **(fast if model.has_transformer_engine() else {}),
            **(full if own.gradient_checkpointing else {}),
            **_only(given, TRANSFORMER - OF_MODEL.keys()),  # those only repeat what the model has
            **_attention(given.get("attention_backend")),
        }

    def load(self, path: str) -> None:
        """Weights of this architecture, out of a Hugging Face directory or a torch_dist checkpoint."""
        if _is_torch_dist(path):
            checkpoint.load_sharded(self.bare, self.architecture, torch_dist.iteration(path))
        else:
            weights.load_hf(self.bare, self.architecture, path)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank, by chunk and name."""
        return {f"{k}.{name}": t for k, chunk in enumerate(self.bare) for name, t in _tensors(chunk)}


def _attention(asked: AttnBackend | None) -> dict[str, Any]:
    """Transformer Engine calls flash-attn where that is installed; without it, it would find no kernel in the first step."""
    if asked is not AttnBackend.flash or any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_3"))):
        return {}
    log.warning("attention_backend=flash: flash-attn is not installed; Transformer Engine chooses among the kernels that it brings")
    return {"attention_backend": AttnBackend.auto}


def _tensors(chunk: Any) -> Iterable[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    yield from ((name, t) for name, t in chunk.named_buffers() if name in chunk.state_dict())


def _only(given: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def args_of(config: BackendConfig, own: MegatronConfig, transformer: TransformerConfig) -> SimpleNamespace:
    """All that is set, by name, as functions for Miles read it."""
    structs = ({name: getattr(x, name) for name in x.__struct_fields__} for x in (config.objective, config, own))
    named = {name: value for fields in structs for name, value in fields.items()}
    return SimpleNamespace(**{**vars(transformer), **named, **given_of(own)})


def own_spec(spec: Sequence[str]) -> tuple[str, ...]:
    """The dotted path of the user's `--spec`; none where the family's own record answers it."""
    return (".".join(spec),) if spec and not is_ours(spec) else ()


def hooks_of(own: MegatronConfig) -> dict[str, str]:
    """Short name -> dotted path, of the hooks that are set."""
    paths = {
        "init": own.custom_megatron_init_path,
        "before_log_prob": own.custom_megatron_before_log_prob_hook_path,
        "before_train_step": own.custom_megatron_before_train_step_hook_path,
    }
    return {name: path for name, path in paths.items() if path}
