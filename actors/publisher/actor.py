"""Publisher room: decides who serves which version and which way it gets there, and says who does.

Reads  policy (log), events (log)    Writes  active    Owns  nothing: rebuilt from policy, vitals and reports
The trainer never waits for it, and a slow or dead engine never holds back the others: each worker activates on its own
engine and reports; a version counts as active when the first report of it arrives.

    trainer     PolicyAnnounced: in files, or held by it (nccl, ipc)
    publisher   held: Send, to the engines that can take it so; Send of files once anybody else needs the version
    trainer     WeightsReady, or SendFailed: then the version goes to all by files
    publisher   Activate, to those for whom it is ready       worker    `activated`, or why not
                on other hosts: with the addresses from which to fetch the files (elsewhere.py)

Files that a worker refuses, or that are gone, are written anew, at most TRIES times for one version; when nobody could load
the last ones the run ends with the reason. Engines of a Send that are lost are left out of it by another one.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec

from actors.publisher.elsewhere import Elsewhere
from actors.publisher.members import ASIDE_S, REFUSALS, STRIKES, Members
from actors.publisher.plan import ROOM, TRIES, Target, choose_ways, in_the_way, next_wave, worth_saying
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.fetch import Damaged
from actors.runtime.logs import fold_log
from actors.runtime.run import RunEnds
from actors.runtime.transports.records import DISK, NETWORK
from bus import Entry, Out, Tail
from bus.messages.active import Activate, PolicyActive, Seat, Send
from bus.messages.control import Event, Vitals
from bus.messages.events import EventKind
from bus.messages.policy import Finished, PolicyAnnounced, Restored, SendFailed, StepDone, WeightManifest, WeightsReady
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.plans import version_dir
from bus.topology import ACTIVE, EVENTS, POLICY

BLOCK_S = 0.5  # longest wait of one read
PAGE = 256  # entries of one read


class PublisherSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`wave_fraction`: share of engines that may be away activating at once. `keep_versions`: weight files kept."""

    wave_fraction: float = 1.0
    keep_versions: int = 3
    worker_timeout_s: float = 10.0
    weights_dir: str = ""
    activation_deadline_s: float = 60.0
    serve_at: str = ""
    """HOST[:PORT] at which workers on other hosts fetch versions; empty = our address on the bus, any port."""
    weights_token: str = ""
    """What they must show."""
    transport: str = ""
    """How the trainer brings versions, as its setting says it."""
    lent: tuple[str, ...] = ()
    """Workers whose engines are on the trainer's GPUs while it lends them."""


