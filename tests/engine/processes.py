"""Waiting for processes, always with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

BOOT_DEADLINE_S = 45.0


def until(ready: Callable[[], bool], what: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {deadline_s} s"
        time.sleep(0.02)


async def until_async(ready: Callable[[], Awaitable[bool]], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not await ready():
        assert time.monotonic() < end, f"{what}: not within {deadline_s} s"
        await asyncio.sleep(0.01)
