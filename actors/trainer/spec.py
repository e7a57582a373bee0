"""Start-up settings of the trainer room; importable without torch."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.trainer.backend import BackendConfig


class CourierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How versions travel. `transport`: its record, by name or dotted path. `deadline_s`: longest wait for engines, and for a
    broadcast."""

    transport: str = "disk"
    buffer_bytes: int = 512 << 20
    deadline_s: float = 60.0
    check_equal: bool = False
    copy: bool = True  # nccl: on the GPU, so that the weights may move while engines take it
    verbosity: int = 0  # how much the log says of each version
    still: str = ""  # directory that every version names, where no engine takes weights; empty = they travel
    keep_copy: bool = False  # disk: in host memory, to write files anew once the weights sleep or have moved on


class TurnSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`workers`: names of those whose engines share the trainer's GPUs and give way in its turn; empty = none does.
    `offload`: the trainer's backend sleeps in theirs. `deadline_s`: longest wait for all of them, at the trainer's start also for
    their boot. `lends`: they have the GPUs only while it waits long (--lend-trainer-gpus): for waits above `after_s`, and they are
    back within `return_s`."""

    workers: tuple[str, ...] = ()
    offload: bool = True
    deadline_s: float = 900.0
    lends: bool = False
    after_s: float = 5.0
    return_s: float = 20.0


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings; what has no default and the name of a setting is that setting.

    `save` empty = no checkpoints: a trainer that dies then ends the run.
    """

    backend: BackendConfig
    weights_dir: str
    num_rollout: int
    save: str = ""
    save_hf: str | None  # path with {rollout_id}: with each checkpoint, the model as a Hugging Face directory
    load: str = ""
    ckpt_step: int | None  # of another run's checkpoints in `load`
    no_load_optim: bool  # of those: with a new optimizer
    no_load_rng: bool
    fingerprint: str = ""
    keep_last: int
    save_retain_interval: int | None  # checkpoints of its multiples stay
    save_trigger_sentinel: str | None
    update_weights_interval: int
    lookahead: int = 0
    backend_name: str = "torch"
    async_save: bool
    ranks: int = 1  # processes over which the policy is sharded
    train_env_vars: str  # JSON object: added to this process's environment, and its children's; empty = none
    train_master: str  # HOST:PORT where they meet, started by others; empty = this process starts them, on its host
    ci_test: bool  # end the run when its first step fails its self-check
    debug_determinism: bool  # hashes of each step into determinism.jsonl
    record: str = ""  # path with {rollout_id}: write every trained batch there
    courier: CourierSpec = CourierSpec()
    turns: TurnSpec = TurnSpec()
    rollout_sample_filter_path: str  # functions of the user's that see each batch (batch_hooks.py); empty = none
    custom_convert_samples_to_train_data_path: str
    rollout_data_postprocess_path: str
    batch_hook_timeout_s: float
    hook_values: dict[str, Any] = {}  # the user's own, on their `args` beside the settings
    replay_from: str = ""  # path with {rollout_id}: train recorded batches instead of the bus's groups
