"""The inference engine as the generation room sees it: what it is asked (`Engine`), the values that cross the border, and its two
failures. Which kinds there are: engines/records.py.

Always true: a Chunk holds tokens of one policy version only, and the version is the one the engine stated for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from actors.runtime.prompts import RoutedShape
from bus.errors import Poison, Transient
from bus.messages.samples import Routed
from bus.messages.weights import Bucket, TensorMeta

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
    adapter: str = ""
    """Name of the adapter that is to answer; empty = the engine's weights as they are."""
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


@dataclass(frozen=True, slots=True)
class Attached:
    """`exact`: chunks never mix tokens of two versions when the engine is paused by retracting, `exact_in_place`: when it is
    paused in place. `tp_size`: GPUs of the engine. `note`: what could not be checked. `sight`: what to warn of before it is shown
    pictures."""

    exact: bool
    tp_size: int
    note: str = ""
    exact_in_place: bool = False
    sight: str = ""


class Engine(Protocol):
    """One engine that runs. Each verb raises EngineUnavailable (another engine, or a later try, may do) or RequestRefused (it never
    will), within a deadline of the engine's own. Those with a body need not be written: they say what an engine is that cannot.

        class Mine(Engine):
            async def look(self, *, own, model_path, routed):
                return Attached(exact=True, tp_size=1)

    An update is: pause, load by one of `update_...` or `receive`, resume; requests under way go on, or end as the mode says.
    """

    has_router: ClassVar[bool] = False
    """A router stands before it and its peers."""
    counts_when_receiving: bool = False
    """`receive` can be asked to count."""

    async def look(self, *, own: bool, model_path: str, routed: bool) -> Attached:
        """What it is, once it runs. BootRefused where it must not be used: another model than that of `model_path`, or `routed` and
        it does not tell the experts of its tokens. `own`: this worker started it."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks until the sample ends. Closing the iterator early ends the request on the engine."""
        ...

    async def abort(self, rid: str) -> None:
        """Requests of this id sent from here end with what they have (finish "abort"). An unknown id is not an error."""
        ...

    async def abort_all(self) -> None:
        """Requests of everyone on this engine end with what was handed out; paused ones at once."""
        ...

    async def end_running(self, patience_s: float) -> None:
        """As `abort_all` if requests from here are on their way, and wait until these have ended, not longer than this."""
        await self.abort_all()

    async def pause(self, mode: PauseMode) -> None:
        """No token is made until `resume`. retract: running requests are computed anew afterwards; in_place: they keep
        their keys and values; abort: they end."""
        ...

    async def resume(self) -> None:
        """Make tokens again."""
        ...

    async def pause_counted(self, version: str) -> int | None:
        """Pause in place and count the tokens of each request as made by `version` or before it. How many requests there are; None,
        and nothing is paused, where the engine cannot tell."""
        return None

    def count_as_older(self, version: str) -> bool:
        """Of an engine paused in place that cannot count: tokens of chunks that may mix `version` and the next count as made by
        `version`. False where that cannot be told, and their requests must end."""
        return False

    async def flush(self) -> bool:
        """Empty the prefix cache; False if the engine declined because requests are at work or queued."""
        return False

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Give memory back for another user; only while paused, with all requests aborted, else RequestRefused."""
        raise RequestRefused("this engine gives no memory back")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Take it again. Weights must be back before they are updated, all of it before a token is made."""

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        """Load safetensors from a directory the engine can read, and state `version` from then on. Refused (RequestRefused) without
        any change if they do not fit."""
        ...

    async def update_weights_from_tensor(self, handles: Sequence[str], version: str | None, quick: Sequence[str] = ()) -> None:
        """Load one flat bucket of memory that the trainer exported, one handle per rank of the engine. `version`: with the last."""
        raise RequestRefused("this engine takes whole files alone")

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        """Join a broadcast group; waits for all its members."""
        raise RequestRefused("this engine takes whole files alone")

    async def update_weights_from_distributed(self, tensors: Sequence[TensorMeta], group: str, version: str | None) -> None:
        """Receive one flat bucket from rank 0 of a group and load it. `version`: with the last."""
        raise RequestRefused("this engine takes whole files alone")

    async def destroy_weights_update_group(self, group: str) -> None:
        """Leave a group; one that is gone is not an error."""

    async def receive(self, buckets: Sequence[Bucket], group: str, version: str, before: str | None = None) -> bool:
        """All buckets of a version over a group in one call; False, and nothing was received, where that cannot be done. `before`:
        count the tokens so far as made by it, as `pause_counted` does."""
        return False

    async def weights_checksum(self) -> Mapping[str, Any]:
        """The engine's own checksum of each of its tensors, by its names; equal weights give equal ones."""
        raise RequestRefused("this engine tells no checksums")

    async def set_version(self, version: str) -> None:
        """Name the weights now served; running requests go on."""
        ...

    async def load(self) -> EngineLoad:
        """How full it is. Cheap: may be asked every second."""
        return EngineLoad()

    @property
    def routed(self) -> bool:
        """Whether requests go through its router now."""
        return False

    async def join(self) -> None:
        """Let its router use it from now on."""
        return

    async def leave(self) -> None:
        """No new requests from its router."""
        return

    async def renew(self) -> str:
        """Join again where its router forgot it; called now and then. What changed, for the operator."""
        return ""

    async def close(self) -> None:
        """What is under way ends at once, as EngineUnavailable."""
        ...


class BootedEngine(Protocol):
    """An engine as a child of its worker."""

    note: str
    """How it runs otherwise than it was asked to; empty = as asked."""
    inside: Path | None
    """Folder of letters to our function inside it; None = it runs none."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        ...

    async def start(self) -> str:
        """Boot; its URL. EngineUnavailable: try again. BootRefused: the same again would end the same."""
        ...

    async def stop(self) -> None:
        """End it and every process it started; harmless twice."""
        ...


Connect = Callable[[str, Path | None], Engine]


class Opened(NamedTuple):
    """What a kind of engine gives a worker. `connect`: (URL, folder of letters to our function inside it) -> the engine there;
    None = there is no engine. `server`: what starts it; None = it runs already, at the spec's `engine_url`."""

    connect: Connect | None
    server: BootedEngine | None = None
