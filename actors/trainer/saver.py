"""Checkpoints off the critical path: a copy in memory, files in the background, then the acknowledgement."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.trainer.accounts import Trained, booked
from actors.trainer.backend import Checkpoint
from actors.trainer.checkpoint import BusState, finish, iter_dir
from actors.trainer.intake import Intake
from actors.trainer.record import path_of
from bus.errors import MilesAsyncError
from bus.messages.events import EventKind
from bus.messages.policy import Checkpointed
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.topology import POLICY

KEPT_STEPS, TRIM_STEPS = 1000, 50  # of the policy log of a run without checkpoints; its first cut comes this late


class Saver:
    """One checkpoint at a time. A failed save keeps the former one, says so, and is tried again at the next interval. `in_thread`
    runs a call where all of the backend does, `beside` in another thread."""

    def __init__(
        self,
        context: Context,
        intake: Intake,
        in_thread: Callable[..., Awaitable[Any]],
        *,
        beside: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        save: Path,
        keep_last: int,
        retain: int = 0,
        fingerprint: str,
        save_hf: str = "",
    ) -> None:
        self._context = context
        self._intake = intake
        self._in_thread, self._beside = in_thread, beside
        self._save = save
        self._save_hf = save_hf
        self._keep_last = keep_last
        self._retain = retain
        self._fingerprint = fingerprint
        self._task: asyncio.Task[None] | None = None
        self._marks: list[str] = []  # end of the policy log at each kept checkpoint
        self.saved_step = -1

    async def begin(self, tasks: asyncio.TaskGroup, copy: Callable[[Path], Checkpoint], version: PolicyVersion) -> None:
        """Copy state now, write later. Waits for a save that is still under way. `copy`: the backend's `save`."""
        await self.wait()
        context = self._context
        began = context.clock.monotonic()
        target = iter_dir(self._save, version.step)
        try:
            await asyncio.to_thread(_make_empty, target)
        except OSError as error:
            await self._failed(version.step, error)
            return
        with context.finishing(Wait.CHECKPOINT):
            copied = await self._in_thread(copy, target)
        bus_state = await self._bus_state(version)
        fault_point(context.name, "checkpoint_copied")
        self._task = tasks.create_task(self._write(copied, target, bus_state, began), name=f"checkpoint {version.step}")

    async def wait(self) -> None:
        """Until the save under way is durable and acknowledged."""
        if self._task is not None:
            with self._context.waiting(Wait.CHECKPOINT):
                await self._task

    async def _bus_state(self, version: PolicyVersion) -> BusState:
        seen = await self._context.bus.snapshot()
        trained: list[Trained] = list(self._intake.uncommitted)
        ledger = dict(seen.ledger)
        for account, n in booked(trained).items():
            ledger[account] = ledger.get(account, 0) + n
        knobs = self._context.knobs
        return BusState(
            run=self._context.bus.config.run,
            fingerprint=self._fingerprint,
            step=version.step,
            version=version,
            knob_epoch=knobs.epoch,
            knobs=knobs.live,
            state=seen.state,
            ledger=ledger,
            open_groups=self._intake.still_open(seen.open_groups),
            consumed=tuple(t.consumed for t in trained),
            after=max(0, self.saved_step),
        )

    async def _write(self, copied: Checkpoint, target: Path, state: BusState, began: float) -> None:
        context = self._context
        try:
            await self._beside(copied.write)
            await (self._in_thread if copied.meets else self._beside)(copied.finish)
            fault_point(context.name, "checkpoint_half")
            await asyncio.to_thread(finish, self._save, state, keep_last=self._keep_last, retain=self._retain)
        except OSError as error:
            await asyncio.to_thread(shutil.rmtree, target, True)
            await self._failed(state.step, error)
            return
        fault_point(context.name, "checkpoint_durable")
        self.saved_step = state.step
        seconds = context.clock.monotonic() - began
        done = Checkpointed(step=state.step, path=str(target), save_s=seconds)
        await self._intake.acknowledge(state.step, done)
        await self._trim_policy(max(2, self._keep_last))
        await context.event(EventKind.CHECKPOINT, f"step {state.step} saved in {seconds:.2f} s", step=state.step)
        if self._save_hf:
            await self._export(copied, state.step)

    async def _failed(self, step: int, error: OSError) -> None:
        await self._context.event(
            EventKind.CHECKPOINT_FAILED,
            f"checkpoint {step} not written to {self._save}: {error.strerror or error}. The former checkpoint "
            "is intact and training goes on; free space or correct --save, the next interval tries again.",
            step=step,
        )

    async def _export(self, copied: Checkpoint, step: int) -> None:
        """The model for others; a failure costs only this export."""
        target = path_of(self._save_hf, step)
        try:
            await asyncio.to_thread(copied.write_hf, target)
        except OSError as error:
            text = f"step {step} not exported to {target}: {error.strerror or error}. Training goes on; correct --save-hf."
            await self._context.event(EventKind.EXPORT_FAILED, text)
        else:
            await self._context.event(EventKind.EXPORT, f"step {step} as a Hugging Face model in {target}", step=step)

    async def no_checkpoint(self, step: int) -> None:
        """As the end of a step of which no checkpoint will ever be written: nobody goes back, and who starts late needs the
        newest of the policy log only. KEPT_STEPS of it stay for whoever records it."""
        if step % TRIM_STEPS == 0:
            await self._trim_policy(KEPT_STEPS // TRIM_STEPS)

    async def _trim_policy(self, kept: int) -> None:
        """Cut the policy log below the oldest of the `kept` newest marks: nobody goes back further."""
        newest = await self._context.bus.last(POLICY)
        self._marks.append(newest[0].id)
        if len(self._marks) > kept:
            await self._context.bus.trim_log(POLICY, self._marks.pop(0))


def _make_empty(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)  # of a save that was cut short; the tracker never named it
    target.mkdir(parents=True)


class SaveFailed(MilesAsyncError):
    """The last checkpoint of a run could not be written."""
