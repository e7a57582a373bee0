"""Files that tell of steps and that no step needs (recorded batches, hashes, trained data): what cannot be written costs that file
alone.

Reads  nothing    Writes  those files, events    Owns  which of them were told of
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from actors.runtime.context import Context
from bus.messages.events import EventKind


class StepFiles:
    """Writes them. The first of a kind that fails is an event, and so is the first after one that was written again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._failing: set[str] = set()

    async def write(self, what: str, step: int, where: object, call: Callable[..., None], *args: Any) -> None:
        """Call it in a thread."""
        try:
            await asyncio.to_thread(call, *args)
        except OSError as error:
            await self.wrote(what, step, where, 1, error.strerror or str(error))
        else:
            await self.wrote(what, step, where, 0)

    async def wrote(self, what: str, step: int, where: object, missing: int, why: str = "its ranks' logs say why") -> None:
        """A kind was written, but for `missing` files."""
        if not missing:
            self._failing.discard(what)
            return
        self._context.count(f"not_written/{what}", missing)
        if what not in self._failing:
            self._failing.add(what)
            text = f"{what} of step {step} not written to {where}: {why}. Training goes on without; free space there."
            await self._context.event(EventKind.NOT_WRITTEN, text, step=step)
