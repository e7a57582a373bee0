"""A batch that the backend refuses, or that gives no gradient: whose fault it is, and what becomes of it.

Each entry of the batch is examined alone. Those that are refused alone too are given up with a counted reason, and the rest
is cut again. Where all are refused, or none, it is not the entries: the run ends with the backend's text, everything pending.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from actors.runtime.context import Context
from actors.runtime.refusals import RunEnds, Streak
from actors.trainer.backend import BatchRefused, StepBatch, TrainBackend
from actors.trainer.batches import Batch
from actors.trainer.convert import to_samples
from actors.trainer.intake import Intake
from bus.errors import InvariantBroken
from bus.messages.events import EventKind
from bus.messages.reasons import DropReason

MOST_REFUSED = 8  # batches in a row


class RefusedBatches:
    """`in_thread` runs a call where the backend lives."""

    def __init__(self, context: Context, intake: Intake, backend: TrainBackend, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._context = context
        self._intake = intake
        self._backend = backend
        self._in_thread = in_thread
        remedy = "Look at the samples that `batch refused` or `step skipped` is about, and at the settings of the objective."
        self._skipped: tuple[str, ...] = ()  # keys of the batch that was skipped last
        self._row = Streak(context.clock.monotonic, "the training of a batch", remedy, most=MOST_REFUSED)

    def worked(self) -> None:
        """A batch was trained."""
        self._row.worked()

    async def skipped(self, keys: tuple[str, ...], step: int) -> None:
        """A gradient that is not finite changed nothing: its groups are tried once more, then given up, lest they hold the run."""
        again = keys == self._skipped
        self._skipped = () if again else keys
        await self._context.event(
            EventKind.STEP_SKIPPED,
            f"step {step}: gradient not finite, weights unchanged; its {len(keys)} groups are "
            + ("given up" if again else "tried again"),
        )
        if again:
            await self._intake.give_up(tuple((key, DropReason.NONFINITE_GRADIENT) for key in keys), reissue=False)
            self._row.failed(min(keys, default=""), "its gradient was not finite, and weights did not change")

    async def settle(self, batch: Batch, work: StepBatch, error: BatchRefused) -> None:
        """Give up the entries at fault. Raises RunEnds when there is no telling them apart, InvariantBroken after a step that is
        half done: the trainer starts again from its checkpoint, without them."""
        found: dict[str, str] = {}
        for key, group in zip(batch.keys, batch.groups, strict=False):  # a recorded batch has no keys
            alone = replace(work, samples=to_samples((group,), batch.images))
            if why := await self._in_thread(self._backend.refuses, alone):
                found[key] = why
        if not found or (len(found) == len(batch.keys) > 1):
            text = f"step {work.step + 1} cannot be trained: {error} Its {len(batch.groups)} groups stay pending."
            await self._context.event(EventKind.BATCH_REFUSED, text)
            raise RunEnds(text) from error
        for key, why in found.items():
            text = f"step {work.step + 1}: {key} is given up: {why}"
            await self._context.refusals.add("batch", text, kind=EventKind.BATCH_REFUSED)
        await self._intake.give_up(tuple((key, DropReason.REFUSED) for key in found), reissue=False)
        if error.half_done:
            raise InvariantBroken(
                f"step {work.step + 1} was half done when it met {', '.join(found)}: {error} These are given up, and the trainer "
                "starts again from its last checkpoint."
            )
        self._row.failed(min(found), str(error))
