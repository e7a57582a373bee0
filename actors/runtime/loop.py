"""The event loop: uvloop where it is installed, asyncio's own elsewhere. Behaviour is the same, speed is not."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def runner() -> asyncio.Runner:
    """A runner for one process's loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()

    def made() -> asyncio.AbstractEventLoop:
        loop = uvloop.new_event_loop()
        loop.set_exception_handler(_heard)
        return loop

    return asyncio.Runner(loop_factory=made)


def _heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What no task hears of. Not, as in asyncio's own loop, that the network closed a TLS connection, which who uses it is told:
    uvloop's word for that is a RuntimeError, which came with a traceback for each connection."""
    error = context.get("exception")
    if isinstance(error, RuntimeError) and "the handler is closed" in str(error) and "SSL" in str(context.get("message")):
        return
    loop.default_exception_handler(context)


def run_loop(body: Coroutine[Any, Any, T]) -> T:
    """Run to the end, as asyncio.run does: Ctrl-C cancels the body and is raised when it has ended, a second one is raised at
    once. Python's own runner listens from its first task on; one that came while that task was made left a task that nobody
    ended. Here it is kept from before there is a loop."""
    ours = threading.current_thread() is threading.main_thread() and (signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    interrupt = _Interrupt()
    if ours:
        signal.signal(signal.SIGINT, interrupt.come)
    try:
        with runner() as loop:
            result = loop.run(interrupt.over(body))
        if interrupt.waits:
            raise KeyboardInterrupt
        return result
    except asyncio.CancelledError:
        if interrupt.count:
            raise KeyboardInterrupt from None
        raise
    finally:
        with suppress(RuntimeError):  # a second Ctrl-C may leave it in the middle of a wait
            body.close()  # interrupted before its first step, it would be warned of
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _Interrupt:
    """Ctrl-C for one body."""

    def __init__(self) -> None:
        self.count = 0
        self.waits = False  # for the body to begin, or it came after its end
        self._task: asyncio.Task[Any] | None = None

    def come(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        if self._task is None:
            self.waits = True
        else:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def over(self, body: Coroutine[Any, Any, T]) -> T:
        """The body, cancelled by the first one."""
        self._task = asyncio.current_task()
        if self.waits:
            raise asyncio.CancelledError
        try:
            return await body
        finally:
            self._task = None


def collect_seldom() -> None:
    """For a process that has loaded all it needs, and whose objects end with their last reference: what is here now is left out of
    every search for cycles, and a search begins when so many young objects more are alive as some hundred samples have. With
    Python's own 700 a worker's searches took 43 us of each sample. Not for a process whose cycles may hold tensors."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
