"""The event loop: uvloop where it is installed, asyncio's own elsewhere. Behaviour is the same, speed is not."""

from __future__ import annotations

import asyncio
import gc
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
    """Run to the end, as asyncio.run does. Interrupted before it has begun, it leaves nothing that Python would warn of."""
    try:
        with runner() as loop:
            return loop.run(body)
    finally:
        body.close()


def collect_seldom() -> None:
    """For a process that has loaded all it needs, and whose objects end with their last reference: what is here now is left out of
    every search for cycles, and a search begins when so many young objects more are alive as some hundred samples have. With
    Python's own 700 a worker's searches took 43 us of each sample. Not for a process whose cycles may hold tensors."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
