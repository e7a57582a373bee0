"""Pictures of prompts on the bus: put there once for all samples of a prompt that are issued together, deleted by whoever put them
when nobody is to read them any more.

Owns the blobs that it put, or that the run's open groups name. A picture of an open group is never deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from actors.runtime.context import Context
from actors.runtime.prompts import Prompt
from actors.runtime.run import RunEnds
from actors.runtime.vision import BadImage, read
from bus.messages.events import EventKind
from bus.messages.samples import Picture

MOST_UNSEEN = 64  # prompts in a row whose pictures cannot be read; then it is not the prompts


class PromptPictures:
    """One room's."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._blobs: set[str] = set()
        self._unseen = 0

    def know(self, blobs: Iterable[str]) -> None:
        """Of groups that a former process of ours opened."""
        self._blobs.update(blobs)

    async def put(self, prompt: Prompt) -> tuple[Picture, ...] | None:
        """A prompt's pictures with their blobs. None: one cannot be read any more, and the prompt is passed over, counted. Raises
        RunEnds after too many of these in a row."""
        bus, placed = self._context.bus, []
        try:
            for shown in prompt.pictures:
                data = await asyncio.to_thread(read, shown.source, shown.folder)
                placed.append(msgspec.structs.replace(shown.place, blob=await bus.blobs.put(data)))
        except BadImage as error:
            await bus.blobs.delete([picture.blob for picture in placed])
            self._unseen += 1
            self._context.count("prompts_unseen")
            text = f"prompt p{prompt.index} is passed over: {error}"
            if self._unseen >= MOST_UNSEEN:
                raise RunEnds(f"{self._unseen} prompts in a row cannot show their pictures; the last: {text}") from error
            await self._context.refusals.add("pictures", text, kind=EventKind.PROMPT_PASSED_OVER)
            return None
        self._unseen = 0
        self._blobs.update(picture.blob for picture in placed)
        return tuple(placed)

    async def free(self) -> None:
        """Delete those that no open group names."""
        if not self._blobs:
            return
        bus = self._context.bus
        held = {blob for group in (await bus.open_groups()).values() for blob in group.blobs}
        gone = self._blobs - held
        await bus.blobs.delete(sorted(gone))
        self._blobs -= gone
