"""A worker's bond with its engine: boot, activation of versions, restart with back-off after a failure.

Invariant: `serving` names the version whose weights the engine really holds, or None while that is not certain.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from actors.generation.engine import Engine, EngineUnavailable, PauseMode
from actors.generation.process import EngineProcess
from actors.runtime.context import Context
from actors.runtime.deadline import deadline
from actors.runtime.faultpoints import fault_point
from bus.errors import DeadlineExceeded
from bus.messages.policy import Activate, WeightManifest
from bus.messages.versions import PolicyVersion


class EngineLink:
    """One engine and the versions it was given."""

    def __init__(
        self,
        context: Context,
        connect: Callable[[str], Engine],
        *,
        process: EngineProcess | None,
        url: str = "",
        control_deadline_s: float = 60.0,
        verify_checksum: bool = True,
    ) -> None:
        self._context = context
        self._connect = connect
        self._process = process
        self._url = url
        self._control_deadline_s = control_deadline_s
        self._verify = verify_checksum
        self._failures = 0
        self.engine: Engine | None = None
        self.serving: PolicyVersion | None = None
        self.versions: dict[str, PolicyVersion] = {}
        self.broken = asyncio.Event()
        self.pause_s = 0.0

    async def boot(self) -> None:
        """Start (or reach) the engine; tries again with back-off until draining."""
        context = self._context
        while not context.draining.is_set():
            try:
                url = await self._process.start() if self._process is not None else self._url
                self.engine = self._connect(url)
                async with deadline(self._control_deadline_s, f"health of the engine at {url}"):
                    await self.engine.health()
                self.serving = None
                self.broken.clear()
                await context.event("joined", f"engine ready at {url}")
                return
            except (EngineUnavailable, DeadlineExceeded) as error:
                self._failures += 1
                pause_s = min(30.0, 0.5 * 2 ** min(self._failures, 6))
                await context.event("engine boot failed", f"{error}; next try in {pause_s:g} s", level="error")
                try:
                    await asyncio.wait_for(context.draining.wait(), pause_s)
                except TimeoutError:
                    continue

    async def activate(self, order: Activate) -> None:
        """Pause, load, resume. The engine holds the old weights or the new ones, never a mixture: the server checks all
        names and shapes before it changes anything, and a failure in between restarts it."""
        engine = self.engine
        assert engine is not None
        started = self._context.clock.monotonic()
        label = str(order.version.id)
        if self._verify:
            await asyncio.to_thread(check_manifest, order.manifest)
        self.versions[label] = order.version
        self.serving = None
        try:
            async with deadline(self._control_deadline_s, f"activation of version {label}"):
                await engine.pause(cast(PauseMode, order.mode))
                paused = self._context.clock.monotonic()
                fault_point(self._context.name, "activating")
                await engine.update_weights_from_disk(order.manifest.path, label)
                await engine.resume()
        except DeadlineExceeded as error:
            raise EngineUnavailable(str(error)) from error
        now = self._context.clock.monotonic()
        self.pause_s = now - paused
        self.serving = order.version
        self._failures = 0
        self._context.version = order.version.id
        for old in sorted(self.versions, key=int)[:-8]:
            del self.versions[old]
        await self._context.event(
            "activated",
            f"version {label} (step {order.version.step})",
            version=order.version.id,
            step=order.version.step,
            pause_s=self.pause_s,
            total_s=now - started,
        )

    async def fail(self, error: BaseException) -> None:
        """Declare the engine stalled; whoever watches `broken` boots it again."""
        if not self.broken.is_set():
            self.broken.set()
            self.serving = None
            self._context.version = -1
            await self._context.event("engine stalled", str(error)[:300], level="error")

    async def close(self) -> None:
        """End the engine if it is ours."""
        if self.engine is not None:
            await self.engine.close()
        if self._process is not None:
            await self._process.stop()


def check_manifest(manifest: WeightManifest) -> None:
    """Compare the weight file with its manifest's checksum; EngineUnavailable when it is damaged or gone."""
    if not manifest.checksum:
        return
    file = Path(manifest.path) / "model.safetensors"
    digest = hashlib.blake2b(digest_size=16)
    try:
        with file.open("rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise WeightsUnusable(f"weights {file} not readable: {error.strerror}") from error
    if digest.hexdigest() != manifest.checksum:
        raise WeightsUnusable(f"weights {file} do not match their checksum; the version is not activated")


class WeightsUnusable(Exception):
    """A published version that must not be loaded; the engine goes on with what it has."""


__all__ = ("EngineLink", "WeightsUnusable", "check_manifest")
