"""One request inside the embedded engine: what was asked, what was made, what the HTTP side was told.

The scheduler's thread writes it; the HTTP side reads only prefixes whose length it was told through `Progress`, so
neither needs a lock: lists only grow, and a Progress is posted after the tokens it counts.
"""

import asyncio
import hashlib
from collections import deque
from typing import Any, NamedTuple

import torch

from actors.generation.embedded.pictures import View
from actors.generation.embedded.sampling import ALL_TOKENS, GREEDY_BELOW

FinishReason = dict[str, Any]

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


class Progress(NamedTuple):
    """The request has `n_tokens` tokens; those since the Progress before it were all made by weights `version`."""

    n_tokens: int
    version: str
    finish: FinishReason | None


class Request:
    """Sampling limits are resolved here: temperature 1 stands in for a greedy row, stop ids include end-of-sequence."""

    __slots__ = (
        "cut",
        "experts",
        "finish",
        "greedy",
        "inbox",
        "input_pairs",
        "limit",
        "pairs",
        "prompt",
        "retractions",
        "rid",
        "routed_from",
        "score_from",
        "seed",
        "sent",
        "stop_ids",
        "stream",
        "temperature",
        "tokens",
        "top_k",
        "top_p",
        "view",
        "wake",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt: list[int],
        limit: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_ids: frozenset[int] = frozenset(),
        seed: int | None = None,
        stream: bool = False,
        score_from: int = 0,
        routed_from: int | None = None,
        view: View | None = None,
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.limit = limit
        self.greedy = temperature < GREEDY_BELOW or top_k == 1
        self.temperature = 1.0 if temperature < GREEDY_BELOW else temperature
        self.top_p = top_p
        self.top_k = top_k if top_k > 0 else ALL_TOKENS
        self.cut = not self.greedy and (self.top_p < 1.0 or self.top_k < ALL_TOKENS)
        self.stop_ids = stop_ids
        self.seed = (seed if seed is not None else _seed_of(rid)) & (2**64 - 1)
        self.stream = stream
        self.tokens: list[int] = []
        self.pairs: list[tuple[float, int, None]] = []
        """(log-probability, token id, no text), one per token, as SGLang lays them out."""
        self.score_from = score_from
        """First prompt token whose log-probability is asked; only where limit is 0."""
        self.input_pairs: list[tuple[float | None, int, None]] = []
        """The same for prompt tokens from score_from on, the first without a number. Set once, before the only Progress."""
        self.routed_from = routed_from
        """First token whose experts are asked for; None: no token's."""
        self.experts: list[torch.Tensor] = []
        """int32 [layers * top_k] of each token that was read, as it was first read."""
        self.sent = 0
        """Tokens in the last Progress."""
        self.retractions = 0
        self.finish: FinishReason | None = None
        self.view = view
        """Its pictures."""
        self.inbox: deque[Progress] = deque()
        self.wake = asyncio.Event()

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
