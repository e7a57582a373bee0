"""A worker's bond with its engine: boot, activation of versions, restart with back-off after a failure.

Invariant: `serving` names the version whose weights the engine really holds, or None while that is not certain.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from actors.generation.activation import Compared, Loader, NotCounted, TransportFailed, WeightsUnusable
from actors.generation.attach import Attached, check_served, describe
from actors.generation.engine import BootRefused, Engine, EngineUnavailable, PauseMode, RequestRefused
from actors.generation.process import EngineServer
from actors.generation.routed import RoutedEngine
from actors.runtime.checksum import checksum_of
from actors.runtime.context import Context
from actors.runtime.deadline import deadline
from actors.runtime.faultpoints import fault_point
from actors.runtime.run import Refused
from bus.errors import DeadlineExceeded
from bus.messages.policy import Activate, WeightManifest
from bus.messages.versions import PolicyVersion
from bus.messages.weights import WeightPlan

LAST_STEP_S = 0.25  # a decode step is far shorter; what has not ended then is ended in the pause
WEIGHTS = "weights"  # SGLang's tag of that part of an engine's memory


class EngineLink:
    """One engine and the versions it was given."""

    def __init__(
        self,
        context: Context,
        connect: Callable[[str, Path | None], Engine],
        *,
        process: EngineServer | None,
        url: str = "",
        model_path: str = "",
        control_deadline_s: float = 60.0,
        verify_checksum: bool = True,
        check_equal: bool = False,
        inside: Path | None = None,
    ) -> None:
        self._context = context
        self._connect = connect
        self._process = process
        self._url = url
        self._model_path = model_path
        self._control_deadline_s = control_deadline_s
        self._verify = verify_checksum
        self._check_equal = check_equal
        self._inside = inside  # of a server that is not ours: see EngineServer
        self._failures = 0
        self._loader = Loader(context.name)
        self._damaged_at: float | None = None  # since when the engine, paused, may hold parts of two versions
        self._files: WeightManifest | None = None  # whole files that were loaded last, with nothing else after them
        self._taken: Activate | None = None  # the order that is being carried out, or was
        self.engine: Engine | None = None
        self.serving: PolicyVersion | None = None
        self.versions: dict[str, PolicyVersion] = {}
        self.broken = asyncio.Event()
        self.open = asyncio.Event()  # cleared while weights change or memory is away: no request is sent then
        self.open.set()
        self.released: tuple[str, ...] = ()  # memory that the engine, paused, has given back (sharing.py)
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
        return isinstance(self.engine, RoutedEngine)

    @property
    def sound(self) -> bool:
        """Whether the engine holds one version's weights only."""
        return self._damaged_at is None and not self.broken.is_set()

    async def boot(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Start (or reach) the engine; tries again with back-off until draining, or until `given_up`. Refused: it can never
        start so."""
        context = self._context
        while not context.draining.is_set() and not given_up():
            try:
                if self.engine is not None:
                    await self.engine.close()
                    self.engine = None
                url = await self._process.start() if self._process is not None else self._url
                self.engine = self._connect(url, self._inside if self._process is None else self._process.inside)
                async with deadline(self._control_deadline_s, f"health of the engine at {url}"):
                    health = await self.engine.health()
                    info = await self.engine.info()
                own = self._process is not None
                self.kind = describe(info) if own else check_served(url, info, health.model_path, self._model_path)
                self.serving = None
                self._damaged_at = None
                self.released = ()
                self._loader.forget()
                self.broken.clear()
                context.note = self._process.note if self._process is not None else self.kind.note
                await context.event("joined", f"engine ready at {url}" + (f" ({context.note})" if context.note else ""))
                return
            except BootRefused as error:
                await context.event("engine boot refused", str(error), level="error")
                raise Refused(str(error)) from error
            except (EngineUnavailable, DeadlineExceeded) as error:
                self._failures += 1
                pause_s = min(30.0, 0.5 * 2 ** min(self._failures, 6))
                await context.event("engine boot failed", f"{error}; next try in {pause_s:g} s", level="error")
                try:
                    await asyncio.wait_for(context.draining.wait(), pause_s)
                except TimeoutError:
                    continue

    async def activate(self, order: Activate, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the trainer if it sends the weights, then pause, load, resume. The engine holds the old weights or the new
        ones, never a mixture: it checks all names and shapes before it changes anything; one that may hold parts of two
        stays paused until it took whole files, and a failure whose outcome is unknown restarts it.

        `given_up`: whether the wait has become pointless. A way that failed is told as an event `transport failed`; the
        publisher then orders the version from disk. Raises EngineUnavailable, RequestRefused; WeightsUnusable for files.
        """
        way, version = order.manifest.transport, order.version.id
        self._taken = order
        try:
            await (self._relabel(order) if self._holds(order.manifest) else self._activate(order, given_up))
        except (TransportFailed, WeightsUnusable, EngineUnavailable) as error:
            self._taken = None
            if way == "disk":
                raise
            if isinstance(error, TransportFailed) and error.damaged:
                self._damaged_at = self._context.clock.monotonic()
            if self.serving is None:
                self._context.version = -1
            await self._context.event(
                "transport failed", f"{way}: {error}"[:300], level="warning", version=version, transport=way
            )
            if isinstance(error, EngineUnavailable):
                raise

    def has(self, order: Activate) -> bool:
        """Whether these files under this version are being loaded or were loaded last; then the order says nothing new."""
        taken = self._taken
        return taken is not None and (taken.version, taken.manifest) == (order.version, order.manifest) and _whole(order.manifest)

    def _holds(self, manifest: WeightManifest) -> bool:
        """Whether the engine serves just these files already, under another version."""
        return self.serving is not None and self.sound and not self.released and manifest == self._files

    async def _relabel(self, order: Activate) -> None:
        """The same weights as a new version: nothing is loaded, no request waits, keys and values stay good."""
        assert self.engine is not None
        self.know(order)
        started = self._context.clock.monotonic()
        await self.engine.set_version(str(order.version.id))
        self.pause_s = 0.0
        if isinstance(self.engine, RoutedEngine):
            await self.engine.join()
        await self._activated(order, self._context.clock.monotonic() - started, Compared(0), "kept")

    async def _activate(self, order: Activate, given_up: Callable[[], bool]) -> None:
        engine = self.engine
        assert engine is not None
        started = self._context.clock.monotonic()
        label = str(order.version.id)
        plan = self._loader.plan(order.manifest, -1 if self.serving is None else self.serving.id)
        if self._verify and (plan is None or plan.transport == "delta"):
            await asyncio.to_thread(check_manifest, order.manifest)
        self.know(order)
        if plan is not None and plan.transport != "delta" and not await self._meet_trainer(engine, order, plan, given_up):
            return
        before, self.serving = self.serving, None
        self._files = None
        self.open.clear()
        compared = Compared(0)
        try:
            async with deadline(self._control_deadline_s, f"activation of version {label}"):
                paused = self._context.clock.monotonic()
                counted_by = await self._pause_to_count(engine, order.mode, before, plan)
                how = "kept" if counted_by else await self._pause(engine, order.mode, before)
                fault_point(self._context.name, "receiving" if plan and plan.transport == "nccl" else "activating")
                if WEIGHTS in self.released:
                    await engine.resume_memory((WEIGHTS,))
                    self.released = tuple(tag for tag in self.released if tag != WEIGHTS)
                if isinstance(engine, RoutedEngine):
                    await engine.flush()  # peers may have sent requests under the next version's salt already
                try:
                    await self._loader.load(engine, order.manifest, plan, label, counted_by)
                except NotCounted:
                    await engine.resume()
                    how = await self._end_requests(engine)
                    await self._loader.load(engine, order.manifest, plan, label)
                if self._check_equal:
                    compared = await self._loader.compare(engine, plan, label)
                self.salt = label
                if self.released:  # keys and values only now: the trainer's copy of the weights may lie beside until here
                    await engine.resume_memory(self.released)
                    self.released = ()
                await engine.resume()
                resumed = self._context.clock.monotonic()
                if isinstance(engine, RoutedEngine):
                    await engine.join()
        except DeadlineExceeded as error:
            raise EngineUnavailable(str(error)) from error
        finally:
            if not self.released:
                self.open.set()
        self.pause_s = resumed - paused
        self._failures = 0
        self._damaged_at = None
        self._files = order.manifest if _whole(order.manifest) else None
        await self._activated(order, self._context.clock.monotonic() - started, compared, how)

    async def _activated(self, order: Activate, total_s: float, compared: Compared, how: str) -> None:
        self.serving = order.version
        self._context.version = order.version.id
        version, step = order.version.id, order.version.step
        await self._context.event(
            "activated", f"version {version} (step {step})", version=version, step=step, pause_s=self.pause_s, total_s=total_s,
            transport=order.manifest.transport, gpus=self.kind.tp_size, host=socket.gethostname(), compared=compared.tensors,
            requests=how,
        )  # fmt: skip
        if compared.unable:
            await self._context.event("not compared", compared.unable, level="warning", version=order.version.id)

    async def _pause(self, engine: Engine, mode: str, before: PolicyVersion | None) -> str:
        """Pause the engine, and what became of its requests. They go on where no chunk mixes two versions, or, paused in place,
        where the engine counts the tokens that the version `before` made. Elsewhere they end: they keep the tokens handed out
        and go on as new requests. Most end with the step under way, before the pause: to take them back out of the batch
        costs SGLang 60 ms for 256, and it forgets to forget them."""
        if self.kind.exact_in_place if mode == "in_place" else self.kind.exact:
            await engine.pause(cast(PauseMode, mode))
            return "ended" if mode == "abort" else "kept"
        if mode == "in_place" and before is not None and await engine.pause_counted(str(before.id)) is not None:
            return "kept"
        return await self._end_requests(engine)

    async def _pause_to_count(
        self, engine: Engine, mode: str, before: PolicyVersion | None, plan: WeightPlan | None
    ) -> str | None:
        """Pause in place an engine that counts in the call that brings the weights: one call less while requests wait. The
        version that made its tokens; None, and nothing is paused, where it goes otherwise."""
        by_nccl = plan is not None and plan.transport == "nccl" and engine.counts_when_receiving and not self.routed
        if mode != "in_place" or before is None or not by_nccl or self.kind.exact_in_place:
            return None
        await engine.pause("in_place")
        return str(before.id)

    async def _end_requests(self, engine: Engine) -> str:
        await engine.end_running(LAST_STEP_S)
        await engine.pause("retract")
        await engine.abort_all()
        return "sent again"

    async def release(self, tags: Sequence[str]) -> None:
        """Give the engine's memory to the trainer; requests end and wait at `open`. An engine that does not give it in time, or
        is broken, is ended, which gives all of it."""
        engine = self.engine
        missing = tuple(tag for tag in tags if tag not in self.released)  # some are away after an update that failed half-way
        if engine is None or not missing:
            return
        if not self.broken.is_set():
            self.open.clear()
            self.released = tuple(tags)
            try:
                async with deadline(self._control_deadline_s, "release of the engine's memory"):
                    await engine.end_running(LAST_STEP_S)
                    await engine.pause("retract")  # SGLang's abort mode looks but once a second whether all requests ended
                    while not await self._released(engine, missing):
                        await self._context.clock.sleep(0.05)
                return
            except (EngineUnavailable, RequestRefused, DeadlineExceeded) as error:
                await self.fail(error)
        if self._process is not None:
            await self._process.stop()

    async def _released(self, engine: Engine, tags: Sequence[str]) -> bool:
        """Whether it could be given back; not while a request is at work that was on its way before, or that a router sent from
        a peer who has not heard of the turn: such a peer sends it again."""
        try:
            await engine.abort_all()
            await engine.release_memory(tags)
        except RequestRefused as error:
            self._context.log.info("memory is not released yet: %s", error)
            return False
        return True

    async def take_back(self) -> None:
        """Take the memory again and go on with the weights that were served before."""
        engine = self.engine
        assert engine is not None
        try:
            async with deadline(self._control_deadline_s, "return of the engine's memory"):
                await engine.resume_memory(self.released)
                await engine.resume()
        except (EngineUnavailable, RequestRefused, DeadlineExceeded) as error:
            await self.fail(error)
            return
        self.released = ()
        self.open.set()

    async def _meet_trainer(
        self, engine: Engine, order: Activate, plan: WeightPlan, given_up: Callable[[], bool]
    ) -> bool:
        """Be in the group, say so, and wait until the trainer sends; the engine goes on with the old weights meanwhile."""
        await self._loader.join(engine, plan)
        version = order.version.id
        await self._context.event("ready to receive", f"version {version} by {plan.transport}", version=version)
        fault_point(self._context.name, "ready")
        return await self._loader.wait_for(version, plan, lambda: self.broken.is_set() or given_up())

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

    async def leave_route(self) -> None:
        """Behind its peers: their requests would meet an older version here. The next activation joins again."""
        if isinstance(self.engine, RoutedEngine):
            await self.engine.leave()

    async def check(self) -> None:
        """Notice a server that died while nobody asked it, and a router that forgot us. Called now and then."""
        if self._process is not None and self.engine is not None and not self._process.alive:
            await self.fail(EngineUnavailable("the engine's process has ended"))
        elif (
            self._damaged_at is not None
            and self._context.clock.monotonic() - self._damaged_at > self._control_deadline_s
        ):
            await self.fail(
                EngineUnavailable(
                    f"no whole version came within {self._control_deadline_s:g} s after a transport failed; the engine may hold "
                    "parts of two"
                )
            )
        elif isinstance(self.engine, RoutedEngine) and (news := await self.engine.renew()):
            await self._context.event("router", news, level="info" if self.engine.routed else "warning")

    async def fail(self, error: BaseException, of: Engine | None = None) -> None:
        """Declare the engine stalled; whoever watches `broken` boots it again. `of`: the engine that failed; news of one
        that has been replaced since changes nothing."""
        if not self.broken.is_set() and of in (None, self.engine):
            self.broken.set()
            self.interrupt()
            self.serving = None
            self._taken = None
            self._damaged_at = None
            self.released = ()
            self.open.set()  # whoever waits there finds `broken`
            self._context.version = -1
            await self._context.event("engine stalled", str(error)[:300], level="error")
            if self.engine is not None:
                await self.engine.close()  # an activation may be waiting for its answer

    async def close(self) -> None:
        """End the engine if it is ours."""
        if self.engine is not None:
            await self.engine.close()
        if self._process is not None:
            await self._process.stop()


def _whole(manifest: WeightManifest) -> bool:
    return manifest.transport == "disk"


def check_manifest(manifest: WeightManifest) -> None:
    """Compare the weight file with its manifest's checksum; WeightsUnusable when it is damaged or gone."""
    if not manifest.checksum:
        return
    file = Path(manifest.path) / "model.safetensors"
    try:
        found = checksum_of(file)
    except OSError as error:
        raise WeightsUnusable(f"weights {file} not readable: {error.strerror}") from error
    if found != manifest.checksum:
        raise WeightsUnusable(f"weights {file} do not match their checksum; the version is not activated")


__all__ = ("EngineLink", "WeightsUnusable", "check_manifest")
