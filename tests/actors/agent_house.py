"""What tests of agents stand on: a session whose model says what a script tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.generation.rollouts.session import Segment, Task, Watch
from actors.generation.rollouts.stops import until, watching
from actors.runtime.chat import Chat
from bus.messages.samples import Sampling
from bus.messages.versions import VersionSpan

END = 1


def task(prompt: Sequence[int] = (), *, max_new_tokens: int = 4000, stops: Sequence[int] = (END,), **fields: Any) -> Task:
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=tuple(stops))
    return Task("g1/0", "g1", 0, 1, list(prompt), sampling=sampling, **fields)


class ScriptedSession:
    """`script`: what the model answers to the text it sees, with its stop token or, where that is END, without; chunks of `chunk`
    tokens reach `watch`."""

    replaying = False

    def __init__(self, chat: Chat, of: Task, script: Callable[[str], str], *, chunk: int = 3) -> None:
        self.task, self._chat, self._script, self._chunk = of, chat, script, chunk
        self.left = of.sampling.max_new_tokens
        self.seen: list[list[int]] = []
        self.made: list[Segment] = []
        self.asked: list[Sampling] = []
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    async def generate(self, tokens: Sequence[int], sampling: Sampling | None = None, *, watch: Watch | None = None) -> Segment:
        sampling, call = sampling or self.task.sampling, len(self.seen)
        if sampling.stop:
            watch = watching(self._chat.decode, sampling.stop, watch)
        self.seen.append(list(tokens))
        self.asked.append(sampling)
        answer = self._chat.encode(self._script(self._chat.decode(tokens)))
        if answer[-1:] == [] or answer[-1] not in self.task.sampling.stop_token_ids:
            answer.append(END)
        most = min(self.left, sampling.max_new_tokens)
        ids, finish = answer[:most], "stop" if len(answer) <= most else "length"
        for n in range(self._chunk, len(ids) + self._chunk, self._chunk):
            await asyncio.sleep(0)
            if watch is not None and watch(ids[:n]):
                ids, finish = ids[:n], "stop"
                break
        self.left -= len(ids)
        spans = (VersionSpan(7, 7, len(ids)),)
        segment = Segment("model", ids, [-0.5 - i for i in range(len(ids))], spans, finish, call)  # type: ignore[arg-type]
        self.made.append(segment)
        return until(self._chat.decode, segment, sampling.stop) if sampling.stop else segment

    async def save(self) -> None: ...

    async def tell(self, name: str, call: Callable[..., Awaitable[Any] | Any], *args: Any, deadline_s: float = 60.0) -> Any:
        self.told.append((name, args))
        return await call(*args)
