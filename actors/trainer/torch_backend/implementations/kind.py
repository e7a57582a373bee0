"""What a way to run a model is: one record, with the module that it makes of transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from actors.trainer.torch_backend.policy import Policy


class SampleFeed(Enum):
    """How samples reach the class."""

    PACKED = "packed"
    """One row for all, attention inside each sample by the kernel of our own families."""
    MASKED = "packed, by a mask"
    """One row for all; positions begin again at each sample, from which the class makes a mask of [tokens, tokens]."""
    ROWS = "padded rows"
    """One row a sample, padded on the right, with mask and positions."""
    SINGLE = "single samples"
    """One sample, and nothing said but its tokens: what the others are held to."""


class HeadRows(Enum):
    """What is made of the hidden states of rows that predict a trained token."""

    LINEAR = "linear"
    """One product and nothing before or behind: `head.token_head`, which never holds all logits."""
    ROWS = "rows"
    """The class's own head, with its biases, scales and caps, of these rows."""
    ALL = "all"
    """The same of all rows."""


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


def first_line(error: BaseException) -> str:
    """Of what a library raised."""
    text = str(error).strip().split("\n")[0]
    return text if text.endswith(".") else f"{text}."
