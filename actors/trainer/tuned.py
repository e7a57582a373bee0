"""Live settings that the backend refuses: the step is done with those that went before, and the change is undone for all.

What is proposed is held to the rules of settings, so this happens where a function of the user's, or a library, has rules of
its own. Always true: a change of live settings does not end a run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from actors.runtime.context import Context
from actors.trainer.backend import BatchRefused, StepBatch, StepResult, TrainBackend
from bus.errors import KnobRejected
from bus.knobs import propose, values_at
from bus.knobs.live import pending
from bus.knobs.plans import carry_out
from bus.messages.events import EventKind

MOST_TRIED = 4  # earlier epochs


class TunedSteps:
    """Steps under the live settings. `used`: those of the newest step, and their epoch."""

    def __init__(self, context: Context, backend: TrainBackend, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._context = context
        self._backend = backend
        self._in_thread = in_thread
        self.used: tuple[dict[str, Any], int] = ({}, 0)

    async def begin(self, step: int) -> None:
        """Take up what is planned for the training step that begins, or for one before it, and tell everybody."""
        context, live = self._context, self._context.live_knobs
        live.step = step
        for planned in pending(live.history()):
            if planned.from_step > step:
                return
            try:
                made = await carry_out(context.bus, planned, step=step)
            except KnobRejected:
                continue  # cancelled this moment
            if made.at_step is msgspec.UNSET:
                await context.event(EventKind.KNOBS_REFUSED, f"knob epoch {made.epoch}: {made.reason}")
            await live.reach(made.epoch)

    async def train(self, work: StepBatch, epoch: int) -> StepResult:
        """One step; `epoch` is that of its knobs. BatchRefused where it is refused under earlier settings too: then it is the
        batch, and the settings stay."""
        try:
            result: StepResult = await self._in_thread(self._backend.train_step, work)
        except BatchRefused as error:
            if error.half_done:
                raise
            for earlier, values in self._before(work, epoch):
                try:
                    result = await self._in_thread(self._backend.train_step, replace(work, knobs=values))
                except BatchRefused:
                    continue
                self.used = (values, earlier)
                await self._undo(epoch, earlier, str(error))
                return result
            raise
        self.used = (dict(work.knobs), epoch)
        return result

    def _before(self, work: StepBatch, epoch: int) -> list[tuple[int, dict[str, Any]]]:
        """Earlier epochs with other values, newest first. The bound is the batch's, which was cut under it."""
        history = self._context.live_knobs.history()
        found: list[tuple[int, dict[str, Any]]] = []
        for patch in reversed(history):
            if patch.epoch < epoch:
                values = {**work.knobs, **values_at(history, patch.epoch).live}
                values["max_weight_staleness"] = work.knobs.get("max_weight_staleness", 0)
                if values != work.knobs and values not in [seen for _, seen in found]:
                    found.append((patch.epoch, values))
        return found[:MOST_TRIED]

    async def _undo(self, epoch: int, earlier: int, why: str) -> None:
        """Back on the stream, but for what was changed again meanwhile."""
        context = self._context
        history = context.live_knobs.history()
        then, refused, now = values_at(history, earlier), values_at(history, epoch), context.knobs
        back = {
            name: then.values[name]
            for name, value in now.live.items()
            if value == refused.values.get(name) and then.values.get(name, value) != value
        }
        text = f"knob epoch {epoch} is refused by the trainer: {why} The step was done under epoch {earlier}"
        try:
            made = await propose(context.bus, back, author=context.name, reason=f"the trainer refused epoch {epoch}")
            text += f", whose values are back as epoch {made.epoch}: {', '.join(f'{k}={v}' for k, v in made.values.items())}."
        except KnobRejected:
            text += "; others have changed them since."
        await context.event(EventKind.KNOBS_REFUSED, text)
