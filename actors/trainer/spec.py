"""Start-up settings of the trainer room; importable without torch."""

from __future__ import annotations

import msgspec

from actors.trainer.backend import BackendConfig


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings. `save` empty = no checkpoints: a trainer that dies then ends the run."""

    backend: BackendConfig
    weights_dir: str
    num_rollout: int
    save: str = ""
    load: str = ""
    fingerprint: str = ""
    keep_last: int = 2
    save_trigger_sentinel: str = ""
    update_weights_interval: int = 1
    lookahead: int = 0
    backend_name: str = "torch"
    async_save: bool = True
    record: str = ""  # path with {rollout_id}: write every trained batch there
    replay_from: str = ""  # path with {rollout_id}: train recorded batches instead of the bus's groups


__all__ = ("TrainerSpec",)