class Publisher:
    """The room."""

    def __init__(self, context: Context, spec: PublisherSpec) -> None:
        self._context = context
        self._spec = spec
        self._elsewhere = Elsewhere(context, token=spec.weights_token, address=spec.serve_at, ours=spec.weights_dir)
        self._forget()

    def _forget(self) -> None:
        self._announced: dict[int, PolicyVersion] = {}
        self._target: Target | None = None
        self._in_files: set[int] = set()  # versions of which files may be here
        self._n_bytes = 0  # of the newest one
        self._now = 0.0  # of our own clock, when the entries being folded came
        self._members = Members(self._spec.worker_timeout_s, self._spec.lent, self._spec.transport)
        self._why = ""  # files were refused last
        self._aside: set[str] = set()  # workers of which it was told that they get files, or nothing
        self._masked: tuple[int, float] = (-1, 0.0)  # newest step done, share of its batch's tokens over the bound
        self._lost: set[int] = set()  # versions of a future that a restored trainer does not have
        self._trainer_at = -1  # version of the living trainer; -1 while it loads
        self._active: PolicyVersion | None = None
        self._said: PolicyActive | None = None

    async def run(self) -> None:
        """Until draining: waits for announcements and reports (woken by the blocking read)."""
        context = self._context
        tail = Tail(context.bus, [POLICY, EVENTS])
        try:
            await self._rebuild(tail)
            while not context.draining.is_set():
                if self._restarts != context.bus.link.server_restarts:
                    await self._rebuild(tail)
                began = context.clock.monotonic()
                with context.waiting(Wait.ANNOUNCEMENTS):
                    entries = await tail.read(BLOCK_S, PAGE)
                now = context.clock.monotonic()
                self._now = now
                await fold_log(context, entries, self._fold)
                self._members.expire(now, unread_s=max(0.0, now - began - 2 * BLOCK_S))
                if len(entries) < PAGE:  # else there is more to know first
                    await self._act(now)
        finally:
            await tail.close()
            await self._elsewhere.close()

    async def _rebuild(self, tail: Tail) -> None:
        """Everything from the bus; again after a restart of the server, which may have lost what was said last."""
        bus, now = self._context.bus, self._context.clock.monotonic()
        self._restarts = bus.link.server_restarts
        self._forget()
        await tail.open()
        newest_event = await bus.last(EVENTS)
        tail.positions[EVENTS.name] = newest_event[0].id if newest_event else "0"
        silences = await bus.silences()
        for name, vitals in (await bus.vitals()).items():
            self._members.fold(vitals, now - silences.get(name, 0.0))

    def _fold(self, entry: Entry, message: object) -> None:
        target, now = self._target, self._now
        match message:
            case PolicyAnnounced():
                self._announced[message.version.id] = message.version
                self._in_files.add(message.version.id)
                self._target, self._n_bytes = Target(message.version, message.manifest), message.manifest.n_bytes
            case StepDone():
                self._masked = (message.step, message.metrics.get("rollout/masked_fraction", 0.0))
            case WeightsReady() if target is not None and message.version.id == target.version.id:
                target.take(message)
            case SendFailed():
                self._members.unseat(message.workers)
                if target is not None and message.version.id == target.version.id:
                    target.only_files()
                    self._members.withdraw(message.version.id)
            case Finished() if target is not None and target.sent is None:
                target.only_files()
            case Restored():
                self._active = None
                self._target = None  # the restored trainer announces its version again
                self._lost |= {version.id for version in self._announced.values() if version.step > message.step}
            case Event(kind=EventKind.WEIGHTS_REFUSED):
                self._members.fold(message, now)
                if target is not None and target.spoiled(str(message.data.get("path", ""))):
                    self._members.withdraw(target.version.id)
                self._why = f"{message.actor}: {message.text}"
            case Event(kind=EventKind.ACTIVATED, data={"fetched": n_bytes, "fetch_s": seconds}):
                self._elsewhere.heard(int(n_bytes), float(seconds))
                self._members.fold(message, now, entry.id)
            case Vitals(role="trainer"):
                self._trainer_at = message.version
            case Vitals() | Event():
                self._members.fold(message, now, entry.id)

    async def _act(self, now: float) -> None:
        context, spec, target, members = self._context, self._spec, self._target, self._members
        for name, number in members.overdue(now, spec.activation_deadline_s):
            waits = members.all[name].waits
            why = f"it waits for {waits}" if waits else "it does not say why"
            late = f"{name} has not served version {number} within {spec.activation_deadline_s:g} s"
            await context.event(EventKind.ACTIVATION_LATE, f"{late}: {why}; ordered again, in files")
        if target is None:
            return
        version = target.version.id
        serving, able = members.serving, members.able(target.transport, target.host, now)
        hopeless = members.hopeless(now)
        if hopeless >= members.all.keys():
            hopeless = set()  # nobody else is there
        refusers = {n for n, m in members.all.items() if target.files is not None and m.refused == target.files.path}
        await self._tell_who_is_aside(members.aside(now) if target.host else set(), hopeless)
        wave = next_wave(
            serving=serving,
            target=version,
            fraction=1.0 if target.host else spec.wave_fraction,  # the trainer sends to all together
            in_progress=[n for n, m in members.all.items() if m.ordered is not None and m.ordered[0] == version],
            late=[n for n, m in members.all.items() if m.late],
        )
        wave = [name for name in wave if name not in hopeless | refusers]
        if wave and target.files is not None and self._are_gone(target.files):
            if self._trainer_at < version:
                wave = []  # those of an ended run: the trainer announces its version again
            else:
                target.spoiled(target.files.path)
        await self._ask_to_send(target, wave, able, serving)
        ways = choose_ways(wave, target, able)
        if target.sent is not None:
            await self._order(target.version, target.sent, ways.sent, now)
        if target.files is not None:
            far = self._elsewhere.among(ways.files, members.all)
            await self._order(target.version, target.files, [name for name in ways.files if name not in far], now)
            await self._order_far(target, target.files, far, now)
        if ways.lacking:
            await self._ask_for_files(target, ways.lacking, now)
        if refusers and target.attempt >= TRIES and refusers >= serving.keys() and version not in serving.values():
            raise RunEnds(
                f"no engine can load version {version}, whose files were written anew {TRIES} times. {self._why} "
                "Look at the memory and the disk of the trainer's host; the run goes on from its last checkpoint."
            )
        await self._say(serving)
        await self._sweep(now, serving)

    async def _ask_to_send(self, target: Target, wave: list[str], able: dict[str, Seat], serving: dict[str, int]) -> None:
        """Once for a version, with all who can be sent to; again with those that are left when one is lost."""
        if target.seats is None and wave:
            target.seats = {name: able[name] for name in wave if name in able}
            if not target.seats:
                return
        elif target.seats:
            version = target.version.id
            left = {n: s for n, s in target.seats.items() if able.get(n) == s or serving.get(n) == version}
            if left == target.seats:
                return
            target.seats = left
        else:
            return
        await self._send(Send(version=target.version, transport=target.transport, seats=tuple(target.seats.values())))

    async def _ask_for_files(self, target: Target, names: list[str], now: float) -> None:
        if target.asked_at is not None:
            if now - target.asked_at < self._spec.activation_deadline_s:
                return
            waited = f"{now - target.asked_at:.0f} s for files of version {target.version.id}"
            text = f"{', '.join(names)} wait {waited}, which the trainer was asked to write; it is asked again"
            await self._context.event(EventKind.FILES_LATE, text)
        elif target.attempt:
            text = f"version {target.version.id} is written anew, time {target.attempt} of {TRIES} at most. {self._why}"
            await self._context.event(EventKind.FILES_ANEW, text[:300], version=target.version.id)
        target.asked_at = now
        await self._send(Send(version=target.version, transport=DISK.name, attempt=target.attempt))

    async def _send(self, order: Send) -> None:
        await self._context.bus.append([Out(ACTIVE, order)], repeatable=True)

    async def _tell_who_is_aside(self, by_files: set[str], without: set[str]) -> None:
        told, self._aside = self._aside, by_files | without
        for name in sorted(self._aside - told):
            if name in without:
                text = f"{name} gets no version for {ASIDE_S / 60:g} minutes: it refused {REFUSALS + 1} in a row. {self._why}"
            else:
                text = f"{name} gets files for {ASIDE_S / 60:g} minutes: what was sent failed {STRIKES} times in a row"
            await self._context.event(EventKind.WORKER_ASIDE, text[:300], worker=name)

    async def _order_far(self, target: Target, files: WeightManifest, workers: list[str], now: float) -> None:
        """To those that must fetch the files."""
        version = target.version
        try:
            packed = await self._elsewhere.parcel(files) if workers else None
        except Damaged as error:
            self._why = str(error)
            if target.spoiled(files.path):
                self._members.withdraw(version.id)
            return
        if packed is None:
            return
        way = msgspec.structs.replace(files, transport=NETWORK.name, path="", n_bytes=packed.parcel.n_bytes)
        for sources, names in self._elsewhere.sources(version.id, workers, self._members.all).items():
            await self._order(version, way, names, now, sources=sources, **packed._asdict())

    async def _order(
        self, version: PolicyVersion, manifest: WeightManifest, workers: list[str], now: float, **fetched: Any
    ) -> None:
        if not workers:
            return
        context = self._context
        fault_point(context.name, "before_order")
        mode = str(context.knobs.pause_generation_mode)
        order = Activate(version=version, manifest=manifest, mode=mode, workers=tuple(workers), **fetched)
        await context.bus.append([Out(ACTIVE, order)], repeatable=True)
        fault_point(context.name, "after_order")
        for name in workers:
            self._members.all[name].order(version.id, now, fetched=bool(fetched))

    def _are_gone(self, files: WeightManifest) -> bool:
        """Whether files that the trainer wrote here are not there any more."""
        if not self._spec.weights_dir:
            return False
        path = Path(files.path).resolve()
        return path.is_relative_to(Path(self._spec.weights_dir).resolve()) and not path.exists()

    async def _say(self, serving: dict[str, int]) -> None:
        """Tell who serves what, when it changed, also that nobody does any more. Engines may still serve a lost future; it frees no
        slot."""
        versions = [self._announced[v] for v in serving.values() if v in self._announced and v not in self._lost]
        if versions and (self._active is None or max(versions).id > self._active.id):
            self._active = max(versions)
        if self._active is None:
            return
        said = PolicyActive(
            version=self._active,
            serving=serving,
            slots={name: slots for name in serving if (slots := self._members.all[name].slots)},
            masked_fraction=self._masked[1],
            masked_step=self._masked[0],
        )
        if worth_saying(said, self._said):
            self._said = said
            await self._context.bus.append([Out(ACTIVE, said)], repeatable=True)
            self._context.version = self._active.id

    async def _sweep(self, now: float, serving: dict[str, int]) -> None:
        """Delete weight files that nobody wants and nobody will be ordered to, and others where the trainer needs their room: what
        it wrote here, never a checkpoint of the user."""
        wanted = self._members.wanted(now)
        keep = set(sorted(self._announced)[-self._spec.keep_versions :]) | wanted
        for version in self._announced.keys() - keep - set(serving.values()):
            del self._announced[version]
        folder = Path(self._spec.weights_dir)
        if not self._spec.weights_dir or not folder.is_dir():
            return
        for version in self._in_files - keep:
            await self._delete(version_dir(folder, version))
        self._in_files &= keep
        if len(self._in_files) < 2:
            return
        free = shutil.disk_usage(folder).free
        for version in in_the_way(self._in_files, wanted, free=free, each=self._n_bytes):
            self._elsewhere.withdraw(version_dir(folder, version))
            await self._delete(version_dir(folder, version))
            self._in_files.discard(version)
            if names := sorted(name for name, member in self._members.all.items() if version in member.wanted(now)):
                text = (
                    f"version {version} is deleted although {', '.join(names)} may be fetching it, and they take the newest: "
                    f"{folder} has {free / 1e6:.0f} MB free and is to have space for {ROOM} more of {self._n_bytes / 1e6:.0f} MB. "
                    "Give the trainer's host more shared memory"
                )
                await self._context.event(EventKind.NO_SPACE, text[:300], version=version)

    async def _delete(self, folder: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def run(context: Context, spec: PublisherSpec) -> None:
    """The publisher's process."""
    await Publisher(context, spec).run()
