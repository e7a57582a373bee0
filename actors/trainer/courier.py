"""Sends versions from the trainer to the engines: it holds the newest one and sends it where the publisher says.

Reads  active (send), events (log)    Writes  policy (announced, ready, failed, sending)
Owns   flat buffers, the broadcast group, the weights' files

    disk    whole files in shared memory, then PolicyAnnounced; written anew from the weights, until these move on
    nccl    flat buffers, broadcast to a group of engines; files beside for others. Without a copy: the weights themselves in
            buckets, and they wait for it (`let_go`)
    ipc     flat buffers, which engines of this host map; files beside for others

    EMPTY --publish--> HELD --Send--> GATHERING --all are ready--> SENDING --sent, or all reported--> HELD
                                      GATHERING --one left or is late, the next version waits--> HELD, SendFailed

    publisher   Send, with the engines that can take it          trainer     makes or keeps the group, WeightsReady with a plan
    publisher   Activate                                         worker      joins, event `ready to receive`; its engine goes on
    trainer     Sending once all are ready, and broadcasts       worker      pauses, loads, resumes, `activated`

Always true: engines are asked to load only between Sending and their report, and the buffers do not change in that time
(nccl: until the broadcast ended). A wait has the plan's deadline. Who is in it is the publisher's word alone.
"""

from __future__ import annotations

import asyncio
import enum
import shutil
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from actors.runtime.transports.records import DISK
from actors.trainer.backend import TrainBackend
from actors.trainer.spec import CourierSpec
from actors.trainer.transports.files import VersionWriter, copied
from actors.trainer.transports.flat import NamedTensors, spoken
from actors.trainer.transports.nccl import GroupBroken, in_daemon
from actors.trainer.transports.senders import Senders
from bus import Entry, Out, Tail
from bus.messages.active import Send
from bus.messages.base import Message
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.messages.policy import PolicyAnnounced, SendFailed, Sending, WeightManifest, WeightsReady
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.plans import put_plan, version_dir
from bus.topology import ACTIVE, EVENTS, POLICY

PATIENCE_S = 1.0  # for a version whose engines are not ready when the next one is
NEVER_AGAIN = 1 << 30  # number of a writing that is never to be made anew
PLANS_KEPT = 4  # a worker may come late to an order, and is to find what it names
InThread = Callable[..., Awaitable[Any]]


class Stage(enum.Enum):
    """What may happen to the version in hand; see above."""

    EMPTY = enum.auto()
    HELD = enum.auto()
    GATHERING = enum.auto()
    SENDING = enum.auto()


