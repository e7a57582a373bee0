"""What a rollout program meets: its task, the session it generates with, and the trajectories it returns.

    async def rollout(task, session):
        answer = await session.generate(task.prompt)
        return [Trajectory(task.prompt, [answer])]

Always true: a token of kind `model` was made by this session's engine and is in one trajectory at most; everything else is `env`:
no log-prob, no version, no gradient. A program may be run again from its start on another worker: what it asked of the session
before is then answered from the episode's journal, so between two calls it must depend on nothing but their answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from actors.generation.rollouts.world import World
from bus.messages.samples import Sampling
from bus.messages.versions import VersionSpan, spans_within

Watch = Callable[[Sequence[int]], bool]


class Task(msgspec.Struct, frozen=True):
    """One sample of one prompt group, as its program sees it."""

    sample_id: str
    """`<group_id>/<index>`, the same at every attempt."""
    group_id: str
    index: int
    n_samples: int
    prompt: list[int]
    """Token ids of the prompt."""
    prompt_text: str = ""
    label: str = ""
    metadata: dict[str, Any] = {}
    sampling: Sampling = Sampling()
    """`max_new_tokens` counts the model's tokens of the whole episode."""
    eval_name: str = ""
    """Data set of an evaluation sample; empty for training."""


class Segment:
    """Consecutive tokens of one kind. Those of the model come from `Session.generate` only, the others from `env`.

    spans: the versions that made them, over all tokens of the model; empty for env. finish: `stop`: a stop token or text
    (which ends with the last one here) or `watch`; `length`: no room is left. call: number of the call that made it; -1 for env.
    """

    __slots__ = ("_logprobs", "_tokens", "call", "finish", "kind", "spans")

    def __init__(
        self,
        kind: Literal["model", "env"],
        tokens: list[int] | array[int],
        logprobs: list[float] | array[float] | None = None,
        spans: tuple[VersionSpan, ...] = (),
        finish: Literal["stop", "length"] = "stop",
        call: int = -1,
    ) -> None:
        self.kind, self.spans, self.finish, self.call = kind, spans, finish, call
        self._tokens = tokens  # a list when somebody has looked: most programs need not
        self._logprobs = [] if logprobs is None else logprobs

    @property
    def tokens(self) -> list[int]:
        if not isinstance(self._tokens, list):
            self._tokens = self._tokens.tolist()
        return self._tokens

    @property
    def logprobs(self) -> list[float]:
        """One per token of the model: log softmax(logits / temperature); empty for env."""
        if not isinstance(self._logprobs, list):
            self._logprobs = self._logprobs.tolist()
        return self._logprobs

    @property
    def seen(self) -> bool:
        """Whether its tokens were looked at, and so may have been changed."""
        return isinstance(self._tokens, list)

    def __len__(self) -> int:
        return len(self._tokens)

    def first(self, n: int) -> Segment:
        """The first `n` tokens; the rest is thrown away, and counted as `discarded` unless it is kept elsewhere."""
        spans = spans_within(self.spans, 0, n)
        return Segment(self.kind, self.tokens[:n], self.logprobs[:n], spans, self.finish, self.call)


def env(tokens: Sequence[int]) -> Segment:
    """Tokens that the model read and did not make here: what a tool or a user said, or an earlier turn as history."""
    return Segment("env", list(tokens))


class Trajectory(msgspec.Struct, frozen=True):
    """One sequence to train: its prompt, then its segments in order. A history that was rewritten begins a new one."""

    prompt: list[int]
    segments: list[Segment]
    reward: float | dict[str, float] | None = None
    """None = the reward actor scores the sample. The sample's reward is that of its last trajectory."""
    metadata: dict[str, Any] = {}
    """Travels with the sample to its reward, under the prompt's own; must be encodable."""
    response: str | None = None
    """What the reward sees as the answer; None = the text of the last trajectory's tokens behind its prompt."""


class Session(Protocol):
    """One episode's calls. Each may end the program: when the sample must leave this worker the call never returns, and the
    program is cancelled (asyncio.CancelledError passes through `except Exception`); it is run again elsewhere."""

    task: Task

    @property
    def left(self) -> int:
        """Tokens of the model that the sample's `max_new_tokens` still leaves."""
        ...

    async def generate(self, tokens: Sequence[int], sampling: Sampling | None = None, *, watch: Watch | None = None) -> Segment:
        """One turn of the model behind `tokens`, which are all it sees. Leases, weight updates, dead engines and requests that
        break off on the way are the session's business.

        sampling: None = the task's; the temperature of a training sample stays (Poison). At most `left` tokens are made, none
        (finish `length`) when nothing is left.
        watch: gets all tokens of this turn so far whenever more came, in a replay too; True ends the turn there (`stop`).
        Several may be under way at once, if the program starts them in the same order at every run.
        Raises Poison: the engine can never serve this (too long, ill-formed).

        Example:
            answer = await session.generate([*task.prompt, *said])
            said += answer.tokens
        """
        ...

    async def tell(self, name: str, call: Callable[..., Awaitable[Any] | Any], *args: Any, deadline_s: float = 60.0) -> Any:
        """Ask the environment: `await call(*args)` (a plain function runs in a thread), and what it returned, kept in the journal.
        What the model said so far is saved before it. Killed in between, the call is made again: once or more, never after its
        answer was saved. Arguments and answer must be encodable (msgpack); the answer comes as it is read back.
        Raises what the call raises, which is not kept, TimeoutError behind `deadline_s`, and ValueError for an answer above 4 MiB.

        Example:
            page = await session.tell("fetch", browser.get, url, deadline_s=20.0)
        """
        ...

    def world(self) -> World:
        """The environment of this episode, kept by the environments room (--environment-path). It outlives this worker; one that
        was lost is rebuilt by the episode's own actions. Raises Poison where the run keeps none.

        Example:
            world = session.world()
            seen = await world.reset()
            seen, reward, over = await world.step(action)
        """
        ...

    async def save(self) -> None:
        """All that the model said so far is on the bus when this returns: for who shows it to something outside other than by
        `tell`, which does it itself.

        Example:
            await session.save()
            await chat_room.post(text)
        """
        ...


Program = Callable[[Task, Session], Awaitable[list[Trajectory]]]
"""A rollout. An attribute `resumable = False` on it says that what it talks to cannot be rebuilt: interrupted, it begins anew."""
