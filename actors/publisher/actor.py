"""Publisher room: decides who serves which version, and says who does.

Reads  policy (log), reports of workers in events    Writes  active    Owns  nothing: rebuilt from policy, active and reports
The trainer never waits for it, and a slow or dead engine never holds back the others: each worker activates on its own
engine and reports; a version counts as active when the first report of it arrives.

A version that the trainer sends itself (nccl, ipc), or whose files hold changes only (delta), is not for everyone: workers
whose engine is new, that have another version, or whom that way failed get whole files. Where none are there yet, the
event `files wanted` asks the trainer for them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from actors.publisher.plan import choose_ways, next_wave, worth_saying
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from bus import Entry, Out, Tail
from bus.messages.control import BOOTING, Event, Vitals
from bus.messages.policy import (
    Activate,
    PolicyActive,
    PolicyAnnounced,
    Restored,
    StepDone,
    WeightManifest,
    WeightsOnDisk,
)
from bus.messages.versions import PolicyVersion
from bus.messages.weights import WeightPlan
from bus.plans import read_plan
from bus.topology import ACTIVE, EVENTS, POLICY

ASK_AGAIN_S = 5.0


class PublisherSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`wave_fraction`: share of engines that may be away activating at once. `keep_versions`: weight files kept."""

    wave_fraction: float = 1.0
    keep_versions: int = 3
    worker_timeout_s: float = 10.0
    weights_dir: str = ""
    activation_deadline_s: float = 60.0


