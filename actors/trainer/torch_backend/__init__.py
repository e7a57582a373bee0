"""Training backend on torch and transformers: packed micro-batches, AdamW or Muon, one process or FSDP2.

Read in this order: backend (what the trainer calls), core (what a rank owns), passes (forward, backward, update: the verbs of
`training.step`), layout and attention (packing), head (log-probs), ranks and follower (several processes).
"""

from actors.trainer.torch_backend.backend import TorchBackend

__all__ = ("TorchBackend",)
