"""Weights into a paused engine, by the transport their manifest names.

Always true: the engine states a version only once it holds all of it (the label travels with the last bucket), and a transport
that fails in between leaves an engine that states the old version, is still paused, and is not to be used until it took a
whole version from disk.

What the trainer sends (nccl) or lends (ipc) is loaded only after it said `Sending`: before the pause the worker joins the
group, tells that it is ready, and waits for that word, a newer order, or the plan's deadline (actors/trainer/courier.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from actors.generation.engine import Engine, EngineUnavailable, RequestRefused
from actors.runtime.checksum import checksum_of_version
from actors.runtime.transports.kind import TransportBroken, TransportKind
from actors.runtime.transports.records import way_of
from bus.errors import MilesAsyncError
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan


class WeightsUnusable(MilesAsyncError):
    """A published version that must not be loaded; the engine goes on with what it has."""


class TransportFailed(MilesAsyncError):
    """These weights did not arrive this way. The engine may hold a part of them."""


class WeightsDiffer(EngineUnavailable):
    """The engine holds other weights than the files of the same version."""


class Compared(NamedTuple):
    """`tensors` that were equal in engine and files; why none could be compared, where that was asked."""

    tensors: int
    unable: str = ""


class Loader:
    """One worker's way of loading. Owns the membership in the trainer's broadcast group. `own`: the transport that the settings
    name; of a user's own no other is loaded."""

    def __init__(self, worker: str, own: str = "") -> None:
        self._worker = worker
        self._own = own
        self._group = ""
        self._sent = 0  # newest version id that the trainer began to send
        self._news = asyncio.Event()

    def sending(self, version: int) -> None:
        """The trainer sends this version now."""
        self._sent = version
        self._news.set()

    def interrupt(self) -> None:
        """Something happened that may end a wait for the trainer."""
        self._news.set()

    def forget(self) -> None:
        """The engine started anew: it is in no group."""
        self._group = ""

    def way(self, plan: WeightPlan) -> TransportKind:
        """Its record. WeightsUnusable when this worker knows none, or it brings whole files."""
        way = way_of(plan.transport, self._own)
        if way is None or way.whole:
            raise WeightsUnusable(f"transport {plan.transport!r} is unknown to this worker; it waits for files")
        return way

    def check(self, plan: WeightPlan) -> None:
        """WeightsUnusable when this worker cannot load so."""
        self.way(plan)
        if plan.workers and self._worker not in plan.workers:
            raise WeightsUnusable(
                f"this worker is not in group {plan.group} ({', '.join(plan.workers)}); it waits for the next one, or for files"
            )

    async def wait_for(self, version: int, plan: WeightPlan, given_up: Callable[[], bool]) -> bool:
        """Whether the trainer began to send; False once `given_up`, which is asked at every `interrupt`. TransportFailed
        after the plan's deadline."""
        while self._sent != version:
            self._news.clear()
            if given_up():
                return False
            try:
                async with asyncio.timeout(plan.deadline_s):
                    await self._news.wait()
            except TimeoutError:
                raise TransportFailed(f"the trainer did not send version {version} within {plan.deadline_s:g} s") from None
        return True

    async def load(
        self, engine: Engine, manifest: WeightManifest, plan: WeightPlan | None, label: str, before: str | None = None
    ) -> None:
        """All tensors into the engine, which is paused. TransportFailed: it is alive and must load a whole version before it
        goes on. EngineUnavailable: start it anew. RequestRefused: nothing changed (whole files only). `before`: see
        Engine.receive; NotCounted where that cannot be done."""
        if plan is None:
            await engine.update_weights_from_disk(manifest.path, label)
            return
        try:
            await self.way(plan).load(engine, plan, label, before)
        except (RequestRefused, TransportBroken) as error:
            raise TransportFailed(str(error)) from error

    async def compare(self, engine: Engine, plan: WeightPlan | None, label: str) -> Compared:
        """Load the same version from files and compare the engine's own checksums before and after. WeightsDiffer names the
        first tensor that differs. An engine without such checksums serves what the files hold."""
        if plan is None or not plan.whole:
            return Compared(0)
        try:
            came = await engine.weights_checksum()
        except RequestRefused as error:
            await engine.update_weights_from_disk(plan.whole, label)
            return Compared(0, f"version {label} was loaded from its files, for its tensors cannot be compared: {error}")
        await engine.update_weights_from_disk(plan.whole, label)
        filed = await engine.weights_checksum()
        differing = sorted(name for name in came.keys() | filed.keys() if came.get(name) != filed.get(name))
        if differing:
            raise WeightsDiffer(
                f"version {label} came by {plan.transport} with {len(differing)} of {len(filed)} tensors other than in its "
                f"files, first {differing[0]}; the engine starts anew"
            )
        return Compared(len(filed))

    async def join(self, engine: Engine, plan: WeightPlan) -> None:
        """Be in the plan's group if it has one; the engine waits there for the trainer and the other engines.
        TransportFailed when they do not meet."""
        group, self._group = self._group, ""
        try:
            self._group = await self.way(plan).join(engine, plan, self._worker, group)
        except RequestRefused as error:
            raise TransportFailed(str(error)) from error


def check_manifest(manifest: WeightManifest) -> None:
    """Compare the weight files with their manifest's checksum; WeightsUnusable when one is damaged or gone."""
    if not manifest.checksum:
        return
    try:
        found = checksum_of_version(Path(manifest.path))
    except OSError as error:
        raise WeightsUnusable(f"weights {error.filename} not readable: {error.strerror}") from error
    if found != manifest.checksum:
        raise WeightsUnusable(f"weights in {manifest.path} do not match their checksum; the version is not activated")
