"""Entries to handler, handler's commit to the bus: the loop that most rooms are.

A handler gets one entry with its message and returns a Commit (which must acknowledge the entry), or None when it keeps
the entry for a later commit. Killed at any await, nothing is lost and nothing is done twice downstream: result and
acknowledgement are one step.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.retry import decide
from actors.runtime.run import RunEnds
from bus import Commit, Entry, Out, Reader, Stream
from bus.dead import letter_of
from bus.errors import BusFull, BusUnreachable, InvariantBroken, Poison
from bus.topology import DEAD

Handler = Callable[[Entry, Any], Awaitable[Commit | None]]
OnDead = Callable[[Entry, Any, str], Commit]  # what must follow a dead entry, so that its group still closes


class Consumer:
    """Reads, renews, claims, retries, buries. `concurrency` handlers run at once.

    `holds`: the handler keeps entries for a later commit. Each restart of the room delivers them again through no fault
    of theirs, so their number of deliveries says nothing.
    """

    def __init__(
        self,
        context: Context,
        streams: Sequence[Stream],
        readers: str,
        handler: Handler,
        *,
        on_dead: OnDead,
        concurrency: int = 1,
        batch: int = 64,
        rebuild: Callable[[], None] | None = None,
        holds: bool = False,
    ) -> None:
        self._context = context
        self._handler = handler
        self._on_dead = on_dead
        self._concurrency = concurrency
        self._batch = batch
        self._rebuild = rebuild
        self._holds = holds
        self.reader = Reader(context.bus, streams, readers, context.name)
        self._names = "+".join(stream.name for stream in streams)
        self._restarts_seen = context.bus.link.server_restarts

    async def run(self) -> None:
        """Until draining: waits for entries (woken by the blocking read), handles them, commits."""
        await self.reader.open()
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep_leases(self._context, self.reader, stop))
                try:
                    await self._loop()
                finally:
                    stop.set()
        finally:
            await self.reader.close()

    async def _loop(self) -> None:
        context = self._context
        slots = asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as tasks:
            while not context.draining.is_set():
                await slots.acquire()
                slots.release()
                self._note_server_restart()
                free = min(self._batch, slots._value) if self._concurrency > 1 else self._batch
                with context.waiting(f"an entry of {self._names}") as heard:
                    if entries := await self.reader.read(free, 0.5):
                        heard()
                for entry in entries:
                    if self._concurrency == 1:
                        await self._one(entry)
                        continue
                    await slots.acquire()
                    task = tasks.create_task(self._one(entry))
                    task.add_done_callback(lambda _: slots.release())

    def _note_server_restart(self) -> None:
        restarts = self._context.bus.link.server_restarts
        if restarts != self._restarts_seen and self._rebuild is not None:
            self.reader.held.clear()
            self._rebuild()
        self._restarts_seen = restarts

    async def _one(self, entry: Entry) -> None:
        context = self._context
        context.in_flight += 1
        message: Any = None
        try:
            if entry.deliveries > context.bus.config.max_deliveries and not self._holds:
                raise Poison(f"delivered {entry.deliveries} times without an acknowledgement")
            message = await context.bus.message(entry)
            commit = await self._handler(entry, message)
        except (BusUnreachable, BusFull, InvariantBroken, RunEnds):
            raise
        except Exception as error:  # noqa: BLE001 - unknown means poison; the dead letter keeps the traceback
            await self.failed(entry, message, error)
            return
        finally:
            context.in_flight -= 1
        if commit is not None:
            await self.commit(commit)

    async def commit(self, commit: Commit) -> bool:
        """Commit and forget the entries; False = somebody else had finished one of them, nothing was done."""
        name = self._context.name
        fault_point(name, "before_commit")
        result = await self._context.bus.commit(commit)
        fault_point(name, "after_commit")
        if result.moved:
            self._context.count("moved", len(result.moved))
            gone = [entry for entry in commit.ack if entry.id in result.moved]
            self.reader.forget(gone)
            return False
        self.reader.forget(commit.ack)
        return result.done

    async def failed(self, entry: Entry, message: Any, error: Exception) -> None:
        """Retry with a pause, or dead-letter with whatever must follow."""
        context = self._context
        decision = decide(error, deliveries=entry.deliveries, max_deliveries=context.bus.config.max_deliveries)
        if decision.action == "again":
            context.count("retries")
            await context.event("retry", f"{entry.stream.name} {entry.id}: {error}", level="warning")
            await context.clock.sleep(decision.after_s)
            self.reader.retry_later(entry)
            return
        await bury(context, self.reader, entry, message, error, self._on_dead)


def header_number(entry: Entry, field: str) -> int:
    """A number from an entry's readable fields; 0 when it is missing or no number (headers come from outside too)."""
    text = entry.fields.get(field, "")
    return int(text) if text.isdecimal() else 0


async def bury(context: Context, reader: Reader, entry: Entry, message: Any, error: Exception, on_dead: OnDead) -> None:
    """Move an entry to the dead letters together with what must follow, in one step."""
    letter = letter_of(
        entry,
        actor=context.name,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        wall=context.clock.wall(),
    )
    follow = on_dead(entry, message, str(error)[:500])
    result = await context.bus.commit(
        Commit(
            ack=(entry, *follow.ack),
            append=(Out(DEAD, letter), *follow.append),
            ledger=follow.ledger,
            close_groups=follow.close_groups,
            delete_prefixes=follow.delete_prefixes,
        )
    )
    reader.forget([entry])
    if not result.done:  # a peer finished it: there is no letter
        context.count("moved", len(result.moved))
        return
    context.count("dead_letters")
    await context.event("dead letter", f"{letter.stream} {letter.sample_id}: {letter.error}"[:300], level="error")


async def keep_leases(
    context: Context, reader: Reader, stop: asyncio.Event, room: Callable[[], int] = lambda: 64
) -> None:
    """Renew what this reader holds and take over what the dead left, as far as there is `room`; woken by time or the
    end."""
    lease_s = context.bus.config.lease_s
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), lease_s / 4)
            return
        except TimeoutError:
            pass
        lost = await reader.renew()
        if lost:
            context.count("leases_lost", len(lost))
            await context.event("leases lost", f"{len(lost)} entries were claimed by a peer", level="warning")
        free = 0 if context.draining.is_set() else room()
        claimed = await reader.claim(lease_s, free) if free > 0 else []
        if claimed:
            context.count("claimed", len(claimed))
            reader.offer(claimed)


__all__ = ("Consumer", "Handler", "OnDead", "bury", "header_number", "keep_leases")
