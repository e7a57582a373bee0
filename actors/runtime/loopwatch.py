"""The watch over an actor's event loop, from the actor's side: a process beside it (loopwatch_child.py) hears that the loop turns.

It needs nothing of the actor's interpreter, which a call in C may hold for ever: a regular expression, a power of a number. What
the actor tells it beforehand is enough to act in its place: a beat while the loop turns, which entries it reads under which name,
and, in memory that both see, whose code each thread runs now.

Always true: without a watch (tests, tools) everything here does nothing. A beat is a byte in a pipe that is never waited for.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from actors.runtime import loopwatch_child
from actors.runtime.deadline import beside
from actors.runtime.leftovers import MARK
from actors.runtime.loopwatch_acts import ROW_BYTES, ROWS, SHOW, Reads, Told, Work

if TYPE_CHECKING:
    from actors.runtime.context import ActorSpec

T = TypeVar("T")
PATIENT = 20.0  # times as long for rooms whose loop loads data sets or lets one call compute for minutes, and that have no peer
IMPATIENT_ROLES = ("generation", "reward", "filter", "partial", "environments", "router")
AGAIN_S, END_S = 60.0, 5.0  # between two starts of a watch; for its end


class _Watch:
    """One process's, while it has one."""

    def __init__(self, spec: ActorSpec, deadline_s: float) -> None:
        self._spec, self._deadline_s = spec, deadline_s
        self._rows_file, self._stacks = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._rows_file.truncate(ROWS * ROW_BYTES)
        self.rows = mmap.mmap(self._rows_file.fileno(), ROWS * ROW_BYTES)
        self.free = list(range(1, ROWS))  # rows of no thread; append and pop are atomic
        self._said: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def open(self) -> None:
        """Stacks go to our file from now on, also those of a process that crashes."""
        faulthandler.enable(file=self._stacks)
        faulthandler.register(SHOW, file=self._stacks, all_threads=True)
        self._start()

    def _start(self) -> None:
        rows, stacks = self._rows_file.fileno(), self._stacks.fileno()
        self._began = time.monotonic()
        former = self._process
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", loopwatch_child.__file__, *map(str, self._words())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(rows, stacks),
            start_new_session=True,  # Ctrl-C is not for it, and it has work to do when our session is killed
            env={name: value for name, value in os.environ.items() if name != MARK},
            cwd="/",
        )
        if former is not None and former.stdin is not None:
            former.stdin.close()
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        bus = msgspec.to_builtins(self._spec.bus)
        told = Told(self._spec.name, os.getpid(), threading.get_ident(), self._deadline_s, bus, rows, stacks)
        self._write(msgspec.json.encode(told))
        for line in self._said:
            self._write(line)

    def _words(self) -> tuple[int, float, float, int]:
        return os.getpid(), self._deadline_s, self._spec.bus.lease_s, self._stacks.fileno()

    def say(self, line: bytes) -> None:
        self._said.append(line)
        self._write(line)

    def _write(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BlockingIOError, BrokenPipeError):  # it is late, or it has gone, which `beat` sees
            os.write(self._process.stdin.fileno(), line + b"\n")

    async def beat(self) -> NoReturn:
        """Until cancelled; a watch that has gone (killed for want of memory) is replaced, if not now (no process may be started, no
        file opened), then later: the actor itself goes on."""
        every_s = min(1.0, self._deadline_s / 10)
        while True:
            self._write(b"")
            assert self._process is not None
            if self._process.poll() is not None and time.monotonic() - self._began > AGAIN_S:
                try:
                    self._start()
                except OSError as error:
                    again = f"the event loop is watched by nobody for another {AGAIN_S:.0f} s"
                    logging.getLogger(self._spec.name).warning("no process can be started: %s; %s", error.strerror or error, again)
            await asyncio.sleep(every_s)

    def close(self) -> None:
        """The loop is over, and not to be missed."""
        faulthandler.unregister(SHOW)
        faulthandler.disable()
        process = self._process
        if process is not None and process.stdin is not None:
            self._write(b"bye")
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.rows.close()
        self._rows_file.close()
        self._stacks.close()


_watch: _Watch | None = None
_work: ContextVar[bytes | None] = ContextVar("work", default=None)  # a row's content, but for the thread


@asynccontextmanager
async def watched(spec: ActorSpec) -> AsyncIterator[None]:
    """The body's loop is watched, in a process that is the actor's own. A spec without a deadline: it is not."""
    global _watch
    if spec.loop_deadline_s <= 0 or _watch is not None:
        yield
        return
    _watch = _Watch(spec, spec.loop_deadline_s * (1.0 if spec.role in IMPATIENT_ROLES else PATIENT))
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_task)
    try:
        _watch.open()
        async with beside(_watch.beat()):
            yield
    finally:
        loop.set_task_factory(None)
        watch, _watch = _watch, None
        watch.close()


def reads(streams: Sequence[str], readers: str, me: str) -> None:
    """Entries of these are held under this name from now on: in our place the watch keeps their leases while the loop stands, and
    lets them go when it ended us."""
    if _watch is not None:
        _watch.say(msgspec.json.encode(Reads([*streams], readers, me)))


async def working(work: Work, does: Coroutine[Any, Any, T]) -> T:
    """What `does` gives. While its own code runs, and that of tasks and threads that it starts, the watch can tell whose it is."""
    if _watch is None:
        return await does
    label = msgspec.json.encode(work)
    if len(label) > ROW_BYTES // 2:  # nobody's name is that long
        return await does
    token = _work.set(label)
    try:
        given: T = await _Marked(does, label)
        return given
    finally:
        _work.reset(token)


def _row(label: bytes) -> bytes:
    return b'{"thread":%d,"work":%s}\0' % (threading.get_native_id(), label)


class _Marked(Coroutine[Any, Any, T]):
    """A coroutine whose steps are seen."""

    def __init__(self, of: Coroutine[Any, Any, T], label: bytes) -> None:
        self._of = of
        self._label = _row(label)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        rows = _watch.rows if _watch is not None else bytearray(ROW_BYTES)
        rows[: len(self._label)] = self._label
        try:
            return step(*args)
        finally:
            rows[0] = 0

    def send(self, value: Any) -> Any:
        return self._step(self._of.send, value)

    def throw(self, *raised: Any) -> Any:
        return self._step(self._of.throw, *raised)

    def close(self) -> None:
        self._of.close()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def _task(loop: asyncio.AbstractEventLoop, does: Any, **more: Any) -> asyncio.Task[Any]:
    """A task of the loop; one that a sample's code starts is that sample's."""
    label = _work.get()
    if label is not None and asyncio.iscoroutine(does) and not isinstance(does, _Marked):
        does = _Marked(does, label)
    return asyncio.Task(does, loop=loop, **more)


def in_thread(does: Callable[..., Awaitable[Any] | Any]) -> Callable[..., Any]:
    """The same function for a thread: the watch can tell for whom it runs there."""
    label = _work.get()
    if _watch is None or label is None:
        return does

    def seen(*args: Any) -> Any:
        with _thread_row(label):
            return does(*args)

    return seen


@contextmanager
def _thread_row(label: bytes) -> Iterator[None]:
    watch = _watch
    if watch is None or not watch.free:
        yield
        return
    index, row = watch.free.pop(), _row(label)
    watch.rows[index * ROW_BYTES : index * ROW_BYTES + len(row)] = row
    try:
        yield
    finally:
        with suppress(ValueError):  # the watch is over
            watch.rows[index * ROW_BYTES] = 0
        watch.free.append(index)