class Publisher:
    """The room."""

    def __init__(self, context: Context, spec: PublisherSpec) -> None:
        self._context = context
        self._spec = spec
        self._forget()

    def _forget(self) -> None:
        self._announced: dict[int, PolicyAnnounced] = {}
        self._newest: PolicyAnnounced | None = None
        self._plan: WeightPlan | None = None  # of the newest; None = whole files
        self._files: WeightsOnDisk | None = None  # the newest version in files, beside its plan
        self._files_only: set[str] = set()  # workers that have activated nothing since their engine came or a way failed
        self._asked: tuple[int, float] = (0, 0.0)  # version whose files were asked for, wall time
        self._serving: dict[str, int] = {}  # worker -> version id, -1 = none yet
        self._slots: dict[str, int] = {}  # worker -> samples it takes at once, as it said last
        self._masked: tuple[int, float] = (-1, 0.0)  # newest step done, share of its batch's tokens over the bound
        self._heard: dict[str, float] = {}  # worker -> wall time of its last word
        self._waits: dict[str, str] = {}  # worker -> what it said it waits for
        self._late: set[str] = set()  # workers that let the deadline of their last order pass
        self._ordered: dict[str, tuple[int, float]] = {}  # worker -> (version id, wall time)
        self._lost: set[int] = set()  # versions of a future that a restored trainer does not have
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
                with context.waiting("announcements and reports"):
                    entries = await tail.read(0.5)
                await fold_log(context, entries, self._fold)
                await self._act()
        finally:
            await tail.close()

    async def _rebuild(self, tail: Tail) -> None:
        """Everything from the bus; again after a restart of the server, which may have lost what was said last."""
        bus = self._context.bus
        self._restarts = bus.link.server_restarts
        self._forget()
        newest_event = await bus.last(EVENTS)
        tail.positions = {POLICY.name: "0", EVENTS.name: newest_event[0].id if newest_event else "0"}
        for name, vitals in (await bus.vitals()).items():
            self._hear(vitals, name)

    def _fold(self, entry: Entry, message: object) -> None:
        match message:
            case PolicyAnnounced():
                self._announced[message.version.id] = message
                self._newest, self._files = message, None
                self._plan = self._read_plan(message.manifest)
            case StepDone():
                self._masked = (message.step, message.metrics.get("rollout/masked_fraction", 0.0))
            case WeightsOnDisk():
                self._take_files(message)
            case Restored():
                self._active = None
                self._newest = None  # the restored trainer announces its version again
                self._lost |= {
                    said.version.id for said in self._announced.values() if said.version.step > message.step
                }
            case Vitals():
                self._hear(message, message.actor)
            case Event(kind="activated"):
                self._report(message)
            case Event(kind="transport failed" | "engine stalled"):
                self._files_only.add(message.actor)
                self._ordered.pop(message.actor, None)
            case Event(kind="joined"):
                self._files_only.add(message.actor)
                self._serving[message.actor] = -1
                self._heard[message.actor] = message.wall
                self._ordered.pop(message.actor, None)

    def _read_plan(self, manifest: WeightManifest) -> WeightPlan | None:
        """None for whole files. A plan that is gone or damaged is good for nobody: its workers get files."""
        if manifest.transport == "disk":
            return None
        try:
            return read_plan(Path(manifest.path))
        except (OSError, ValueError):  # of which the decoder's errors are
            return WeightPlan(transport=manifest.transport, buckets=(), workers=("nobody",))

    def _take_files(self, message: WeightsOnDisk) -> None:
        newest = self._newest
        if newest is None or newest.version.id != message.version.id:
            return
        if not message.instead:
            self._files = message
            return
        self._newest = msgspec.structs.replace(newest, manifest=message.manifest)
        self._plan = self._files = None
        # Whoever waits for the first way is ordered anew.
        self._ordered = {n: order for n, order in self._ordered.items() if order[0] != message.version.id}

    def _hear(self, vitals: Vitals, name: str) -> None:
        if vitals.role != "generation":
            return
        if vitals.state in ("stopped", "failed", "draining"):
            self._serving.pop(name, None)
            self._ordered.pop(name, None)
            return
        self._serving[name] = vitals.version
        self._slots[name] = vitals.slots
        if vitals.version < 0:
            self._files_only.add(name)
        self._heard[name] = max(self._heard.get(name, 0.0), vitals.wall)
        self._waits[name] = vitals.waits_for

    def _report(self, event: Event) -> None:
        self._serving[event.actor] = int(event.data.get("version", -1))
        self._files_only.discard(event.actor)
        self._late.discard(event.actor)
        self._heard[event.actor] = event.wall
        self._ordered.pop(event.actor, None)

    async def _act(self) -> None:
        context, spec, newest = self._context, self._spec, self._newest
        if newest is None:
            return
        now = context.clock.wall()
        for name in [n for n, heard in self._heard.items() if now - heard > spec.worker_timeout_s]:
            self._serving.pop(name, None)
            self._ordered.pop(name, None)
            del self._heard[name]
        for name, (version, ordered_at) in list(self._ordered.items()):
            if self._waits.get(name) == BOOTING:
                self._ordered[name] = (version, now)
            elif now - ordered_at > spec.activation_deadline_s:
                del self._ordered[name]
                self._files_only.add(name)
                self._late.add(name)
                why = f"it waits for {self._waits[name]}" if self._waits.get(name) else "it does not say why"
                late = f"{name} has not served version {version} within {spec.activation_deadline_s:g} s"
                await context.event("activation late", f"{late}: {why}; ordered again, in files", level="warning")
        if not self._usable(newest):
            return
        target = newest.version.id
        in_progress = [n for n, (version, _) in self._ordered.items() if version == target and n in self._serving]
        together = self._plan is not None and bool(self._plan.workers)  # the trainer waits for all of them
        fraction = 1.0 if together else spec.wave_fraction
        wave = next_wave(
            serving=self._serving, target=target, fraction=fraction, in_progress=in_progress, late=self._late
        )
        ways = choose_ways(
            wave,
            serving=self._serving,
            plan=self._plan,
            files_only=self._files_only,
            have_files=self._files is not None,
        )
        await self._order(newest.version, newest.manifest, ways.announced, now)
        if self._files is not None:
            await self._order(newest.version, self._files.manifest, ways.files, now)
        if ways.lacking and (self._asked[0] != target or now - self._asked[1] > ASK_AGAIN_S):
            self._asked = (target, now)
            names = ", ".join(ways.lacking)
            await context.event("files wanted", f"version {target} in files, for {names}", version=target)
        await self._say()
        self._sweep()

    async def _order(self, version: PolicyVersion, manifest: WeightManifest, workers: list[str], now: float) -> None:
        if not workers:
            return
        context = self._context
        fault_point(context.name, "before_order")
        mode = str(context.knobs.pause_generation_mode)
        order = Activate(version=version, manifest=manifest, mode=mode, workers=tuple(workers))
        await context.bus.append([Out(ACTIVE, order)], repeatable=True)
        fault_point(context.name, "after_order")
        self._ordered |= dict.fromkeys(workers, (version.id, now))

    def _usable(self, announced: PolicyAnnounced) -> bool:
        """Whether weight files that the trainer wrote here are still there: those of an ended run are not."""
        path = Path(announced.manifest.path)
        ours = bool(self._spec.weights_dir) and path.resolve().parent == Path(self._spec.weights_dir).resolve()
        return path.exists() or not ours

    async def _say(self) -> None:
        """Tell who serves what, when it changed. Engines may still serve a lost future; it frees no slot."""
        serving = [v for v in self._serving.values() if v in self._announced and v not in self._lost]
        versions = [self._announced[v].version for v in serving]
        if not versions:
            return
        best = max(versions)
        if self._active is None or best.id > self._active.id:
            self._active = best
        serving_now = dict(sorted(self._serving.items()))
        said = PolicyActive(
            version=self._active,
            serving=serving_now,
            slots={name: slots for name in serving_now if (slots := self._slots.get(name, 0))},
            masked_fraction=self._masked[1],
            masked_step=self._masked[0],
        )
        if worth_saying(said, self._said):
            self._said = said
            await self._context.bus.append([Out(ACTIVE, said)], repeatable=True)
            self._context.version = self._active.id

    def _sweep(self) -> None:
        """Delete weight files that nobody serves and nobody will be ordered to."""
        if not self._spec.weights_dir:
            return
        keep = set(sorted(self._announced)[-self._spec.keep_versions :]) | set(self._serving.values())
        keep |= {version for version, _ in self._ordered.values()}
        root = Path(self._spec.weights_dir).resolve()
        for version in [v for v in self._announced if v not in keep]:
            path = Path(self._announced.pop(version).manifest.path)
            if path.resolve().parent == root:  # only what the trainer wrote here, never a checkpoint of the user
                shutil.rmtree(path, ignore_errors=True)


async def run(context: Context, spec: PublisherSpec) -> None:
    """The publisher's process."""
    await Publisher(context, spec).run()
