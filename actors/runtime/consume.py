"""Entries to handler, handler's commit to the bus: how every room reads the streams that it acknowledges.

A handler gets one entry with its message and returns a Commit (which must acknowledge the entry), or None when it keeps
the entry for a later commit. Killed at any await, nothing is lost and nothing is done twice downstream: result and
acknowledgement are one step. No content ends a room: what cannot be read, holds what cannot be (content.py), or makes the
handler raise, is buried with its reason together with what must follow, so that its group closes.

An entry that was under way in several processes that died may be what killed them. So a delivery counts only when work begins,
and after the second one few such entries are on trial at a time, then one: those that died beside it go on unharmed.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from actors.runtime.contained import contained
from actors.runtime.content import fault_of, lost_of
from actors.runtime.context import Context
from actors.runtime.deadline import followed, within
from actors.runtime.faultpoints import fault_point
from actors.runtime.loopwatch import reads, working
from actors.runtime.loopwatch_acts import Work
from actors.runtime.refusals import RunEnds
from actors.runtime.retry import decide
from bus import Commit, Entry, Out, Reader, Stream
from bus.dead import letter_of
from bus.errors import BadMessage, BusFull, BusUnreachable, BusWentBack, InvariantBroken, Poison
from bus.ledger import EVAL_GROUPS
from bus.messages.control import DeadLetter
from bus.messages.events import EventKind
from bus.messages.groups import index_of
from bus.messages.samples import RolloutLost
from bus.messages.waits import Wait
from bus.streams.absent import deaths_of, forget_deaths
from bus.topology import DEAD

Handler = Callable[[Entry, Any], Coroutine[Any, Any, Commit | None]]
OnDead = Callable[[Entry, Any, str], Awaitable[Commit]]  # what must follow a dead entry, so that its group still closes
# Not about an entry: the room ends, its entries stay pending.
STOPS = (BusUnreachable, BusFull, BusWentBack, InvariantBroken, RunEnds)
MOST_DEATHS = 2  # of processes that the watch over their loops (loopwatch.py) knows an entry to have caused
TRUSTED = 2  # deliveries, after which an entry is on trial
AT_A_TRIAL = {3: 8, 4: 2}  # entries at once by deliveries; later one, and nothing beside it


class Consumer:
    """Reads, renews, claims, checks, retries, buries. `run` does it all for rooms that handle entry by entry, `concurrency` at
    once; others read with `take` inside `leased`, and hand each entry to `one` or ask for what is `readable`.

    `holds`: the handler keeps entries for a later commit. Each restart of the room delivers them again through no fault
    of theirs, so their number of deliveries says nothing. `vocabulary`: token ids are below it; 0 = not known here.
    """

    def __init__(
        self,
        context: Context,
        streams: Sequence[Stream],
        readers: str,
        *,
        on_dead: OnDead,
        concurrency: int = 1,
        batch: int = 64,
        rebuild: Callable[[], None] | None = None,
        holds: bool = False,
        name: str = "",
        vocabulary: int = 0,
    ) -> None:
        self._context = context
        self._on_dead = on_dead
        self._concurrency = concurrency
        self._batch = batch
        self._rebuild = rebuild
        self._holds = holds
        self._vocabulary = vocabulary
        self.reader = Reader(context.bus, streams, readers, name or context.name)
        self._names = "+".join(stream.name for stream in streams)
        self._restarts_seen = context.bus.link.server_restarts
        self._retried: dict[tuple[str, str], int] = {}  # attempts here that the server does not know
        self._slots: dict[tuple[str, str], Callable[[], None]] = {}  # of entries at work: gives back the slot
        self._suspects: list[Entry] = []  # wait for their trial
        self._spared: list[Entry] = []  # failed as all do now: others have their turn first, whether it works for them
        self._on_trial: set[tuple[str, str]] = set()
        self._ended = asyncio.Event()  # one of those that were given out

    async def run(self, handler: Handler) -> None:
        """Until draining: waits for entries (woken by the blocking read), handles them, commits."""
        async with self.leased():
            await self._loop(handler)

    @asynccontextmanager
    async def leased(self, free: Callable[[], int] = lambda: 64) -> AsyncIterator[None]:
        """The reader open and its leases kept meanwhile; what the dead left is taken over as far as there is room."""
        await self.reader.open()
        reads([stream.name for stream in self.reader.streams], self.reader.readers, self.reader.me)
        try:
            async with followed(lambda stop: keep_leases(self._context, self.reader, stop, free)):
                yield
        except BaseException as error:
            if isinstance(error, BusFull) or (isinstance(error, BaseExceptionGroup) and error.split(BusFull)[0] is not None):
                await self._spare()
            raise
        finally:
            await self.reader.close()

    async def _spare(self) -> None:
        """A full disk ends this process, and no entry that is under way: it is no delivery of theirs."""
        with suppress(*STOPS):
            await self.reader.recount([(entry, max(0, self._delivered(entry) - 1)) for entry in self.reader.held.values()])

    async def _loop(self, handler: Handler) -> None:
        context = self._context
        slots = asyncio.Semaphore(self._concurrency)
        free = self._batch

        def give_back() -> None:
            nonlocal free
            free += 1
            slots.release()

        async def beside(entry: Entry) -> None:
            self._slots[_key(entry)] = give_back
            try:
                await self.one(entry, handler)
            finally:
                context.in_flight -= 1
                self._leave_slot(entry)

        if self._concurrency > 1:
            free = self._concurrency
        async with asyncio.TaskGroup() as tasks:
            while not context.draining.is_set():
                await slots.acquire()
                slots.release()
                self._note_server_restart()
                with context.waiting(Wait.ENTRY, streams=self._names) as heard:
                    if entries := await self.take(min(self._batch, free), 0.5):
                        heard()
                for entry in entries:
                    context.in_flight += 1
                    if self._concurrency == 1:
                        await self.one(entry, handler)
                        context.in_flight -= 1
                        continue
                    await slots.acquire()
                    free -= 1
                    tasks.create_task(beside(entry))

    def _leave_slot(self, entry: Entry) -> None:
        """Somebody else may have the slot of this entry, if it has one still."""
        if (give_back := self._slots.pop(_key(entry), None)) is not None:
            give_back()

    def _note_server_restart(self) -> None:
        restarts = self._context.bus.link.server_restarts
        if restarts != self._restarts_seen and self._rebuild is not None:
            self.reader.held.clear()
            self._rebuild()
        self._restarts_seen = restarts

    # -- trials -------------------------------------------------------------------------------------------------

    async def take(self, count: int, block_s: float, wanted: Sequence[tuple[Stream, int]] | None = None) -> list[Entry]:
        """Up to `count` entries to begin with now; see Reader.read. Nothing else begins beside one that is tried alone."""
        if self._alone():
            self._ended = asyncio.Event()
            await within(block_s, self._ended)
            return []
        ready = await self._trial(count)
        if len(ready) >= count or self._alone():
            return ready
        entries = await self.reader.read(count - len(ready), 0.0 if ready or self._spared else block_s, wanted)
        if not entries and self._spared:
            entries, self._spared = self._spared[: count - len(ready)], self._spared[count - len(ready) :]
            entries = [entry for entry in entries if _key(entry) in self.reader.held]
        if self._holds:
            return entries
        suspects = [e for e in entries if self._delivered(e) > TRUSTED and _key(e) not in self._on_trial]
        if not suspects:
            return ready + entries
        await self.reader.recount((e, self._delivered(e) - 1) for e in suspects)
        self._suspects += suspects
        known = {_key(e) for e in suspects}
        fresh = [e for e in entries if _key(e) not in known]
        ready += await self._trial(count)
        if self._alone():
            self.reader.offer(fresh)
            return ready
        return ready + fresh

    def _alone(self) -> bool:
        """Whether one is on trial beside which nothing may begin."""
        held = self.reader.held
        self._on_trial &= held.keys()
        return any(self._delivered(held[key]) not in AT_A_TRIAL for key in self._on_trial)

    async def _trial(self, most: int) -> list[Entry]:
        """Suspects whose trial begins: of one number of deliveries, the highest first, when nobody else is on trial."""
        held = self.reader.held
        self._suspects = [e for e in self._suspects if _key(e) in held]
        if not self._suspects:
            return []
        highest = max(map(self._delivered, self._suspects))
        under_way = {self._delivered(held[key]) for key in self._on_trial}
        room = min(most, AT_A_TRIAL.get(highest, 1) - len(self._on_trial)) if under_way <= {highest} else 0
        begun = [e for e in self._suspects if self._delivered(e) == highest][: max(0, room)]
        if begun:
            self._on_trial |= {_key(e) for e in begun}
            self._suspects = [e for e in self._suspects if _key(e) not in self._on_trial]
            await self.reader.recount((e, self._delivered(e)) for e in begun)
        return begun

    def attempt(self, entry: Entry) -> int:
        """Which attempt of its handler this is, from 1. What ended the processes that had it before is no failure of its own."""
        return self._retried.get(_key(entry), 0) + 1

    def _delivered(self, entry: Entry) -> int:
        """How often work on it began, by the server's count."""
        return entry.deliveries - self._retried.get(_key(entry), 0)

    # -- one entry ----------------------------------------------------------------------------------------------

    async def one(self, entry: Entry, handler: Handler) -> None:
        """An entry to its commit, or its burial."""
        message: Any = None
        try:
            with contained():
                message = await self._message(entry)
                commit = await working(Work(entry.stream.name, entry.id, _name(entry)), handler(entry, message))
        except STOPS:
            raise
        except Exception as error:  # noqa: BLE001 - unknown means poison; the dead letter keeps the traceback
            await self.failed(entry, message, error)
            return
        if commit is not None:
            await self.commit(commit)

    async def readable(self, entry: Entry) -> Any:
        """Its message; None when it was buried."""
        try:
            return await self._message(entry)
        except Poison as error:
            await self.bury(entry, None, error)
            return None

    async def _message(self, entry: Entry) -> Any:
        begun = self._delivered(entry)
        if begun > self._context.bus.config.max_deliveries and not self._holds:
            raise Poison(f"delivered {begun} times without an acknowledgement")
        if begun > 1 and not self._holds:
            deaths, why = await deaths_of(self._context.bus, _name(entry))
            if deaths >= MOST_DEATHS:
                raise Poison(f"it ended {deaths} processes that worked on it. The last one: {why}")
        message = await self._context.bus.message(entry)
        if fault := fault_of(message, self._vocabulary):
            raise _Faulty(message, f"message on stream {entry.stream.name}: {fault}")
        return message

    async def commit(self, commit: Commit) -> bool:
        """Commit and forget the entries; False = somebody else had finished one of them, nothing was done."""
        name = self._context.name
        fault_point(name, "before_commit")
        result = await self._context.bus.commit(commit)
        fault_point(name, "after_commit")
        if result.moved:
            self._context.count("moved", len(result.moved))
        self.forget([entry for entry in commit.ack if not result.moved or entry.id in result.moved])
        return result.done and not result.moved

    def forget(self, entries: Sequence[Entry]) -> None:
        """These are finished, or a peer's."""
        self.reader.forget(entries)
        self._ended.set()
        for entry in entries:
            self._retried.pop(_key(entry), None)

    async def failed(self, entry: Entry, message: Any, error: Exception) -> None:
        """Retry with a pause, or dead-letter with whatever must follow."""
        context = self._context
        decision = decide(error, attempt=self.attempt(entry), most=context.bus.config.max_deliveries)
        if decision.action != "again":
            await self.bury(entry, message, error)
            return
        context.count("retries")
        await context.refusals.add(f"retry/{entry.stream.name}", f"{entry.id}: {error}", kind=EventKind.TRIED_AGAIN)
        if decision.counted:  # those that fail must not hold up the others, unless all do: a broken data set, the training
            self._leave_slot(entry)
        await context.clock.sleep(decision.after_s)
        self._on_trial.discard(_key(entry))  # beside one that is tried alone nothing is read: not even itself again
        if not decision.counted:
            self._spared.append(entry)
            return
        self._retried[_key(entry)] = self._retried.get(_key(entry), 0) + 1
        self.reader.retry_later(entry)

    async def bury(self, entry: Entry, message: Any, error: Exception) -> None:
        """Move an entry to the dead letters together with what must follow, in one step."""
        context = self._context
        if isinstance(error, _Faulty):
            message = error.message
        follow = await self._on_dead(entry, message, str(error)[:500])
        dead = letter(context, entry, error)
        commit = msgspec.structs.replace(follow, ack=(entry, *follow.ack), append=(Out(DEAD, dead), *follow.append))
        if not await self.commit(commit):
            return  # a peer finished it: there is no letter
        if entry.deliveries > 1:
            await forget_deaths(context.bus, _name(entry))
        context.count("dead_letters")
        reason = "malformed" if isinstance(error, BadMessage) else "failed"
        name = dead.sample_id or dead.group_id or entry.id
        await context.refusals.add(f"{entry.stream.name}/{reason}", f"{name}: {dead.error}", kind=EventKind.DEAD_LETTER)


