"""Waits with a name and an end, and work that goes on beside other work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

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


async def first_of(*waits: Coroutine[Any, Any, object]) -> int:
    """Wait until one of these has ended; which it is. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(i for i, task in enumerate(tasks) if task.done())
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """The body with this going on beside it, cancelled at its end; either fails with the other."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        try:
            yield
        finally:
            task.cancel()


@asynccontextmanager
async def followed(follow: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """The same with work that is told when the body ends, and comes to its own end."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(stop))
        try:
            yield
        finally:
            stop.set()
