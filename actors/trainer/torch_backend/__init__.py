"""Training on torch and transformers: packed micro-batches, AdamW or Muon, one process or FSDP2.

Read in this order: core (what a rank owns), passes (forward, backward, update: the verbs of `training.step`), layout and attention
(packing), head (log-probs), shards (several processes).
"""

from typing import cast

from actors.trainer.torch_backend.core import Core
from actors.trainer.training.ranked import RankedBackend

__all__ = ("TorchBackend",)


class TorchBackend(RankedBackend):
    """`open_backend("torch")`, for whoever looks into its parts."""

    def __init__(self) -> None:
        super().__init__("torch")

    @property
    def core(self) -> Core:
        return cast("Core", super().core)