class _Faulty(BadMessage):
    """A message that can be decoded and must not be used."""

    def __init__(self, message: Any, text: str) -> None:
        super().__init__(text)
        self.message = message


def as_lost(context: Context, onward: Callable[[Entry, RolloutLost], Commit]) -> OnDead:
    """What follows a dead entry where samples travel: its sample goes on as lost, as `onward` says, so that its group closes. Of
    one that nobody waits for, nothing."""

    async def on_dead(entry: Entry, message: Any, error: str) -> Commit:
        lost = lost_of(entry, message, error)
        return onward(entry, lost) if lost is not None and await _waited_for(context, lost) else Commit()

    return on_dead


async def _waited_for(context: Context, lost: RolloutLost) -> bool:
    """Whether the run lists the sample as open, or it is of the evaluation under way."""
    index = index_of(lost.sample_id)
    opened = await context.bus.open_group(lost.group_id)
    if opened is not None:
        return index in opened.indexes
    step, offset = await context.bus.state_as("eval", _under_way)
    return lost.group_id == f"{EVAL_GROUPS}{step}" and index < offset


def _under_way(text: str) -> tuple[str, int]:
    step, *_, offset = (text or "::0").split(":")
    return step, int(offset)


def letter(context: Context, entry: Entry, error: Exception) -> DeadLetter:
    """An entry as a dead letter, with what failed."""
    kind = BadMessage if isinstance(error, BadMessage) else type(error)
    return letter_of(
        entry,
        actor=context.name,
        error=f"{kind.__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        wall=context.clock.wall(),
    )


