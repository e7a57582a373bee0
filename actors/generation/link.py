"""A worker's bond with its engine: boot, activation of versions, restart with back-off after a failure.

    BOOTING --joined--> READY --activate--> LOADING --loaded--> SERVING --activate--> LOADING
    SERVING, READY --activate, what the trainer sends--> WAITING --it sends--> LOADING
                                                         WAITING --it does not, or a newer order--> as before
    LOADING --a transport failed--> DAMAGED --whole files--> LOADING
    READY, SERVING --release--> ASIDE --take back--> READY, SERVING         ASIDE --activate--> LOADING
    anything --fail; DAMAGED for too long, or to be released--> BROKEN --joined--> READY

Always true: `serving` names the version whose weights the engine really holds, or None while that is not certain: in WAITING and
ASIDE the one before, in SERVING the newest, elsewhere none. No request is sent in LOADING, nor while any memory is away.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.generation.activation import (
    Compared,
    Loader,
    TransportFailed,
    WeightsUnusable,
    check_manifest,
)
from actors.generation.engine import (
    Attached,
    BootedEngine,
    BootRefused,
    Connect,
    Engine,
    EngineUnavailable,
    RequestRefused,
)
from actors.generation.pausing import pause, pause_to_count
from actors.generation.spec import GenerationSpec
from actors.generation.supply import Supply
from actors.runtime.context import Context
from actors.runtime.deadline import deadline, within
from actors.runtime.faultpoints import fault_point
from actors.runtime.fetch import FetchFailed
from actors.runtime.host import shared_memory_name
from actors.runtime.run import Refused
from actors.runtime.transports.kind import NotCounted
from actors.runtime.transports.records import DISK, FILES, NETWORK
from bus.errors import BadMessage, DeadlineExceeded
from bus.messages.active import Activate
from bus.messages.events import EventKind
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from bus.messages.weights import WeightPlan
from bus.plans import get_plan

NO_ROOM_S = 5.0
WEIGHTS = "weights"  # SGLang's tag of that part of an engine's memory


class State(enum.Enum):
    """Of an engine, as its worker knows it; see above."""

    BOOTING = enum.auto()
    READY = enum.auto()
    SERVING = enum.auto()
    WAITING = enum.auto()
    LOADING = enum.auto()
    DAMAGED = enum.auto()
    ASIDE = enum.auto()
    BROKEN = enum.auto()


NO_VERSION = (State.READY, State.LOADING, State.DAMAGED, State.BROKEN)


class EngineLink:
    """One engine and the versions it was given."""

    def __init__(
        self,
        context: Context,
        spec: GenerationSpec,
        connect: Connect | None,
        *,
        process: BootedEngine | None = None,
        supply: Supply | None = None,
    ) -> None:
        self._context = context
        self._spec = spec
        self._connect = connect
        self._supply = supply
        self.process = process
        self.control_deadline_s = spec.control_deadline_s
        self._failures = 0
        self._loader = Loader(context.name, spec.transport)
        self._files: WeightManifest | None = None  # whole files that were loaded last, with nothing else after them
        self._taken: Activate | None = None  # the order that is being carried out, or was
        self._trouble = ""  # of the last order, which failed; an engine that starts anew because of it does not change it
        self.state = State.BOOTING
        self._since = context.clock.monotonic()  # in this state
        self._open = asyncio.Event()
        self._open.set()
        self.engine: Engine | None = None
        self.serving: PolicyVersion | None = None
        self.versions: dict[str, PolicyVersion] = {}
        self.released: tuple[str, ...] = ()  # memory that the engine, paused, has given back (sharing.py)
        self.leaving = False  # samples are to go on at peers: the trainer wants back the GPU that it lent
        self.salt = ""  # the version whose keys and values requests may share
        self.kind = Attached(exact=True, tp_size=1)
        self.pause_s = 0.0

    @property
    def resends(self) -> bool:
        """Whether a sample that the engine aborts is to be sent again: a weight update aborts where a chunk could
        otherwise mix two versions, and behind a router any engine may do so."""
        return not (self.kind.exact and self.kind.exact_in_place) or self.routed

    @property
    def routed(self) -> bool:
        """Whether a router stands before our engine and its peers."""
        return self.engine is not None and self.engine.has_router

    @property
    def absent(self) -> bool:
        """Whether the engine is to be booted, for the first time or again."""
        return self.state in (State.BOOTING, State.BROKEN)

    def enter(self, state: State) -> None:
        """A transition that is drawn above."""
        self.state, self._since = state, self._context.clock.monotonic()
        if state in NO_VERSION:
            self.serving = None
        if state is State.LOADING or self.released:
            self._open.clear()
        else:
            self._open.set()

    async def until_open(self) -> None:
        """Until requests may be sent: an activation has a deadline, and the trainer a supervisor that ends its turn."""
        await self._open.wait()

    def let_go(self) -> None:
        """Wake who waits in `until_open`: the worker is draining, so they ask again whether to wait. The engine's state stays."""
        self._open.set()

    async def boot(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Start (or reach) the engine; tries again with back-off until draining, or until `given_up`. Refused: it can never
        start so."""
        context = self._context
        if self._connect is None:
            self.enter(State.READY)
            await context.event(EventKind.JOINED, "no engine: responses come from the data")
            return
        while not context.draining.is_set() and not given_up():
            try:
                if self.engine is not None:
                    await self.engine.close()
                    self.engine = None
                url = await self.process.start() if self.process is not None else self._spec.engine_url
                inside = Path(self._spec.inside) if self._spec.inside else None  # of a server that is not ours
                self.engine = self._connect(url, inside if self.process is None else self.process.inside)
                async with deadline(self.control_deadline_s, f"health of the engine at {url}"):
                    own, spec = self.process is not None, self._spec
                    self.kind = await self.engine.look(own=own, model_path=spec.model_path, routed=spec.routed)
                self.released = ()
                self._loader.forget()
                self.enter(State.READY)
                context.note = self._about()
                await context.event(EventKind.JOINED, f"engine ready at {url}" + (f" ({context.note})" if context.note else ""))
                return
            except BootRefused as error:
                await context.event(EventKind.ENGINE_BOOT_REFUSED, str(error))
                raise Refused(str(error)) from error
            except (EngineUnavailable, DeadlineExceeded) as error:
                self._failures += 1
                pause_s = min(30.0, 0.5 * 2 ** min(self._failures, 6))
                await context.event(EventKind.ENGINE_BOOT_FAILED, f"{error}; next try in {pause_s:g} s")
                await within(pause_s, context.draining)

    async def activate(self, order: Activate, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the trainer if it sends the weights, then pause, load, resume. The engine holds the old weights or the new
        ones, never a mixture: it checks all names and shapes before it changes anything; one that may hold parts of two
        stays paused until it took whole files, and a failure whose outcome is unknown restarts it.

        `given_up`: whether the wait has become pointless. What failed is told as event `transport failed`, or `weights refused`
        for files; the publisher then sees to others. Raises EngineUnavailable, RequestRefused: start the engine anew.
        """
        way, version, before = order.manifest.transport, order.version.id, self.state
        self._taken = order
        try:
            same = self._connect is None or self._holds(order.manifest)
            await (self._relabel(order) if same else self._activate(order, given_up))
        except (TransportFailed, WeightsUnusable, EngineUnavailable, RequestRefused) as error:
            self._taken = None
            if self.state is State.LOADING and isinstance(error, TransportFailed):
                self.enter(State.DAMAGED)
            if self.serving is None:
                self._context.version = -1
            self._context.note = self._trouble = f"version {version} failed: {error}"[:300]
            if way in FILES and isinstance(error, WeightsUnusable | RequestRefused):  # also of files that came: nobody else's fault
                text, path = str(error)[:300], order.manifest.path
                await self._context.event(EventKind.WEIGHTS_REFUSED, text, version=version, path=path)
            elif way != DISK.name and not (way == NETWORK.name and self._context.draining.is_set()):  # then we gave it up
                text = f"{way}: {error}"[:300]
                await self._context.event(EventKind.TRANSPORT_FAILED, text, version=version, transport=way)
            if isinstance(error, EngineUnavailable | RequestRefused):
                raise
        finally:
            if self.state is State.WAITING:
                self.enter(before)

    def has(self, order: Activate) -> bool:
        """Whether these files under this version are being loaded or were loaded last; then the order says nothing new."""
        taken = self._taken
        same = taken is not None and (taken.version, taken.manifest) == (order.version, order.manifest)
        return same and order.manifest.transport in FILES

    def _holds(self, manifest: WeightManifest) -> bool:
        """Whether the engine serves just these files already, under another version."""
        return self.state is State.SERVING and manifest == self._files

    async def _relabel(self, order: Activate) -> None:
        """The same weights as a new version, or no engine that holds any: nothing is loaded, no request waits, keys and values stay
        good."""
        self.know(order)
        started = self._context.clock.monotonic()
        if self.engine is not None:
            await self.engine.set_version(str(order.version.id))
        self.pause_s = 0.0
        await self.route(joins=True)
        await self._activated(order, self._context.clock.monotonic() - started, Compared(0), "kept")

    async def _activate(self, order: Activate, given_up: Callable[[], bool]) -> None:
        engine = self.engine
        assert engine is not None
        started = self._context.clock.monotonic()
        label = str(order.version.id)
        plan, manifest = await self._plan(order.manifest), order.manifest
        self.know(order)
        if manifest.transport == NETWORK.name:
            manifest = await self._fetch(order, given_up)
            if self.state is not State.WAITING:
                return
        if self._spec.verify_checksum and plan is None:
            await asyncio.to_thread(check_manifest, manifest)
        if plan is not None and not await self._meet_trainer(engine, order, plan, given_up):
            return
        before, self._files = self.serving, None
        broadcast = plan is not None and self._loader.way(plan).broadcasts
        self.enter(State.LOADING)
        compared = Compared(0)
        try:
            async with deadline(self.control_deadline_s, f"activation of version {label}"):
                paused = self._context.clock.monotonic()
                counted_by = None if self.routed else await pause_to_count(engine, self.kind, order.mode, before, broadcast)
                how = "kept" if counted_by else await pause(engine, self.kind, order.mode, before)
                fault_point(self._context.name, "receiving" if broadcast else "activating")
                if WEIGHTS in self.released:
                    await engine.resume_memory((WEIGHTS,))
                    self.released = tuple(tag for tag in self.released if tag != WEIGHTS)
                if engine.has_router:
                    await engine.flush()  # peers may have sent requests under the next version's salt already
                try:
                    await self._loader.load(engine, manifest, plan, label, counted_by)
                except NotCounted:
                    assert before is not None
                    engine.count_as_older(str(before.id))
                    await self._loader.load(engine, manifest, plan, label)
                if self._spec.check_equal:
                    compared = await self._loader.compare(engine, plan, label)
                self.salt = label
                if self.released:  # keys and values only now: the trainer's copy of the weights may lie beside until here
                    await engine.resume_memory(self.released)
                    self.released = ()
                await engine.resume()
                resumed = self._context.clock.monotonic()
                await self.route(joins=True)
        except DeadlineExceeded as error:
            raise EngineUnavailable(str(error)) from error
        self.pause_s = resumed - paused
        self._failures = 0
        self._files = order.manifest if plan is None else None
        await self._activated(order, self._context.clock.monotonic() - started, compared, how)

    async def _plan(self, manifest: WeightManifest) -> WeightPlan | None:
        """What to do, read before the pause; None for whole files. WeightsUnusable when it cannot be done here."""
        if manifest.transport in FILES:
            return None
        try:
            plan = await get_plan(self._context.bus, manifest)
        except BadMessage as error:
            raise WeightsUnusable(str(error)) from error
        self._loader.check(plan)
        return plan

    async def _fetch(self, order: Activate, given_up: Callable[[], bool]) -> WeightManifest:
        """The same version in files of this host; the engine goes on with the old weights meanwhile."""
        if self._supply is None or order.parcel is None:
            raise WeightsUnusable("this order names no files to fetch")
        self.enter(State.WAITING)
        try:
            folder = await self._supply.bring(order, given_up)
        except (FetchFailed, BadMessage) as error:
            raise TransportFailed(str(error)) from error
        except OSError as error:
            await self._context.clock.sleep(NO_ROOM_S)  # it is ordered again at once
            raise TransportFailed(f"no space for {order.manifest.n_bytes} bytes of weights: {error}") from error
        return msgspec.structs.replace(order.manifest, path=str(folder))

    def _about(self) -> str:
        """What is worth saying of the engine: why it took no version, until it takes one."""
        return self._trouble or (self.process.note if self.process is not None else self.kind.note)

    async def _activated(self, order: Activate, total_s: float, compared: Compared, how: str) -> None:
        self.enter(State.SERVING)
        self.serving = order.version
        self._context.version = order.version.id
        self._trouble = ""
        self._context.note = self._about()
        version, step = order.version.id, order.version.step
        fetched = self._supply.fetched if self._supply and order.manifest.transport == NETWORK.name else {}
        await self._context.event(
            EventKind.ACTIVATED, f"version {version} (step {step})", version=version, step=step, pause_s=self.pause_s,
            total_s=total_s, transport=order.manifest.transport, gpus=self.kind.tp_size, host=shared_memory_name(),
            compared=compared.tensors, requests=how, **fetched,
        )  # fmt: skip
        if compared.unable:
            await self._context.event(EventKind.NOT_COMPARED, compared.unable, version=order.version.id)

    async def _meet_trainer(self, engine: Engine, order: Activate, plan: WeightPlan, given_up: Callable[[], bool]) -> bool:
        """Be in the group, say so, and wait until the trainer sends; the engine goes on with the old weights meanwhile."""
        self.enter(State.WAITING)
        await self._loader.join(engine, plan)
        version = order.version.id
        await self._context.event(EventKind.READY_TO_RECEIVE, f"version {version} by {plan.transport}", version=version)
        fault_point(self._context.name, "ready")
        return await self._loader.wait_for(version, plan, lambda: self.state is State.BROKEN or given_up())

    def sending(self, version: int) -> None:
        """The trainer sends this version now."""
        self._loader.sending(version)

    def interrupt(self) -> None:
        """Let a wait for the trainer ask again whether it is pointless."""
        self._loader.interrupt()

    def know(self, order: Activate) -> None:
        """Remember what an order's label stands for; behind a router, peers serve versions before we do."""
        self.versions[str(order.version.id)] = order.version
        for old in sorted(self.versions, key=int)[:-1024]:  # slow samples bring tokens of long ago
            del self.versions[old]
        if self._supply is not None:
            self._supply.know(order)

    async def route(self, *, joins: bool) -> None:
        """Take part behind the router, or leave it: its requests would meet an older version here, or an engine at rest, which it
        holds for dead and is slow to see again. Each activation joins."""
        if self.engine is not None:
            await (self.engine.join() if joins else self.engine.leave())

    async def check(self) -> None:
        """Called now and then: a server that died while nobody asked it, a router that forgot us."""
        if self.process is not None and self.engine is not None and not self.process.alive:
            await self.fail(EngineUnavailable("the engine's process has ended"))
        elif self.state is State.DAMAGED and self._context.clock.monotonic() - self._since > self.control_deadline_s:
            await self.fail(
                EngineUnavailable(
                    f"no whole version came within {self.control_deadline_s:g} s after a transport failed; the engine may hold "
                    "parts of two"
                )
            )
        elif self.engine is not None and not self._context.draining.is_set() and (news := await self.engine.renew()):
            await self._context.event(EventKind.ROUTER, news, level="info" if self.engine.routed else "warning")

    async def fail(self, error: BaseException, of: Engine | None = None) -> None:
        """Declare the engine stalled; whoever watches `broken` boots it again. `of`: the engine that failed; news of one
        that has been replaced since changes nothing."""
        if self.state is not State.BROKEN and of in (None, self.engine):
            self._taken, self.released = None, ()
            self.enter(State.BROKEN)  # open: whoever waits there finds it
            self.interrupt()
            if self._supply is not None:
                self._supply.stop()
            self._context.version = -1
            await self._context.event(EventKind.ENGINE_STALLED, str(error)[:300])
            if self.engine is not None:
                await self.engine.close()  # an activation may be waiting for its answer

    async def close(self) -> None:
        """End the engine if it is ours."""
        if self._supply is not None:
            await self._supply.close()
        if self.engine is not None:
            await self.engine.close()
        if self.process is not None:
            await self.process.stop()
