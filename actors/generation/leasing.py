"""Which entries a worker takes, and when a sample that it took may begin.

Reads  tail, prefixes, eval.prompts, prompts (readers "generation")    Owns  this worker's leases = its pending entries
Without a current version it takes none. While a newer version is active elsewhere it takes no fresh prompts. What it took
before it knew is held, lease and slot, until it serves the task's step; or parked as `behind`, for a peer that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from actors.generation.link import EngineLink
from actors.generation.pace import Pace
from actors.generation.sample import Running
from actors.generation.sharing import Sharing
from actors.generation.standing import NO_TOKENS, Standing
from actors.runtime.context import Context
from bus import Entry, Reader, Stream
from bus.messages.policy import PolicyActive
from bus.messages.samples import ParkReason
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, EVAL_PROMPTS, PREFIXES, PROMPTS, TAIL

NEWEST = 16  # entries of `active` among which the newest word on who serves what is looked for


class Leases:
    """One worker's. `ordered`: whether an order waits to be carried out. `hold_s`: longest wait of a sample for its version."""

    def __init__(
        self,
        context: Context,
        link: EngineLink,
        sharing: Sharing,
        pace: Pace,
        ordered: Callable[[], bool],
        hold_s: float,
    ) -> None:
        self._context = context
        self._link = link
        self._sharing = sharing
        self._pace = pace
        self._ordered = ordered
        self._hold_s = hold_s
        self.reader = Reader(context.bus, [TAIL, PREFIXES, EVAL_PROMPTS, PROMPTS], "generation", context.name)
        self.standing = Standing(context.name)
        self._left_at: PolicyVersion | None = None  # served when a sample was left to a peer
        self._slot = asyncio.Event()
        self._news = asyncio.Event()

    def free(self) -> int:
        """Samples that may be taken now: none without a current version."""
        link = self._link
        if link.serving is None or self._ordered() or link.broken.is_set():
            return 0
        if self._sharing.aside or link.released:
            return 0
        return max(0, self._pace.slots - self._context.in_flight)

    async def take(
        self, samples: asyncio.TaskGroup, handle: Callable[[Entry], Coroutine[Any, Any, None]]
    ) -> None:
        """Until draining: waits for a free slot and a current version (woken by `done`), then for entries."""
        context = self._context
        while not context.draining.is_set():
            free = self.free()
            if free <= 0:
                self._slot = asyncio.Event()
                with context.waiting("a current version" if self._link.serving is None else "a free slot"):
                    try:
                        await asyncio.wait_for(self._slot.wait(), 0.1)
                    except TimeoutError:
                        pass
                continue
            for entry in await self._read(min(free, 64)):
                context.in_flight += 1
                if entry.stream is TAIL:
                    context.count("tail/in_lane" if self._pace.in_lane else "tail/elsewhere")
                samples.create_task(handle(entry), name=entry.fields.get("id", entry.id))

    async def _read(self, free: int) -> list[Entry]:
        streams = self._streams()
        if not streams:  # what was claimed or was ours before is there all the same
            if entries := await self.reader.read(free, 0.0, ()):
                return entries
            with self._context.waiting("a newer version, which peers serve"):
                await self._moved(0.5)
            return []
        block_s = 0.05 if self._context.in_flight else 0.5  # short while others run: the next order must not wait
        with self._context.waiting(f"an entry of {', '.join(stream.name for stream, _ in streams)}"):
            return await self.reader.read(free, block_s, [(stream, min(free, most)) for stream, most in streams])

    def _streams(self) -> Sequence[tuple[Stream, int]]:
        """What to read, first things first, and how many entries of each. A worker that is behind goes on with prefixes until it
        met one that it had to leave to a peer: it would be the first to take that again."""
        standing, serving = self.standing, self._link.serving
        tail = ((TAIL, 64),) if self._pace.takes_tail else ()
        if not standing.behind(serving):
            return (*tail, (PREFIXES, 64), (EVAL_PROMPTS, 64), (PROMPTS, 64))
        if self._left_at == serving and standing.peers_have():
            return ()
        return (*tail, (PREFIXES, 64), (EVAL_PROMPTS, 64))

    def done(self) -> None:
        """A sample left."""
        self._context.in_flight -= 1
        self._pace.sample_ended()
        self._slot.set()

    # -- the version of a sample --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Who serves what, what is ordered here, or the engine has changed."""
        self._news.set()
        self._news = asyncio.Event()

    async def _moved(self, at_most_s: float) -> None:
        """A second at most, since servers die without a word."""
        try:
            await asyncio.wait_for(self._news.wait(), min(at_most_s, 1.0))
        except TimeoutError:
            return

    async def admit(self, running: Running) -> ParkReason | None:
        """Waits until the sample may go on here (None), woken by `wake`; or why it must be parked: after `hold_s`, or at once
        when a peer can take it and nothing that would serve is ordered here, it is `behind`."""
        context, standing, link = self._context, self.standing, self._link
        step = running.task.step
        last = running.last_version
        if link.serving is not None and link.serving.step < step and last == NO_TOKENS and standing.unheard(step):
            await self._catch_up()
        until = context.clock.monotonic() + self._hold_s
        held = False
        try:
            while True:
                if context.draining.is_set():
                    return "drain"
                if link.broken.is_set():
                    return "engine"
                verdict = standing.verdict(link.serving, step=step, last=last)
                if verdict == "begin":
                    running.least_step = standing.least_step(step)
                    return None
                left_s = until - context.clock.monotonic()
                if verdict == "leave" or left_s <= 0:
                    self._left_at = link.serving
                    return "behind"
                if not held:
                    context.count("held")
                held = True
                await self._moved(left_s)
        finally:
            if held:
                context.count("held", -1)

    async def _catch_up(self) -> None:
        """Hear now what the log says: a task is issued for a version only after that was said to be active."""
        for entry in await self._context.bus.last(ACTIVE, NEWEST):
            message = await self._context.bus.message(entry)
            if isinstance(message, PolicyActive):
                self.standing.fold(message)
                return


__all__ = ("Leases",)
