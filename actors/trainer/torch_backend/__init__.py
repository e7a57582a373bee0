"""Training backend on torch and transformers: packed micro-batches, AdamW or Muon, one process or FSDP2.

Read in this order: backend (the verbs), core (what a rank owns), step (a training step), layout and attention (packing),
head (log-probs), state and files (what lies on disk), ranks and follower (several processes).
"""

from actors.trainer.torch_backend.backend import TorchBackend

__all__ = ("TorchBackend",)
