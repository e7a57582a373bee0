"""One request inside the embedded engine: what was asked, what was made, what the HTTP side was told.

The scheduler's thread writes it; the HTTP side reads only prefixes whose length it was told through `Progress`, so
neither needs a lock: lists only grow, and a Progress is posted after the tokens it counts.
"""

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from actors.generation.engines.embedded.pictures import View
from actors.generation.engines.embedded.sampling import ALL_TOKENS, GREEDY_BELOW

FinishReason = dict[str, Any]

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


class Progress(NamedTuple):
    """The request has `n_tokens` tokens; those since the Progress before it were all made by weights `version`."""

    n_tokens: int
    version: str
    finish: FinishReason | None


@dataclass(slots=True, eq=False)
class Request:
    """Sampling limits are resolved here: temperature 1 stands in for a greedy row, stop ids include end-of-sequence."""

    rid: str
    prompt: list[int]
    limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: frozenset[int] = frozenset()
    seed: int | None = None
    """As asked; None: one that follows from the id."""
    stream: bool = False
    score_from: int = 0
    """First prompt token whose log-probability is asked; only where limit is 0."""
    routed_from: int | None = None
    """First token whose experts are asked for; None: no token's."""
    view: View | None = None
    """Its pictures."""
    tokens: list[int] = field(default_factory=list)
    pairs: list[tuple[float, int, None]] = field(default_factory=list)
    """(log-probability, token id, no text), one per token, as SGLang lays them out."""
    input_pairs: list[tuple[float | None, int, None]] = field(default_factory=list)
    """The same for prompt tokens from score_from on, the first without a number. Set once, before the only Progress."""
    experts: list[torch.Tensor] = field(default_factory=list)
    """int32 [layers * top_k] of each token that was read, as it was first read."""
    sent: int = 0
    """Tokens in the last Progress."""
    retractions: int = 0
    finish: FinishReason | None = None
    inbox: deque[Progress] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    draws_from: int = 0
    """The seed, as 64 bits."""
    greedy: bool = False
    cut: bool = False

    def __post_init__(self) -> None:
        self.greedy = self.temperature < GREEDY_BELOW or self.top_k == 1
        self.temperature = 1.0 if self.temperature < GREEDY_BELOW else self.temperature
        self.top_k = self.top_k if self.top_k > 0 else ALL_TOKENS
        self.cut = not self.greedy and (self.top_p < 1.0 or self.top_k < ALL_TOKENS)
        self.draws_from = (_seed_of(self.rid) if self.seed is None else self.seed) & (2**64 - 1)

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt) + len(self.tokens)

    def append(self, token: int, logprob: float) -> FinishReason | None:
        """Take one token; returns why the request ends with it, if it does."""
        self.tokens.append(token)
        self.pairs.append((logprob, token, None))
        if token in self.stop_ids:
            self.finish = {"type": "stop", "matched": token}
        elif len(self.tokens) >= self.limit:
            self.finish = {"type": "length", "length": self.limit}
        return self.finish

    def routed(self, chosen: torch.Tensor) -> None:
        """Experts of all tokens that it read, int32 [length, layers * top_k], or of the newest alone."""
        if self.routed_from is not None:
            self.experts += chosen[max(0, len(self.experts) - (self.length - len(chosen))) :].clone()


def _seed_of(rid: str) -> int:
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little")
