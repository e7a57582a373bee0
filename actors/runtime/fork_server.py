"""Actors forked from a process that has their libraries loaded: milliseconds and shared memory, where an import takes seconds.

`python -m actors.runtime.fork_server MODULE...` imports the modules and then forks a child for each order on stdin; it answers
with the child's pid, and later with its exit status. It ends with whoever orders; its children stay. It imports, and does
nothing else: no thread, no loop, no device may be open in a process that forks. A child's command line is that of a process
started by hand (`python -m actors.<room> SPEC`), so that it is found by the same means. Linux only.

Always true: nobody carries out an order of the dead. A child has its command line first, and then asks whether its orderer lives;
so one that goes on is there to be found by whoever comes after that orderer.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.child import PYTHON
from actors.runtime.faultpoints import fault_point

SPACE = "-" * 2000  # room for a child's command line in the server's own
NO_SERVER = 3
ANSWER_S = 300.0  # importing torch takes minutes on a starved host


class ForkOrder(msgspec.Struct, frozen=True):
    """Run `words[0]` as `python -m` would, with the others as its arguments; `env` is set beside what the server has."""

    words: list[str]
    log: str
    env: dict[str, str]


class ForkReport(msgspec.Struct, frozen=True):
    """`ended` false: the last order's child has this pid. True: this child ended with `code` (negative: by a signal)."""

    pid: int
    ended: bool = False
    code: int = 0


Forked = tuple[int, "asyncio.Future[int | None]"]
"""Pid, and what becomes its exit status."""


class ForkServer:
    """The ordering side. `start` is None when the server cannot serve; the caller starts a process of its own then."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [*PYTHON, __name__, *modules, SPACE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._orders: asyncio.Queue[asyncio.Future[Forked | None]] = asyncio.Queue()
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def start(self, words: Sequence[str], log: Path, env: Mapping[str, str]) -> Forked | None:
        """Pid, and a future of the exit status: None = the server was lost before it could tell."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="fork server")
        if self._reader.done() or self._process.stdin is None:
            return None
        loop = asyncio.get_running_loop()
        forked: asyncio.Future[Forked | None] = loop.create_future()
        self._orders.put_nowait(forked)
        try:
            self._process.stdin.write(msgspec.json.encode(ForkOrder(list(words), str(log), dict(env))) + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        try:
            return await asyncio.wait_for(forked, ANSWER_S)
        except TimeoutError:
            self._process.kill()  # or it could start later what the caller starts now
            return None

    async def _read(self) -> None:
        """Waits for answers; woken by the pipe, also by its end."""
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._process.stdout)
        while line := await stream.readline():
            answer = msgspec.json.decode(line, type=ForkReport)
            if not answer.ended:
                end: asyncio.Future[int | None] = loop.create_future()
                self._ends[answer.pid] = end
                # With its end: a child may have ended, and that been read, before whoever ordered it is woken.
                _tell(self._orders.get_nowait(), (answer.pid, end))
            else:
                _tell(self._ends.pop(answer.pid), answer.code)
        transport.close()
        while not self._orders.empty():
            _tell(self._orders.get_nowait(), None)
        for future in self._ends.values():
            _tell(future, None)
        self._ends.clear()

    async def close(self) -> None:
        """`end`, where a loop reads its answers."""
        self._process.kill()
        if self._reader is not None:
            await self._reader
        self.end()

    def end(self) -> None:
        """At once: it has nothing to lose, and its children go on."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # it died with an order unread


def _tell(future: asyncio.Future[Any], value: Forked | int | None) -> None:
    """Unless whoever waited has gone."""
    if not future.done():
        future.set_result(value)


def serve() -> ForkOrder | None:
    """In the server: until stdin ends (None), or in a child: its order."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _collect()
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if orderer_is_gone():  # what it wrote lay here while this process loaded
                return None
            order = msgspec.json.decode(line, type=ForkOrder)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake)
                os.close(woken)
                return order
            _say(ForkReport(pid))
        if not data:
            return None


def orderer_is_gone() -> bool:
    """Whether nobody holds the other end of stdin, whatever is left to be read there."""
    asked = select.poll()
    asked.register(0, 0)  # of POLLHUP one is told in any case
    return bool(asked.poll(0))


def _collect() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(ForkReport(pid, True, os.waitstatus_to_exitcode(status)))


def _say(answer: ForkReport) -> None:
    os.write(1, msgspec.json.encode(answer) + b"\n")


def become(order: ForkOrder) -> None:
    """In a child: run the order in this process, and end. Of an orderer that died meanwhile: end at once."""
    os.setsid()
    rename([*PYTHON, *order.words])
    fault_point(Path(order.words[-1]).stem, "renamed")
    if orderer_is_gone():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, handle in ((0, null), (1, log), (2, log)):
        os.dup2(handle, number)
    os.close(null)
    os.close(log)
    os.environ.update(order.env)
    random.seed()  # else all children would draw the same pauses
    sys.argv = list(order.words)
    code = 1
    try:
        runpy.run_module(order.words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - this process ends here, with the words that any other would end with
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        # An interpreter that takes itself apart touches, and so copies, all that it shares with the server: seconds.
        os._exit(code)


def words_at() -> tuple[int, int]:
    """Begin and end of this process's command line in its memory; (0, 0) where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted behind the command's name
    except (OSError, IndexError, ValueError):
        return 0, 0


def rename(words: Sequence[str]) -> bool:
    """Write another command line over the one this process was started with; False where that cannot be done."""
    begin, end = words_at()
    text = b"".join(word.encode() + b"\0" for word in words)
    if not begin or len(text) > end - begin:
        return False
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
    return Path("/proc/self/cmdline").read_bytes().startswith(text)


if __name__ == "__main__":
    if not rename([*PYTHON, "actors.runtime.fork_server", *sys.argv[1:-1]]):
        sys.exit(NO_SERVER)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    gc.disable()  # collecting in the middle of torch's import costs a fifth of it
    for name in sys.argv[1:-1]:
        import_module(name)
    gc.freeze()  # a collection in a child would copy what it shares with the others
    gc.enable()
    wanted = serve()
    if wanted is None:
        os._exit(0)
    sys.stderr = sys.__stderr__
    become(wanted)
