"""The critic of `advantage_estimator=ppo`: a transformers backbone with one value per token, and its own AdamW.

A value stands beside each response token and is read off the row that predicts it: what is expected before that token is
known. The backbone starts from `critic_load` (or the policy's own model directory). The head is that directory's
`score.weight` [1, D], as reward models have it, else zeros: the first values are 0 and no chance is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig
from actors.trainer.torch_backend.layout import MicroBatch
from actors.trainer.torch_backend.model import load_backbone
from actors.trainer.torch_backend.optim import Optimizer, Weights

HEAD = "score.weight"
Place = Callable[[nn.Module], None]
"""Brings a module to its device: sharded over the ranks, or whole."""


class Critic(nn.Module):
    """Parameters are named `model.<Hugging Face name>` and `score.weight`."""

    def __init__(self, backbone: Any, head: Tensor | None) -> None:
        super().__init__()
        self.model = backbone
        self.score = nn.Linear(backbone.config.hidden_size, 1, bias=False)
        with torch.no_grad():
            self.score.weight.copy_(torch.zeros_like(self.score.weight) if head is None else head)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Values of the R response tokens, float32 [R]."""
        out = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout)
        hidden = out.last_hidden_state[0].index_select(0, batch.rows)
        return torch.mv(hidden.float(), self.score.weight[0].float())

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.model.layers)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """All parameters by name."""
        return dict(self.named_parameters())


def load_critic(path: str, *, gradient_checkpointing: bool = False) -> Critic:
    """A critic in float32 on the CPU. Raises Refused, in one line, for what is no model directory or a head of another
    shape."""
    backbone = load_backbone(path, gradient_checkpointing=gradient_checkpointing)
    head = _stored_head(Path(path))
    width = backbone.config.hidden_size
    if head is not None and tuple(head.shape) != (1, width):
        raise Refused(
            f"{path}: {HEAD} has shape {list(head.shape)}, a critic's head is [1, {width}]. Give critic_load a model with "
            "one value per token, or without a head."
        )
    return Critic(backbone, head)


def _stored_head(directory: Path) -> Tensor | None:
    for file in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                if HEAD in tensors.keys():  # noqa: SIM118 - not a mapping
                    return tensors.get_tensor(HEAD).float()
        except (SafetensorError, OSError) as error:
            raise Refused(f"{file} cannot be read: {error}. Give critic_load complete safetensors.") from error
    return None


class CriticTraining:
    """The critic, its float32 weights and its optimizer; lives beside the policy's in `Core`."""

    def __init__(self, config: BackendConfig, place: Place, *, masters: bool, checkpointing: bool) -> None:
        self.model = load_critic(config.critic_load or config.hf_checkpoint, gradient_checkpointing=checkpointing)
        place(self.model)
        self.weights = Weights(self.model.named_weights(), masters=masters)
        self.optimizer = Optimizer(self.weights, msgspec.structs.replace(config, optimizer="adam"))
        self.shapes = {n: tuple(p.shape) for n, p in self.weights.params.items()}