def _name(entry: Entry) -> str:
    """By which its deaths are known: a sample that was parked goes on as another entry."""
    return entry.fields.get("id") or f"{entry.stream.name}/{entry.id}"


def _key(entry: Entry) -> tuple[str, str]:
    return entry.stream.name, entry.id


async def keep_leases(context: Context, reader: Reader, stop: asyncio.Event, free: Callable[[], int] = lambda: 64) -> None:
    """Renew what this reader holds and take over what the dead left, as far as it is `free` to; woken by time or the end. What is
    taken over goes before all that is new."""
    lease_s = context.bus.config.lease_s
    while not await within(lease_s / 4, stop):
        lost = await reader.renew()
        if lost:
            context.count("leases_lost", len(lost))
            await context.event(EventKind.LEASES_LOST, f"{len(lost)} entries were claimed by a peer")
        if step_s := await reader.clock_step(lease_s):
            way = "forth" if step_s > 0 else "back"
            text = f"Redis' clock was set {way} by {abs(step_s):.3g} s: all leases of {reader.readers} begin anew"
            await context.event(EventKind.CLOCK_SET, text)
            continue
        most = 0 if context.draining.is_set() else free()
        claimed = await reader.claim(lease_s, most) if most > 0 else []
        if claimed:
            context.count("claimed", len(claimed))
            reader.offer(claimed)
