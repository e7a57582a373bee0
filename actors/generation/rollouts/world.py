"""The environment of an episode, kept by the environments room: asked through the session, so its answers are in the journal."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from actors.runtime.context import Context
from actors.runtime.logs import fold_log
from bus import Entry, Out, Tail
from bus.messages.environments import EnvironmentAnswer, EnvironmentCall
from bus.topology import ENV_ANSWERS, ENV_CALLS

SLACK_S = 60.0  # for the room's restart, beyond what two tries of an action take


class EnvironmentFailed(Exception):
    """The environment raised, or died of this action; the text is its cause."""


class AskedSession(Protocol):
    """What of a session an environment is asked through."""

    async def tell(self, name: str, call: Callable[..., Awaitable[Any]], *args: Any, deadline_s: float) -> Any: ...


Ask = Callable[[EnvironmentCall], Awaitable[EnvironmentAnswer]]


class World:
    """One episode's. `task`: what the environment is begun with. `begin_again`: ends the program, since the environment could not
    be brought to where it was."""

    def __init__(
        self, session: AskedSession, sample_id: str, task: dict[str, Any], ask: Ask, begin_again: Callable[[], Awaitable[Any]], *,
        deadline_s: float,
    ) -> None:  # fmt: skip
        self._session, self._sample_id, self._ask, self._begin_again = session, sample_id, ask, begin_again
        self._task, self._deadline_s = msgspec.msgpack.encode(task), deadline_s
        self._actions: list[bytes] = []
        self._chain = b""

    async def reset(self) -> Any:
        """A fresh environment's first observation. Raises EnvironmentFailed, TimeoutError."""
        self._actions, self._chain = [], b""
        return await self._asked()

    async def step(self, action: Any) -> Any:
        """What `step(action)` of the environment gave, as msgpack reads it (a tuple is a list). Raises as `reset` does."""
        self._actions.append(msgspec.msgpack.encode(action))
        return await self._asked()

    async def _asked(self) -> Any:
        last = self._actions[-1] if self._actions else b""
        given = await self._session.tell("environment", self._call, len(self._actions), last, deadline_s=self._deadline_s)
        self._chain = hashlib.blake2b(self._chain + msgspec.msgpack.encode(given), digest_size=12).digest()
        return given

    async def _call(self, n: int, action: bytes) -> Any:
        done = tuple(self._actions)
        call = EnvironmentCall(asked="", sample_id=self._sample_id, task=self._task, actions=done, told=self._chain)
        answer = await self._ask(call)
        if answer.differs:
            await self._begin_again()
        if answer.error:
            raise EnvironmentFailed(answer.error)
        return msgspec.msgpack.decode(answer.answer)


class Worlds:
    """One worker's way to the room. `follow` runs beside it."""

    def __init__(self, context: Context, timeout_s: float) -> None:
        self._context = context
        self.deadline_s = 2 * timeout_s + SLACK_S
        self._names = (f"{context.name}-{uuid.uuid4().hex[:8]}-{n}" for n in itertools.count())
        self._waiting: dict[str, asyncio.Future[EnvironmentAnswer]] = {}
        self._tail = Tail(context.bus, [ENV_ANSWERS], start="$")

    async def open(self) -> None:
        """Answers from here on are heard."""
        await self._tail.open()

    async def close(self) -> None:
        """No answer is heard any more."""
        await self._tail.close()

    async def follow(self) -> None:
        """Until cancelled: waits for answers (woken by the blocking read)."""
        while True:
            await fold_log(self._context, await self._tail.read(0.5), self._hear)

    def _hear(self, _entry: Entry, answer: EnvironmentAnswer) -> None:
        if (asked := self._waiting.pop(answer.asked, None)) is not None and not asked.done():
            asked.set_result(answer)

    async def ask(self, call: EnvironmentCall) -> EnvironmentAnswer:
        """The room's answer; the caller has a deadline."""
        name = next(self._names)
        asked: asyncio.Future[EnvironmentAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[name] = asked
        try:
            await self._context.bus.append([Out(ENV_CALLS, msgspec.structs.replace(call, asked=name))], repeatable=True)
            return await asked
        finally:
            self._waiting.pop(name, None)

    async def over(self, sample_id: str) -> None:
        """The episode has ended."""
        call = EnvironmentCall(asked="", sample_id=sample_id, task=b"", over=True)
        await self._context.bus.append([Out(ENV_CALLS, call)], repeatable=True)
