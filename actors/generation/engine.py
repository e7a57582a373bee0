"""The inference engine as the generation room sees it: values that cross the border, and its two failures. What it is asked:
sglang_client.py.

Always true: a Chunk holds tokens of one policy version only, and the version is the one the engine stated for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from actors.runtime.prompts import RoutedShape
from bus.errors import Poison, Transient
from bus.messages.samples import Routed

PauseMode = Literal["abort", "retract", "in_place"]
Finish = Literal["stop", "length", "abort"]


class EngineUnavailable(Transient):
    """This engine did not answer, answered with a server error, or broke off; another one, or a later try, may do."""


class BootRefused(EngineUnavailable):
    """This engine cannot start, or must not be used, as it is set up; the same again would end the same."""


class VersionUnknown(EngineUnavailable):
    """Tokens name a version that this worker was never told of; without it they cannot be trained."""


class RouteBroken(EngineUnavailable):
    """A request broke off on its way, but our own engine is well: send it again with the tokens so far."""


class RequestRefused(Poison):
    """The engine says that this request can never be served (too long, ill-formed)."""


class AnswerRefused(RequestRefused):
    """The engine answered what cannot be an answer to this request; its tokens are not trained."""


class AnswerBroken(AnswerRefused):
    """The answer cannot be read, from here on; asked again, it may be whole."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """One sample to generate. Tokens in, tokens out: text is never sent."""

    rid: str
    """Names the sample in `abort` and, as a part, in the engine's log."""
    input_ids: list[int]
    """Prompt, followed by the prefix of a resumed sample."""
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    """0 <= seed < 2**63. With it the draw depends on seed and token position only (SGLang: in deterministic mode)."""
    extra_key: str | None = None
    """Partitions the engine's prefix cache, e.g. by policy version."""
    routing_key: str | None = None
    """A router keeps requests of one key on one engine."""
    vocabulary: int = 0
    """Token ids of the answer are below it; 0 = not known."""
    routed: RoutedShape | None = None
    """Form of the experts to answer with; None = none."""
    routed_from: int = 0
    """First input token whose experts are wanted."""
    images: tuple[str, ...] = ()
    """Data URLs of the pictures, in the order of their placeholders in `input_ids`, one for each of their tokens."""


class Chunk(msgspec.Struct, frozen=True):
    """New tokens of one request since the chunk before."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Same length: log softmax(logits / temperature) of each token, before top-p and top-k."""
    weight_version: str
    """The version that made these tokens; of an empty chunk, the version served now."""
    finish: Finish | None = None
    """Set on the last chunk only."""
    experts: Routed | None = None
    """Of the last `n` tokens that the engine read (all but the newest); on the last chunk only."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """An engine that answers."""

    weight_version: str
    model_path: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full an engine is, with the requests of all its clients. None where it does not tell."""

    running: int | None = None
    waiting: int | None = None
    """Requests in its queue."""
    kv_used: float | None = None
    """Share of the room for keys and values that requests hold, 0 to 1."""
    max_running: int | None = None
    """Requests that it runs at once at most."""
