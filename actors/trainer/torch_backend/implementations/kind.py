"""What a way to run a model is: one record, with the module that it makes of transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.trainer.torch_backend.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to train the models that it knows."""

    name: str
    """As `--model-implementation` says it."""
    lacks: Callable[[Any], str]
    """Of a transformers config: why it cannot be trained this way; empty = it can."""
    loads: Any
    """transformers' auto class."""
    attention: dict[str, Any]
    """Options of `from_pretrained` that choose attention."""
    configured: Callable[[Any], None]
    """Changes a config before the model is built."""
    prepared: Callable[[Any], None]
    """Changes the model after it is loaded."""
    recomputes: Callable[[Any], None]
    """Makes its layers compute again in the backward (gradient checkpointing)."""
    policy: Callable[[Any], Policy]
    critic: bool = True
    """A critic's backbone may be of this way."""
