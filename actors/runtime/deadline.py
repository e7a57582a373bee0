"""Waits with a name and an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bus.errors import DeadlineExceeded


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise DeadlineExceeded naming `what` when the body takes longer."""
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from error
        raise


async def within(seconds: float | None, event: asyncio.Event) -> bool:
    """Wait for an event, no longer than this (None: as long as it takes); whether it is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
