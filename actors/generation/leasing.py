"""Which entries a worker takes, and when a sample that it took may begin.

Reads  tail, prefixes, eval.prompts, prompts (readers "generation")    Owns  this worker's leases = its pending entries
Without a current version it takes none. While a newer version is active elsewhere it takes no fresh prompts. What it took
before it knew is held, lease and slot, until it serves the task's step; or parked as `behind`, for a peer that does.
Prefixes go first. Evaluation takes its share of the slots, and what training prompts leave idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import UNSET

from actors.generation.link import EngineLink
from actors.generation.pace import Pace
from actors.generation.sample import Running
from actors.generation.sharing import Sharing
from actors.generation.standing import NO_TOKENS, Standing
from actors.runtime.consume import Consumer
from actors.runtime.context import Context
from actors.runtime.deadline import within
from actors.runtime.logs import fold_log
from bus import Entry, Stream
from bus.ledger import EVAL_GROUPS
from bus.messages.samples import ParkReason
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.topology import ACTIVE, EVAL_PROMPTS, PREFIXES, PROMPTS, TAIL

LEASED = (TAIL, PREFIXES, EVAL_PROMPTS, PROMPTS)
MOST = 64  # entries a read
NEWEST = 16  # entries of `active` among which the newest word on who serves what is looked for


class Leases:
    """One worker's. `ordered`: whether an order waits to be carried out. `hold_s`: longest wait of a sample for its version.
    `takes`: False = none are taken, another worker's go to its engine."""

    def __init__(
        self,
        context: Context,
        link: EngineLink,
        sharing: Sharing,
        pace: Pace,
        consumer: Consumer,
        ordered: Callable[[], bool],
        hold_s: float,
        takes: bool = True,
    ) -> None:
        self._context = context
        self._link = link
        self._sharing = sharing
        self._pace = pace
        self._ordered = ordered
        self._hold_s, self._takes = hold_s, takes
        self._consumer = consumer
        self.standing = Standing(context.name)
        self._left_at: PolicyVersion | None = None  # served when a sample was left to a peer
        self._evals = 0  # evaluation samples that run or are held
        self._prompts_since = 0  # fresh prompts taken since the last one of an evaluation
        self._pinned = -1  # version of the evaluation that was met last
        self._kept_off: float | None = None  # since when it is left to peers that serve this version
        self._slot = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def slots(self) -> int:
        """Samples that this worker takes at once."""
        return self._pace.slots

    def free(self) -> int:
        """Samples that may be taken now: none without a current version."""
        return max(0, self.slots - self._context.in_flight) if self._may_take() else 0

    def claimable(self) -> int:
        """How many that a dead worker left may be taken over now. Full workers do too, up to a quarter of their slots, and begin
        them at the next free ones: where prompts always wait no slot is free at the moment of asking, and those are older."""
        room = max(self.free(), self.slots // 4, 1) if self._may_take() else 0
        return max(0, room - self._consumer.reader.offered)

    def _may_take(self) -> bool:
        link = self._link
        if link.serving is None or self._ordered() or link.absent:
            return False
        return not self._sharing.aside and not link.released and self._takes

    async def take(self, samples: asyncio.TaskGroup, handle: Callable[[Entry], Coroutine[Any, Any, None]]) -> None:
        """Until draining: waits for a free slot and a current version (woken by `done`), then for entries."""
        context = self._context
        while not context.draining.is_set():
            free = self.free()
            if free <= 0:
                self._slot = asyncio.Event()
                with context.waiting(Wait.CURRENT_VERSION if self._link.serving is None else Wait.SLOT):
                    await within(0.1, self._slot)
                continue
            for entry in await self._read(min(free, MOST)):
                context.in_flight += 1
                if entry.stream is TAIL:
                    context.count("tail/in_lane" if self._pace.in_lane else "tail/elsewhere")
                self._count(entry)
                work = handle(entry)
                try:
                    samples.create_task(work, name=entry.fields.get("id", entry.id))
                except RuntimeError:  # a sample has ended the run while the read was under way
                    work.close()
                    raise

    async def _read(self, free: int) -> list[Entry]:
        streams = self._streams()
        # Short while others run, since the next order must not wait, and while this worker is about to catch up.
        brief = self._context.in_flight or self.standing.behind(self._link.serving)
        block_s = 0.05 if brief else 0.5
        with self._context.waiting(Wait.ENTRY, streams=", ".join(stream.name for stream, _ in streams)) as heard:
            if entries := await self._consumer.take(free, block_s, streams):
                heard()
            return entries

    def _streams(self) -> Sequence[tuple[Stream, int]]:
        """What to read, first things first, and how many entries of each. A worker that is behind goes on with prefixes until it
        met one that it had to leave to a peer: it would be the first to take that again."""
        standing, serving = self.standing, self._link.serving
        resumed = ((TAIL, MOST), (PREFIXES, MOST)) if self._pace.takes_tail else ((PREFIXES, MOST),)
        if standing.behind(serving):
            left_some = self._left_at == serving and standing.peers_have()
            # Peers leave it the evaluation of its version, so it takes that in any case.
            return ((EVAL_PROMPTS, MOST),) if left_some else (*resumed, (EVAL_PROMPTS, MOST))
        if self._evaluated_elsewhere(serving):
            return (*resumed, (PROMPTS, MOST))
        left = self._share_left()
        if left > 0:
            return (*resumed, (EVAL_PROMPTS, left), (PROMPTS, MOST))
        return (*resumed, (PROMPTS, MOST), (EVAL_PROMPTS, MOST))

    def _share_left(self) -> int:
        """Slots that evaluation may take ahead of training prompts. Of few slots the share is none: then it has its turn, one
        sample after as many prompts as make the share."""
        share = float(self._context.knobs.eval_share)
        if quota := int(self.slots * share):
            return quota - self._evals
        its_turn = self._evals == 0 and self._prompts_since * share >= 1 - share
        return 1 if its_turn else 0

    def _count(self, entry: Entry) -> None:
        self._evals += _is_eval(entry)
        self._prompts_since = 0 if entry.stream is EVAL_PROMPTS else self._prompts_since + (entry.stream is PROMPTS)

    def _evaluated_elsewhere(self, serving: PolicyVersion | None) -> bool:
        """Whether the evaluation under way is left to peers, which still serve its version; `hold_s` at most."""
        if serving is None or not 0 <= self._pinned < serving.id or not self.standing.peer_serves(self._pinned):
            self._kept_off = None
            return False
        now = self._context.clock.monotonic()
        if self._kept_off is None:
            self._kept_off = now
        return now - self._kept_off < self._hold_s

    def done(self, entry: Entry) -> None:
        """A sample left."""
        self._context.in_flight -= 1
        self._pace.ended += 1
        self._evals -= _is_eval(entry)
        self._slot.set()

    # -- the version of a sample --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Who serves what, what is ordered here, or the engine has changed."""
        self._news.set()
        self._news = asyncio.Event()

    async def _moved(self, at_most_s: float) -> None:
        """A second at most, since servers die without a word."""
        await within(min(at_most_s, 1.0), self._news)

    async def admit(self, running: Running) -> ParkReason | None:
        """Waits until the sample may go on here (None), woken by `wake`; or why it must be parked: after `hold_s`, or at once
        when a peer can take it and nothing that would serve is ordered here, it is `behind`."""
        context, standing, link = self._context, self.standing, self._link
        step = running.task.step
        last = running.last_version
        if running.task.pinned is not UNSET:
            self._pinned = running.task.pinned
        if link.serving is not None and link.serving.step < step and last == NO_TOKENS and standing.unheard(step):
            await self._catch_up()
        until: float | None = None  # set once it is held
        try:
            while True:
                if link.leaving or context.draining.is_set():
                    return "drain"
                if link.absent:
                    return "engine"
                verdict = standing.verdict(link.serving, step=step, last=last)
                if verdict == "begin":
                    running.least_step = standing.least_step(step)
                    return None
                now = context.clock.monotonic()
                if until is None and verdict == "wait":
                    context.count("held")
                    until = now + self._hold_s
                if until is None or verdict == "leave" or now >= until:
                    self._left_at = link.serving
                    return "behind"
                await self._moved(until - now)
        finally:
            if until is not None:
                context.count("held", -1)

    async def _catch_up(self) -> None:
        """Hear now what the log says: a task is issued for a version only after that was said to be active."""
        newest = await self._context.bus.last(ACTIVE, NEWEST)
        await fold_log(self._context, reversed(newest), lambda _, said: self.standing.fold(said), types=("active.state",))


def _is_eval(entry: Entry) -> bool:
    return entry.stream is EVAL_PROMPTS or entry.fields.get("group", "").startswith(EVAL_GROUPS)
