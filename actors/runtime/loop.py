"""The event loop: uvloop where it is installed, asyncio's own elsewhere. Behaviour is the same, speed is not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def runner() -> asyncio.Runner:
    """A runner for one process's loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def run_loop(body: Coroutine[Any, Any, T]) -> T:
    """Run to the end, as asyncio.run does."""
    with runner() as loop:
        return loop.run(body)
