"""What the trainer asks of a training library, and the values that pass between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from actors.trainer.batch.batching import Balance
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.objective_config import ObjectiveConfig
from bus.errors import MilesAsyncError
from bus.messages.samples import Picture

if TYPE_CHECKING:  # the launcher reads this file for BackendConfig and loads neither torch nor numpy
    import numpy as np

    from actors.trainer.objective.samples import TrainSample
    from actors.trainer.transports.flat import NamedTensors


class TorchConfig(msgspec.Struct, frozen=True, kw_only=True, tag="torch"):
    """What the torch backend alone needs; a backend of the user's own gets it too."""

    gradient_checkpointing: bool
    gradient_checkpointing_layers: int  # for the first so many layers; 0 = for all
    fsdp_shard: str  # what several ranks share among them: all, optimizer or auto (batch/memory.py)
    compile: str  # auto (on a GPU), on or off
    attn_implementation: str  # auto, sdpa, flash_attention_2 or flash_attention_3
    model_implementation: str  # own, transformers or auto (torch_backend/implementations)
    trust_remote_code: bool  # code in the model's directory may run
    true_on_policy_mode: bool  # compute as SGLang's deterministic mode does (torch_backend/matched.py)
    lora_rank: int  # 0 = all weights are trained (lora/)
    lora_alpha: int
    target_modules: str | None
    exclude_modules: str | None
    lora_adapter_path: str | None
    lora_publish: str  # adapters alone, or merged into whole weights


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings that every backend needs, and its `own`; live ones come anew with each step. What has the name of a setting
    is that setting, filled in by the launcher: no default of it stands here."""

    hf_checkpoint: str
    ref_load: str  # directory of the frozen reference; empty = hf_checkpoint
    published_as: str = ""  # directory whose config.json, quantisation included, weights are published under; empty = hf_checkpoint
    model_dtype: Literal["float32", "bfloat16"]
    device: str = "auto"
    trainer_threads: int
    seed: int
    deterministic_mode: bool  # torch's deterministic algorithms alone
    save_debug_train_data: str | None  # path pattern of what each rank trained (training/dump.py); None = nowhere
    objective: ObjectiveConfig
    max_tokens_per_gpu: int
    log_probs_max_tokens_per_gpu: int
    use_dynamic_batch_size: bool
    micro_batch_size: int
    num_steps_per_rollout: int
    use_dynamic_global_batch_size: bool  # one step: the largest multiple of the ranks
    balance: Balance = "flops"  # what is evened out between several ranks
    optimizer: str
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_iters: int
    num_rollout: int
    no_save_optim: bool  # checkpoints are written, and may be read, without the optimizer's state
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    ref_update_interval: int | None
    selfcheck_logprob_tolerance: float  # mean |trainer - engine| log-prob that the first step may show
    critic_load: str  # directory the critic starts from; empty = hf_checkpoint
    critic_lr: float  # peak rate of the critic
    num_critic_only_steps: int  # first rollouts that train the critic and leave the policy
    opd_teacher_load: str  # directory of the teacher; empty = samples bring its log-probs
    use_rollout_routing_replay: bool  # routers choose what the engine chose for a token
    use_routing_replay: bool  # ... what they chose themselves in the log-prob pass
    offload_train_target: str  # where `sleep` moves device memory: cpu or disk; stay = nowhere
    offload_dir: str = ""  # directory of its file, for disk
    own: TorchConfig | MegatronConfig


class BatchRefused(MilesAsyncError):
    """A batch that cannot be trained: for its content, or under these settings, and then the text says which one to change.
    Nothing changed, unless it is `half_done`: some of its optimizer steps were made."""

    def __init__(self, text: str, *, half_done: bool = False) -> None:
        super().__init__(text)
        self.half_done = half_done


@dataclass(slots=True)
class BatchSample:
    """One sample of a step: its tokens, and what the objective knows of it (`train`)."""

    prompt_tokens: np.ndarray  # int32 [prompt_len]
    response_tokens: np.ndarray  # int32 [response_len]
    temperature: float
    train: TrainSample
    experts: np.ndarray | None = None  # integers [n, layers * top_k]: those the engine chose for its first n tokens
    pictures: tuple[tuple[Picture, bytes], ...] = ()  # that its prompt shows, with their bytes as the data has them


@dataclass(slots=True)
class StepBatch:
    """One training step. `step` is the number of updates inside the weights before it; `knobs` are live values that
    override start-up settings for this step (lr, eps_clip, eps_clip_high, kl_loss_coef, entropy_coef, tis_clip,
    clip_grad, max_weight_staleness)."""

    samples: list[BatchSample]
    step: int
    seed: int
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> dict[str, bytes]:
        """Bytes of its samples' pictures, by blob."""
        return {picture.blob: data for sample in self.samples for picture, data in sample.pictures}


