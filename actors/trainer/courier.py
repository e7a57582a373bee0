"""Versions on their way from the trainer to the engines.

Writes  policy (announced, on_disk, sending)    Reads  events (log)    Owns  flat buffers, the broadcast group, the weights' files

    disk    whole files in shared memory, then PolicyAnnounced; whoever wants loads them
    delta   the same with the tensors that changed; engines with another version than the base get whole files
    nccl    flat buffers, broadcast to a group of engines
    ipc     flat buffers, which engines of this host map

nccl and ipc, for the engines that activated a version before (`Fleet`); the group is made anew when they come or go:

    trainer     PolicyAnnounced with a plan, and opens the group         publisher   Activate, to the plan's workers
    worker      joins, event `ready to receive`; its engine goes on with the old weights
    trainer     Sending once all are ready, and broadcasts               worker      pauses on Sending, loads, resumes, `activated`

Always true: engines are asked to load only between Sending and their report, and the buffers do not change in that time
(nccl: until the broadcast ended). A wait has the plan's deadline. When one of them leaves, fails or is late before
Sending, or the broadcast breaks, the version goes to disk (WeightsOnDisk, instead) and the run goes on with that; when the
next version is there first, this one is skipped. `files wanted` by the publisher puts it on disk beside.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from actors.trainer.backend import TrainBackend, WeightCopy
from actors.trainer.fleet import ASIDE_S, STRIKES, Fleet, Seat
from actors.trainer.transports.delta import DeltaWriter
from actors.trainer.transports.flat import FlatBuffers
from actors.trainer.transports.ipc import IpcSender
from actors.trainer.transports.nccl import GroupBroken, NcclSender
from actors.trainer.transports.spec import CourierSpec
from bus import Entry, Out, Tail
from bus.messages.control import Event, Vitals
from bus.messages.policy import PolicyAnnounced, Sending, WeightManifest, WeightsOnDisk
from bus.messages.versions import PolicyVersion
from bus.topology import EVENTS, POLICY

PATIENCE_S = 1.0  # for a version whose engines are not ready when the next one is
WHOLE = "whole"  # directory of whole files inside a version's own
InThread = Callable[..., Awaitable[Any]]


class Courier:
    """One version at a time. `in_thread` runs a call between training steps, where weights stand still."""

    def __init__(
        self, context: Context, spec: CourierSpec, backend: TrainBackend, in_thread: InThread, weights_dir: Path
    ) -> None:
        self._context = context
        self._spec = spec
        self._backend = backend
        self._in_thread = in_thread
        self._weights_dir = weights_dir
        self._fleet = Fleet()
        self._aside: set[str] = set()  # workers of which it was told
        self._stop = asyncio.Event()
        self._news = asyncio.Event()  # something of the events log, or the next version waits
        self._next_waits = False
        self._ready: set[str] = set()  # workers ready for the version under way
        self._reported: set[str] = set()  # workers that activated it, or could not
        self._version = PolicyVersion(id=0, step=0)
        self._task: asyncio.Task[None] | None = None
        self._sending = False
        self._held: WeightCopy | None = None  # the version under way: in the buffers (nccl, ipc) or in host memory (delta)
        self._whole: WeightManifest | None = None  # its whole files, once they are there
        self._files = asyncio.Lock()  # one writer of whole files
        self._copying = asyncio.Lock()  # the buffers do not change while they are copied
        self._buffers = FlatBuffers(spec.buffer_bytes, shared=weights_dir / "flat" if spec.transport == "ipc" else None)
        self._delta = DeltaWriter()
        self._nccl: NcclSender | None = None
        self._group_of: dict[str, Seat] = {}  # members of the present group
        self._ipc: IpcSender | None = None
        if spec.transport == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # read when NCCL starts; engines run with it, and both must

    # -- the events log -----------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Until `stop`: who can be sent to, who is ready, who wants files; woken by the blocking read."""
        tail = Tail(self._context.bus, [EVENTS], start="$")
        await tail.open()
        try:
            async with asyncio.TaskGroup() as tasks:

                def hear(_: Entry, message: Event | Vitals) -> None:
                    self._fleet.fold(message)
                    if isinstance(message, Event) and message.data.get("version") == self._version.id:
                        self._hear(message, tasks)

                while not self._stop.is_set():
                    await fold_log(self._context, await tail.read(0.5), hear)
                    self._news.set()
        finally:
            await tail.close()

    def _hear(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        match event.kind:
            case "ready to receive":
                self._ready.add(event.actor)
            case "activated" | "transport failed":
                self._reported.add(event.actor)
            case "files wanted" if self._held is not None:
                tasks.create_task(self._to_disk(self._version, instead=False), name="files")

    def stop(self) -> None:
        """Let `follow` end."""
        self._stop.set()

    def close(self) -> None:
        """Leave the group and free the buffers; harmless twice."""
        if self._nccl is not None:
            self._nccl.close()
        if self._ipc is not None:
            self._ipc.close()
        self._nccl, self._ipc, self._held = None, None, None
        for file in self._buffers.files:
            file.unlink(missing_ok=True)

    # -- a version ----------------------------------------------------------------------------------------------

    async def publish(self, tasks: asyncio.TaskGroup, version: PolicyVersion) -> None:
        """Copy the weights as they are now; the rest goes on beside the training. Waits for the version before: until it is
        written, or its broadcast ended; if its engines are not ready, PATIENCE_S."""
        await self._make_room()
        began = self._context.clock.monotonic()
        self._version, self._whole, self._sending = version, None, False
        self._ready, self._reported = set(), set()
        target = self._weights_dir / f"v{version.id:08d}"
        await asyncio.to_thread(shutil.rmtree, target, True)  # left by a run of this name that was deleted
        await self._tell_who_is_aside()
        members = self._members()
        if not members:
            copied: WeightCopy = await self._in_thread(self._backend.copy_weights)
            self._held = copied if self._spec.transport == "delta" else None
            self._task = tasks.create_task(self._write(version, copied, target, began), name="publish")
            return
        manifest = await self._in_thread(self._fill, target, members)
        self._task = tasks.create_task(self._deliver(version, manifest, members, began), name="publish")

    async def wait(self, *, last: bool = False) -> None:
        """Until the version under way is written or sent. `last`: whoever comes later finds it in files."""
        if self._task is not None:
            with self._context.waiting("the version to be published"):
                await self._task
        if last and self._held is not None:
            await self._to_disk(self._version, instead=False)
            self._held = None  # told: nothing of it is said once the run has finished

    async def _make_room(self) -> None:
        task = self._task
        if task is None:
            return
        with self._context.waiting("the former version to be published"):
            if self._held is not None and not self._sending:
                await asyncio.wait([task], timeout=PATIENCE_S)
            self._next_waits = True
            self._news.set()
            try:
                await task
                async with self._copying:  # a copy from the buffers may be under way
                    self._held = None
            finally:
                self._next_waits = False

    async def _tell_who_is_aside(self) -> None:
        if self._spec.transport not in ("nccl", "ipc"):
            return  # the publisher sees to others
        aside, before = self._fleet.aside(self._context.clock.wall()), self._aside
        self._aside = aside
        for name in sorted(aside - before):
            text = f"{name} gets files for {ASIDE_S / 60:g} minutes: {self._spec.transport} failed {STRIKES} times in a row"
            await self._context.event("files instead", text, level="warning", worker=name)

    def _members(self) -> dict[str, Seat]:
        """Engines that the next version is sent to; none = files."""
        able = self._fleet.able(self._context.clock.wall())
        if self._spec.transport == "nccl":
            return able
        if self._spec.transport != "ipc":
            return {}
        here = {name: seat for name, seat in able.items() if seat.host == socket.gethostname()}
        gpus = max((seat.gpus for seat in here.values()), default=0)
        return {name: seat for name, seat in here.items() if seat.gpus == gpus}  # handles are made per rank

    def _fill(self, target: Path, members: dict[str, Seat]) -> WeightManifest:
        """In the training's thread: weights into the buffers, and the plan."""
        live = self._backend.copy_weights(live=True)
        whole = str(target / WHOLE) if self._spec.check_equal else ""
        cuda = next(iter(live.tensors.values())).is_cuda
        manifest: WeightManifest
        if self._spec.transport == "nccl":
            sender = self._group(members, backend="nccl" if cuda else "gloo")
            manifest = sender.prepare(live.tensors, target, whole=whole)
        else:
            tp_size = next(iter(members.values())).gpus
            if self._ipc is None or self._group_of != members:
                self._ipc, self._group_of = IpcSender(tp_size=tp_size, buffers=self._buffers), members
            manifest = self._ipc.prepare(
                live.tensors, target, workers=tuple(members), deadline_s=self._spec.deadline_s, whole=whole
            )
        live.tensors = {}  # from now on they are in the buffers
        self._held = live
        if cuda:
            import torch

            torch.cuda.synchronize()  # others read the buffers on streams of their own
        return manifest

    def _group(self, members: dict[str, Seat], *, backend: str) -> NcclSender:
        if self._nccl is not None and self._nccl.is_open and self._group_of == members:
            return self._nccl
        if self._nccl is not None:
            self._nccl.close()
        own = all(seat.host == socket.gethostname() for seat in members.values())
        self._group_of = members
        self._nccl = NcclSender(
            {name: seat.gpus for name, seat in members.items()},
            name=f"{self._context.bus.config.run}-{os.getpid()}-{self._version.id}",
            address="127.0.0.1" if own else socket.gethostbyname(socket.gethostname()),
            backend=backend,
            deadline_s=self._spec.deadline_s,
            buffers=self._buffers,
        )
        return self._nccl

    # -- ways ---------------------------------------------------------------------------------------------------

    async def _write(self, version: PolicyVersion, copied: Any, target: Path, began: float) -> None:
        """Files, for everyone."""
        if self._spec.transport == "delta":
            whole = str(target / WHOLE) if self._spec.check_equal else ""
            manifest = await asyncio.to_thread(self._delta.write, copied, target, version.id, whole=whole)
            if manifest.transport == "disk":
                self._held = None
            elif whole:
                async with self._files:
                    await self._whole_files(version)
        else:
            manifest = await asyncio.to_thread(copied.write, target)
        await self._announce(version, manifest, began)

    async def _deliver(
        self, version: PolicyVersion, manifest: WeightManifest, members: dict[str, Seat], began: float
    ) -> None:
        """By the group or the buffers; by files when that fails."""
        nccl = self._nccl if self._spec.transport == "nccl" else None
        try:
            if self._spec.check_equal:
                async with self._files:
                    await self._whole_files(version)
            await self._announce(version, manifest, began)
            opening = beside(nccl.open) if nccl is not None and not nccl.is_open else None
            if not await self._gather(set(members), opening):
                self._context.count("versions_skipped")
                return
            fault_point(self._context.name, "before_sending")
            self._sending = True
            message = Sending(version=version, workers=tuple(members))
            await self._context.bus.append([Out(POLICY, message)], repeatable=True)
            if nccl is not None:
                await beside(nccl.send)
            else:
                await self._until_reported(version, set(members))
        except GroupBroken as error:
            if nccl is not None:
                nccl.close()
            # Of a group that broke nobody tells who is gone: all take this version from files first.
            for name in members.keys() if nccl is not None else members.keys() - self._ready:
                self._fleet.drop(name)
            text = f"version {version.id} goes by files: {error}"
            await self._context.event("transfer failed", text[:300], level="warning", version=version.id)
            await self._to_disk(version, instead=True)
        finally:
            self._sending = False

    async def _gather(self, members: set[str], opening: asyncio.Future[None] | None) -> bool:
        """Until all are ready and in the group. False: the next version is there first. GroupBroken: one left, or is late."""
        try:
            async with asyncio.timeout(self._spec.deadline_s):
                while not members <= self._ready:
                    self._news.clear()
                    if self._next_waits:
                        for name in members - self._ready:
                            self._fleet.drop(name)  # or it would hold up the next one too
                        return False
                    if gone := members - self._fleet.able(self._context.clock.wall()).keys():
                        raise GroupBroken(f"{', '.join(sorted(gone))} left before it was sent")
                    await self._news.wait()
                if opening is not None:
                    await opening
        except TimeoutError:
            late = ", ".join(sorted(members - self._ready)) or "the group"
            raise GroupBroken(f"{late} not ready within {self._spec.deadline_s:g} s") from None
        return True

    async def _until_reported(self, version: PolicyVersion, members: set[str]) -> None:
        """Until no engine can be reading the buffers any more: each activated, failed or is gone, at the latest well after
        the deadline that its worker has too."""
        try:
            async with asyncio.timeout(2 * self._spec.deadline_s):
                while members & self._fleet.able(self._context.clock.wall()).keys() - self._reported:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            late = ", ".join(sorted(members - self._reported))
            await self._context.event("transfer late", f"version {version.id}: no report of {late}", level="warning")

    async def _to_disk(self, version: PolicyVersion, *, instead: bool) -> None:
        """Whole files of the version under way, and word of them. Nothing when the next one has come meanwhile."""
        async with self._files:
            manifest = await self._whole_files(version)
            if manifest is not None:
                message = WeightsOnDisk(version=version, manifest=manifest, instead=instead)
                await self._context.bus.append([Out(POLICY, message)], repeatable=True)

    async def _whole_files(self, version: PolicyVersion) -> WeightManifest | None:
        """Written once; None when the weights are another version's by now."""
        async with self._copying:
            if version != self._version or self._held is None:
                return None
            if self._whole is not None:
                return self._whole
            held: Any = self._held
            if not held.tensors:  # in the buffers
                held = dataclasses.replace(held, tensors=await asyncio.to_thread(self._buffers.on_host))
        target = self._weights_dir / f"v{version.id:08d}" / WHOLE
        manifest: WeightManifest = await asyncio.to_thread(held.write, target)
        if version != self._version:
            return None
        self._whole = manifest
        return manifest

    async def _announce(self, version: PolicyVersion, manifest: WeightManifest, began: float) -> None:
        context = self._context
        prepared = context.clock.monotonic() - began
        fault_point(context.name, "before_announce")
        said = PolicyAnnounced(version=version, manifest=manifest, prepare_s=prepared)
        await context.bus.append([Out(POLICY, said)], repeatable=True)
        fault_point(context.name, "after_announce")


def beside(call: Callable[[], None]) -> asyncio.Future[None]:
    """A blocking call in a thread of its own that does not keep the process alive: one that hangs in a group whose peers
    are gone ends by its deadline, and nobody should wait for that at the end of a run."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda f: f.cancelled() or f.exception())  # heard, also when nobody awaits it any more

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def body() -> None:
        error: BaseException | None = None
        try:
            call()
        except Exception as raised:  # noqa: BLE001 - handed to whoever awaits
            error = raised
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=body, name="broadcast", daemon=True).start()
    return future


__all__ = ("Courier",)
