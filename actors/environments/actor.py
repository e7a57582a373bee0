"""Environments room: keeps the environment of each episode between its calls, each in a process of its own.

Reads  environment.calls (readers "environments")    Writes  environment.answers
Owns   the environments; nothing of them outlives this process. One that is asked for and not there (it died, had to make room, or
this actor was restarted) is built anew: begun, and brought to where it was by the episode's own actions. Whether it then gives what
it gave before is checked; where not, the episode begins again.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from actors.environments.host import Died, EnvironmentHost, Failed
from actors.runtime.confine import Profile
from actors.runtime.consume import Consumer
from actors.runtime.context import Context
from actors.runtime.deadline import beside
from bus import Commit, Entry, Out
from bus.messages.environments import EnvironmentAnswer, EnvironmentCall
from bus.messages.events import EventKind
from bus.topology import ENV_ANSWERS, ENV_CALLS

TRIES = 2  # of one action, with a process of its own each
LOOK_S = 1.0  # at what nobody asks for any more


class EnvironmentsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What has the name of a setting is that setting. `environment_path`: of a class with reset(task) and step(action)."""

    environment_path: str
    environment_slots: int
    environment_timeout_s: float
    environment_idle_s: float
    environment_sandbox: bool
    sandbox_reads: tuple[str, ...]
    pass_env: tuple[str, ...]
    allow_weak_sandbox: bool


class KeptEnvironment:
    """One environment. `actions`: done; `chain`: digest of what it gave, by number of actions; `last`: what it gave last."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host
        self.actions: list[bytes] = []
        self.chain: list[bytes] = []
        self.last = b""
        self.asked_at = 0.0

    def took(self, given: bytes) -> None:
        self.chain.append(chained(self.chain[-1] if self.chain else b"", given))
        self.last = given


def chained(before: bytes, given: bytes) -> bytes:
    """Digest of all that was given so far."""
    return hashlib.blake2b(before + given, digest_size=12).digest()


class Environments:
    """The room: a consumer that answers as many episodes at once as there are slots."""

    def __init__(self, context: Context, spec: EnvironmentsSpec) -> None:
        self._context, self._spec = context, spec
        self._log = Path(context.spec.run_dir or ".") / f"{context.name}.environments.log"
        self._kept: dict[str, KeptEnvironment] = {}
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by episode, of those that are asked now
        self._consumer = Consumer(context, [ENV_CALLS], "environments", on_dead=self._dead, concurrency=spec.environment_slots)

    async def run(self) -> None:
        """Until draining."""
        try:
            async with beside(self._sweep()):
                await self._consumer.run(self._handle)
        finally:
            await asyncio.gather(*(kept.host.close() for kept in self._kept.values()))

    async def _sweep(self) -> None:
        """Ends environments that nobody asked for, once a second."""
        while True:
            await self._context.clock.sleep(LOOK_S)
            now = self._context.clock.monotonic()
            idle = [name for name in self._free() if now - self._kept[name].asked_at > self._spec.environment_idle_s]
            for name in idle:
                await self._end(name, "environments_idle")
            self._context.note = f"{len(self._kept)} of {self._spec.environment_slots} environments"

    def _free(self) -> list[str]:
        """Episodes whose environments nobody asks now."""
        return [name for name in self._kept if name not in self._busy]

    async def _handle(self, entry: Entry, call: EnvironmentCall) -> Commit:
        busy = self._busy.setdefault(call.sample_id, asyncio.Lock())
        async with busy:  # an episode that went on elsewhere may be asked for twice
            if call.over:
                await self._end(call.sample_id, "environments_over")
            else:
                await self._answer(call)
        return Commit(ack=(entry,))

    async def _answer(self, call: EnvironmentCall) -> None:
        answer = EnvironmentAnswer(asked=call.asked, sample_id=call.sample_id)
        try:
            given, same = await self._bring(call)
            answer = msgspec.structs.replace(answer, answer=given, differs=not same)
        except (Died, Failed) as error:
            answer = msgspec.structs.replace(answer, error=str(error))
        await self._tell(answer)

    async def _tell(self, answer: EnvironmentAnswer) -> None:
        await self._context.bus.append([Out(ENV_ANSWERS, answer)], repeatable=True)

    async def _bring(self, call: EnvironmentCall) -> tuple[bytes, bool]:
        """What the last action gave, and whether those before it gave what they gave when they were asked first."""
        for attempt in range(1, TRIES + 1):
            kept = self._kept.get(call.sample_id)
            if kept is None or not kept.host.alive or not self._fits(kept, call):
                kept = await self._anew(call)
            try:
                return await self._forward(kept, call)
            except Died as error:
                await self._end(call.sample_id, "environments_died")
                await self._context.refusals.add("environment", f"{call.sample_id}: {error}", kind=EventKind.ENVIRONMENT_DIED)
                if attempt == TRIES:
                    raise
        raise AssertionError("unreachable")

    @staticmethod
    def _fits(kept: KeptEnvironment, call: EnvironmentCall) -> bool:
        """Whether it has come along the way that the episode knows."""
        n, done = len(call.actions), tuple(kept.actions)
        return done == call.actions[: len(done)] and (not n or len(kept.chain) < n or kept.chain[n - 1] == call.told)

    async def _forward(self, kept: KeptEnvironment, call: EnvironmentCall) -> tuple[bytes, bool]:
        kept.asked_at = self._context.clock.monotonic()
        timeout_s, n = self._spec.environment_timeout_s, len(call.actions)
        if not kept.chain:
            kept.took(await kept.host.ask("begin", call.task, timeout_s))
        while len(kept.chain) <= n:
            if len(kept.chain) == n and kept.chain[-1] != call.told:
                return b"\xc0", False
            action = call.actions[len(kept.actions)]
            kept.took(await kept.host.ask("step", action, timeout_s))
            kept.actions.append(action)
            self._context.count("environment_steps")
        return kept.last, True

    async def _anew(self, call: EnvironmentCall) -> KeptEnvironment:
        """A process for this episode; the one that was not asked for longest makes room where all slots are taken."""
        await self._end(call.sample_id, "environments_replaced")
        while len(self._kept) >= self._spec.environment_slots and (free := self._free()):
            await self._end(min(free, key=lambda name: self._kept[name].asked_at), "environments_evicted")
        spec = self._spec
        limits = Profile(spec.sandbox_reads, weak=spec.allow_weak_sandbox) if spec.environment_sandbox else None
        host = await EnvironmentHost.start(spec.environment_path, self._log, limits, spec.pass_env)
        kept = self._kept[call.sample_id] = KeptEnvironment(host)
        kept.asked_at = self._context.clock.monotonic()
        self._context.count("environments_rebuilt" if call.actions else "environments_begun")
        return kept

    async def _end(self, name: str, counted: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._context.count(counted)
            await kept.host.close()

    async def _dead(self, entry: Entry, message: Any, error: str) -> Commit:
        """The episode is told that its question cannot be answered."""
        if isinstance(message, EnvironmentCall):
            await self._tell(EnvironmentAnswer(asked=message.asked, sample_id=message.sample_id, error=error))
        return Commit()


async def run(context: Context, spec: EnvironmentsSpec) -> None:
    """The room's process."""
    await Environments(context, spec).run()