@dataclass(slots=True)
class StepResult:
    """`packing`: positions of samples in each micro-batch, in order. `flags`: reason -> sample ids, counted events.
    `trained_spans`: response tokens with gradient, per sample position and version span of the sample. `shares`: of the weights
    that the reduction gives to all tokens of its optimizer step, per sample position. `undumped`: ranks whose file of trained data
    could not be written."""

    metrics: dict[str, float]
    packing: tuple[tuple[int, ...], ...]
    trained_spans: list[tuple[int, ...]]
    flags: dict[str, list[str]] = field(default_factory=dict)
    shares: Sequence[float] = ()
    skipped: bool = False  # non-finite gradient: weights unchanged, the data kept
    undumped: int = 0

    @property
    def trained_tokens(self) -> list[int]:
        """Response tokens with gradient, per sample position."""
        return [sum(spans) for spans in self.trained_spans]


class Checkpoint(Protocol):
    """A copy of all training state; the step goes on while it is written."""

    @property
    def meets(self) -> bool:
        """Whether `finish` must run where all of the backend does."""
        ...

    def write(self) -> None:
        """Write every file but the last ones, fsync each. Raises OSError."""
        ...

    def finish(self) -> None:
        """After `write`: what makes the directory a checkpoint. Raises OSError."""
        ...

    def write_hf(self, directory: Path) -> None:
        """The model alone, in the type that engines serve, as a Hugging Face directory with tokenizer; all at once. Raises
        OSError, FileExistsError for a directory that is no earlier export."""
        ...


class TrainBackend(ABC):
    """What the trainer asks of a training library. Called from one thread, never from the event loop."""

    unchanged = ""
    """Directory that engines booted from, of a backend that never changes its weights; else empty."""
    others = ""
    """Process ids of the ranks but this one, by host, after `setup`; empty where there is one rank."""

    @abstractmethod
    def setup(self, config: BackendConfig) -> None:
        """Load model, reference if the objective needs one, optimizer; called again it starts anew. Raises Refused for what cannot
        be trained."""

    @abstractmethod
    def train_step(self, batch: StepBatch) -> StepResult:
        """All optimizer steps of one rollout batch. Raises BatchRefused."""

    @abstractmethod
    def refuses(self, batch: StepBatch) -> str:
        """Why a batch cannot be trained, for its content, in one line; empty when it can. Changes nothing."""

    @abstractmethod
    def export(self, limit_bytes: int) -> Generator[NamedTensors]:
        """The weights as engines load them, in buckets of at most `limit_bytes`. All of them, in the same thread."""

    @abstractmethod
    def beside(self) -> dict[str, bytes]:
        """Small files of a published version: config.json and the like."""

    @abstractmethod
    def save(self, directory: Path) -> Checkpoint:
        """Copy all training state, to be written into `directory`, which exists and is empty."""

    @abstractmethod
    def load(self, directory: Path, drops: tuple[str, ...] = ()) -> None:
        """Restore what `save` wrote, but for what `drops` names: optim (a new optimizer), rng. CheckpointRefused, before anything
        changes, when files are missing, cut or of another model, or lack an optimizer that is asked for."""

    @abstractmethod
    def sleep(self) -> None:
        """Move all training state off the device, for others to use it; nothing but `wake` and `close` may follow."""

    @abstractmethod
    def wake(self) -> None:
        """Bring it back, to the last bit. Raises NoRoom when others still hold the memory."""

    @abstractmethod
    def weights_hash(self) -> str:
        """XXH3-128 over the float32 weights, names, types and shapes, for replay."""

    @abstractmethod
    def close(self) -> None:
        """Let go of other ranks, if any; harmless twice."""