class Courier:
    """One version at a time. `in_thread` runs a call between training steps, where weights stand still."""

    def __init__(self, context: Context, spec: CourierSpec, backend: TrainBackend, in_thread: InThread, weights_dir: Path) -> None:
        self._context = context
        self._spec = spec
        self._backend = backend
        self._in_thread = in_thread
        self._weights_dir = weights_dir
        self._tail = Tail(context.bus, [ACTIVE, EVENTS], start="$")
        self._stop = asyncio.Event()
        self._news = asyncio.Event()  # something of the logs, or the next version waits
        self._stage = Stage.EMPTY
        self._version = PolicyVersion(id=0, step=0)
        self._moved = False  # the weights are not those of the version any more
        self._kept: list[NamedTensors] = []  # on the host, where weights sleep or move on before files are written anew
        self._beside: dict[str, bytes] = {}
        self._asked: Send | None = None  # who it is sent to, as was said last
        self._ready: set[str] = set()  # workers ready for it
        self._reported: set[str] = set()  # workers that activated it, or could not
        self._next_waits = False
        self._task: asyncio.Task[None] | None = None  # writes or sends it
        self._written: tuple[int, WeightManifest] | None = None  # its whole files, and the number of that writing
        self._files = asyncio.Lock()  # one writer of whole files
        self._copying = asyncio.Lock()  # neither buffers nor version change while they are copied
        self._senders = Senders(context.bus, spec, weights_dir / "flat", self._export)
        self._under_way = 0  # orders for the version
        self._taken = asyncio.Event()  # there were some, and none is under way
        self._plans: list[str] = []  # blobs of the newest plans

    # -- the logs -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Before the first version: what is said from now on is read."""
        await self._tail.open()

    async def follow(self) -> None:
        """Until `stop`: what the publisher asks for, who is ready, who reported; woken by the blocking read."""
        try:
            async with asyncio.TaskGroup() as tasks:

                def hear(_: Entry, message: Message) -> None:
                    if isinstance(message, Send) and message.version == self._version:
                        self._obey(message, tasks)
                    if isinstance(message, Event) and message.data.get("version") == self._version.id:
                        self._hear(message)

                while not self._stop.is_set():
                    await fold_log(self._context, await self._tail.read(0.5), hear)
                    self._news.set()
        finally:
            await self._tail.close()

    def _obey(self, order: Send, tasks: asyncio.TaskGroup) -> None:
        self._under_way += 1
        names = ", ".join(seat.worker for seat in order.seats) or "whoever needs it"
        self._tell(f"version {order.version.id} is to go by {order.transport} to {names}")
        if order.transport == DISK.name:
            tasks.create_task(self._done_with(self._to_disk(order.version, order.attempt)), name="files")
            return
        first, self._asked = self._asked is None, order  # later ones name who is left
        if first and self._stage is Stage.HELD and order.transport == self._spec.transport:
            self._stage = Stage.GATHERING
            self._task = tasks.create_task(self._done_with(self._deliver(order)), name="send")
        elif first:
            text = "it is not held any more"
            tasks.create_task(self._done_with(self._say(SendFailed(version=order.version, text=text))))
        else:
            self._under_way -= 1

    async def _done_with(self, order: Awaitable[None]) -> None:
        try:
            await order
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._taken.set()

    def _hear(self, event: Event) -> None:
        match event.kind:
            case EventKind.READY_TO_RECEIVE:
                self._ready.add(event.actor)
            case EventKind.ACTIVATED | EventKind.TRANSPORT_FAILED:
                self._reported.add(event.actor)
                took = ", ".join(f"{k} {float(event.data[k]):.3f}" for k in ("pause_s", "total_s") if k in event.data)
                how = event.data.get("transport", "?")
                self._tell(f"{event.actor} {event.kind}: version {self._version.id}, transport {how}, {took}")

    def stop(self) -> None:
        """Let `follow` end."""
        self._stop.set()

    def close(self) -> None:
        """Leave the group and free the buffers; harmless twice."""
        self._senders.close()

    def _tell(self, text: str, level: int = 1) -> None:
        """What --debug-weight-sync asks for."""
        if self._spec.verbosity >= level:
            self._context.log.info("weight_sync: %s", text)

    def _export(self) -> Generator[NamedTensors]:
        """In the training's thread."""
        buckets = self._backend.export(self._spec.buffer_bytes)
        if self._spec.verbosity < 2:
            return buckets
        return spoken(buckets, partial(self._tell, level=2))

    # -- a version ----------------------------------------------------------------------------------------------

    async def publish(self, tasks: asyncio.TaskGroup, version: PolicyVersion) -> None:
        """Copy the weights as they are now; the rest goes on beside the training. Waits for the version before: until it is
        written, or its broadcast ended; if its engines are not ready, PATIENCE_S."""
        await self._make_room()
        began = self._context.clock.monotonic()
        self._version, self._asked, self._written = version, None, None
        self._ready, self._reported = set(), set()
        self._moved, self._kept = False, []
        self._taken.clear()
        if still := self._spec.still or self._backend.unchanged:
            self._stage, self._written = Stage.HELD, (NEVER_AGAIN, WeightManifest(path=still))
            await self._announce(version, self._written[1], began)
            return
        target = version_dir(self._weights_dir, version.id)
        await asyncio.to_thread(shutil.rmtree, target, True)  # left by a run of this name that was deleted
        if self._senders.kind.whole:
            writer = await self._in_thread(self._copy, target)
            self._stage = Stage.HELD
            self._task = tasks.create_task(self._write(version, writer, began), name="publish")
            return
        await asyncio.to_thread(target.mkdir, parents=True)  # a successor counts on from the newest of these names
        manifest = await self._in_thread(self._fill)
        self._stage = Stage.HELD
        await self._announce(version, manifest, began)

    async def let_go(self) -> None:
        """Before the weights move: from now on the version is in buffers and files alone. Where there are none, waits until engines
        took it from the weights, or could not; of the publisher's order and of their being ready at most the deadline."""
        if self._senders.passing is not None and self._stage is not Stage.EMPTY and not self._moved:
            with self._context.waiting(Wait.TAKEN):
                try:
                    async with asyncio.timeout(self._spec.deadline_s):
                        await self._taken.wait()
                except TimeoutError:
                    if self._stage is Stage.SENDING:  # which has a deadline of its own
                        await self._taken.wait()
        self._moved = True
        self._news.set()

    async def wait(self, *, last: bool = False) -> None:
        """Until the version under way is written or sent. `last`: whoever comes later finds it in files."""
        if last and not self._senders.kind.whole:
            await self._to_disk(self._version, 0)
        if self._task is not None:
            with self._context.waiting(Wait.PUBLISHED):
                await self._task
        if last:  # told: nothing of it is said once the run has finished
            self._stage = Stage.EMPTY

    async def _make_room(self) -> None:
        with self._context.waiting(Wait.FORMER):
            task = self._task
            if task is not None and self._stage is Stage.GATHERING:
                await asyncio.wait([task], timeout=PATIENCE_S)
            self._next_waits = True
            self._news.set()
            try:
                if task is not None:
                    await task
                async with self._copying:  # a copy from the buffers may be under way
                    self._stage = Stage.EMPTY
            finally:
                self._next_waits = False

    def _fill(self) -> WeightManifest:
        """In the training's thread: weights into the buffers, if there are any."""
        self._beside = self._backend.beside()
        return self._senders.take()

    def _copy(self, target: Path) -> VersionWriter:
        """In the training's thread: weights on their way into files."""
        self._beside = self._backend.beside()
        return copied(self._export(), self._beside, target, self._kept if self._spec.keep_copy else None)

    async def _announce(self, version: PolicyVersion, manifest: WeightManifest, began: float) -> None:
        prepared = self._context.clock.monotonic() - began
        fault_point(self._context.name, "before_announce")
        await self._say(PolicyAnnounced(version=version, manifest=manifest, prepare_s=prepared))
        size = f"{manifest.n_bytes:,} bytes"
        self._tell(f"version {version.id}, step {version.step}, announced: {size}, prepared in {prepared:.3f} s")
        fault_point(self._context.name, "after_announce")

    async def _say(self, message: Message) -> None:
        await self._context.bus.append([Out(POLICY, message)], repeatable=True)

    # -- in files -----------------------------------------------------------------------------------------------

    async def _write(self, version: PolicyVersion, writer: VersionWriter, began: float) -> None:
        async with self._files:
            manifest = await asyncio.to_thread(writer.finish)
            self._written = 0, manifest
        await self._announce(version, manifest, began)

    async def _to_disk(self, version: PolicyVersion, attempt: int) -> None:
        """Whole files of the version in hand, and word of them. Nothing when the next one has come meanwhile."""
        async with self._files:
            manifest = await self._whole_files(version, attempt)
        if manifest is not None and self._written is not None:
            await self._say(WeightsReady(version=version, manifest=manifest, attempt=self._written[0]))

    async def _whole_files(self, version: PolicyVersion, attempt: int) -> WeightManifest | None:
        """Written once for each attempt; None when there is nothing left to write them from: the next version comes soon."""
        async with self._copying:
            if version != self._version or self._stage is Stage.EMPTY:
                return None
            if self._written is not None and self._written[0] >= attempt:
                return self._written[1]
            target = version_dir(self._weights_dir, version.id) / f"files-{attempt}"
            buffers = self._senders.buffers
            if buffers.flat or self._kept:
                buckets = buffers.held() if buffers.flat else self._kept
                writer = await asyncio.to_thread(copied, buckets, self._beside, target)
            else:
                writer = await self._in_thread(lambda: None if self._moved else self._copy(target))
        if writer is None:
            return None
        manifest = await asyncio.to_thread(writer.finish)
        if version != self._version:
            return None
        self._written = attempt, manifest
        return manifest

    # -- to engines ---------------------------------------------------------------------------------------------

    async def _deliver(self, order: Send) -> None:
        """By the group or the buffers; word of it when that fails."""
        version, members = order.version, {seat.worker for seat in order.seats}
        try:
            whole = ""
            if self._spec.check_equal:
                async with self._files:
                    filed = await self._whole_files(version, 0)
                whole = filed.path if filed is not None else ""
            plan = await asyncio.to_thread(self._senders.plan, order.seats, whole, version=version.id)
            sender = self._senders.sender
            assert sender is not None
            manifest = await put_plan(self._context.bus, plan)
            self._plans.append(manifest.plan)
            await self._context.bus.blobs.delete(self._plans[:-PLANS_KEPT])
            del self._plans[:-PLANS_KEPT]
            await self._say(WeightsReady(version=version, manifest=manifest))
            opening = None if sender.is_open else in_daemon(sender.open)
            if not await self._gather(members, opening):
                self._context.count("versions_skipped")
                skipped = tuple(sorted(members - self._ready))  # or they would hold up the next one too
                await self._say(SendFailed(version=version, workers=skipped, text="the next version was there first"))
                return
            fault_point(self._context.name, "before_sending")
            self._stage = Stage.SENDING
            await self._say(Sending(version=version, workers=tuple(sorted(members))))
            await (in_daemon(sender.send) if self._senders.passing is None else self._in_thread(sender.send))
            if not self._senders.kind.broadcasts:
                await self._until_reported(version)
        except GroupBroken as error:
            # Of a group that broke nobody tells who is gone: all take this version from files first.
            blamed = members if self._senders.kind.broadcasts else members - self._ready
            self._senders.end_group()
            text = f"version {version.id} goes by files: {error}"
            await self._context.event(EventKind.TRANSFER_FAILED, text[:300], version=version.id)
            await self._say(SendFailed(version=version, workers=tuple(sorted(blamed)), text=text[:300]))
        finally:
            self._stage = Stage.HELD

    def _left(self) -> set[str]:
        """Engines that the publisher still counts on."""
        return {seat.worker for seat in self._asked.seats} if self._asked is not None else set()

    async def _gather(self, members: set[str], opening: asyncio.Future[None] | None) -> bool:
        """Until all are ready and in the group. False: the next version is there first. GroupBroken: one left, or is late."""
        try:
            async with asyncio.timeout(self._spec.deadline_s):
                while not members <= self._ready:
                    self._news.clear()
                    if self._next_waits or (self._moved and self._senders.passing is not None):
                        return False
                    if gone := members - self._left():
                        raise GroupBroken(f"{', '.join(sorted(gone))} left before it was sent")
                    await self._news.wait()
                if opening is not None:
                    await opening
        except TimeoutError:
            late = ", ".join(sorted(members - self._ready)) or "the group"
            raise GroupBroken(f"{late} not ready within {self._spec.deadline_s:g} s") from None
        return True

    async def _until_reported(self, version: PolicyVersion) -> None:
        """Until no engine can be reading the buffers any more: each activated, failed or is gone, at the latest well after
        the deadline that its worker has too."""
        try:
            async with asyncio.timeout(2 * self._spec.deadline_s):
                while self._left() - self._reported:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            late = ", ".join(sorted(self._left() - self._reported))
            await self._context.event(EventKind.TRANSFER_LATE, f"version {version.id}: no report of {late}")
