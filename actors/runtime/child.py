"""Processes: the one place that starts, watches and ends those that a process of ours answers for.

Always true: a child is in a session of its own, so that what it started ends with it. One that a parent keeps dies with its
parent, also by SIGKILL; one made to outlive it is found again by its pid (`adopt`).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

ArgValue = bool | int | float | str | tuple[str, ...]
"""Value of a program's flag: True is the bare flag, False leaves it out, a tuple follows its flag word by word."""

# A program of ours, as a module. Not from the current folder: one named `bus` or `actors` there would be taken for ours.
PYTHON = (sys.executable, "-P", "-m")
STDERR = 2  # the file itself: what stands in `sys.stderr` need not be one
STOP_S = 3.0
LOG_TAIL_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """In the child: end when the actor dies (Linux; elsewhere the drain must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Of a process that runs code of the user's: what loses its parent stays below it, where leftovers.py finds it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """One process and its descendants, its output in a file. `start` may be called again after `stop`. `outlives`: it goes
    on when this process ends."""

    def __init__(self, *, outlives: bool = False) -> None:
        self._outlives = outlives
        self._process: asyncio.subprocess.Process | None = None
        self._adopted = 0
        self._code: Awaitable[int | None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else self._adopted

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process.returncode is None if self._process is not None else is_alive(self._adopted)

    def adopt(self, pid: int, code: Awaitable[int | None] | None = None) -> None:
        """Answer for a process that somebody else started. `code`: who can tell its exit status, else it stays unknown."""
        self._process, self._adopted, self._code = None, pid, code

    async def start(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None, *, append: bool = False) -> None:
        """Run `words`; OSError when there is no such program."""
        with log.open("ab") as out:  # to append in any case: a log may be shortened under its writer
            if not append:
                out.truncate(0)
            await self._run(words, asyncio.subprocess.DEVNULL, out, env)

    async def start_spare(self, words: Sequence[str]) -> None:
        """Run `words`, which wait for `order`; what they say until then goes to stderr."""
        await self._run(words, asyncio.subprocess.PIPE, STDERR, None)

    def order(self, line: bytes) -> None:
        """The one line that a spare waits for."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.close()

    async def _run(self, words: Sequence[str], stdin: int, out: IO[Any] | int, env: Mapping[str, str] | None) -> None:
        self._adopted, self._code = 0, None
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=stdin,
            stdout=out,
            stderr=out,
            env=dict(env) if env is not None else None,
            start_new_session=True,
            preexec_fn=None if self._outlives else die_with_parent,
        )

    async def wait(self) -> int | None:
        """Its exit status, once it ended; None where nobody can tell."""
        if self._process is not None:
            return await self._process.wait()
        pid, code = self._adopted, self._code
        known = await code if code is not None else None
        if known is None:
            await ended(pid)
        return known

    def ask_to_end(self) -> None:
        """SIGTERM, if it lives."""
        if self.alive:
            _signal(self.pid, signal.SIGTERM)

    async def stop(self, patience_s: float = STOP_S) -> bool:
        """End it and all it started, politely first. False when it had to be killed."""
        self.ask_to_end()
        pid, process = self.pid, self._process
        self._process, self._adopted = None, 0
        if not pid:
            return True
        obeyed = await ended(pid, patience_s)
        try:
            os.killpg(pid, signal.SIGKILL)  # its session: helpers that it left behind hold the GPU
        except (ProcessLookupError, PermissionError):
            pass
        if process is not None:
            await process.wait()
        elif not obeyed:
            _signal(pid, signal.SIGKILL)  # somebody else started it, and not in a session of its own
            await ended(pid, STOP_S)  # who comes after it begins then
        return obeyed


def is_alive(pid: int) -> bool:
    """Whether a process of this host is there; a zombie that nobody has collected has ended."""
    try:
        return pid > 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


async def ended(pid: int, timeout_s: float | None = None) -> bool:
    """Waits for the end of any process of this host; False when it has not come within `timeout_s`. Woken by the kernel,
    where it can tell the end of another's child (Linux), else by asking."""
    over = asyncio.Event()
    try:
        async with asyncio.timeout(timeout_s):
            handle = _handle_of(pid)
            if handle < 0:
                while is_alive(pid):  # noqa: ASYNC110 - nothing wakes us here
                    await asyncio.sleep(0.1)
                return True
            loop = asyncio.get_running_loop()
            loop.add_reader(handle, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
    except TimeoutError:
        return False
    return True


def _handle_of(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# Above, Linux takes ports for connections that go out, unless it is set up otherwise. SGLang opens a second one 10,000 higher.
FIRST_PORT, LAST_PORT = 10_000, 32_767


def log_tail(log: Path) -> list[str]:
    """The newest lines of a log that are not blank; only its end is read: a week makes it long."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log_tail(log)
    return lines[-1].strip()[:600] if lines else "(empty log)"


def free_port(successors: int = 0) -> int:
    """A port that nobody listens on now, by binding it, and as many free ones after it. Someone may take them before the
    child does, but hardly an outgoing connection."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        port = FIRST_PORT + port % (LAST_PORT - FIRST_PORT)  # where the kernel's spread falls in our range
        if all(_is_free(port + n) for n in range(successors + 1)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
        return True


def command_line(command: Sequence[str], args: Mapping[str, ArgValue]) -> list[str]:
    """Command and flags (names without dashes) as words."""
    words = list(command)
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, tuple | list):
            words.extend(str(item) for item in value)
        elif value is not True:
            words.append(str(value))
    return words


def flag_name(name: str) -> str:
    """A flag's name as programs spell it: dashes, no prefix."""
    return name.strip().lstrip("-").replace("_", "-")
