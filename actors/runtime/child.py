"""A server program as a child of an actor: started, watched, ended with everything it started itself.

Always true: a child is in a session of its own and dies when the actor dies, also by SIGKILL.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ArgValue = bool | int | float | str | tuple[str, ...]
"""Value of a program's flag: True is the bare flag, False leaves it out, a tuple follows its flag word by word."""

# A program of ours, as a module. Not from the current folder: one named `bus` or `actors` there would be taken for ours.
PYTHON = (sys.executable, "-P", "-m")
STOP_S = 3.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: end when the actor dies (Linux; elsewhere the drain must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One process and its descendants, its output in a file. `start` may be called again after `stop`."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """Run `words`; OSError when there is no such program."""
        with log.open("wb") as out:
            await self._run(words, asyncio.subprocess.DEVNULL, out, env)

    async def start_spare(self, words: Sequence[str]) -> None:
        """Run `words`, which wait for `order`; what they say until then goes to stderr."""
        await self._run(words, asyncio.subprocess.PIPE, sys.stderr, None)

    def order(self, line: bytes) -> None:
        """The one line that a spare waits for."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.close()

    async def _run(self, words: Sequence[str], stdin: int, out: IO[Any], env: Mapping[str, str] | None) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=stdin,
            stdout=out,
            stderr=out,
            env=dict(env) if env is not None else None,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    async def wait(self) -> int | None:
        """Its exit status, once it ended."""
        return await self._process.wait() if self._process is not None else None

    async def stop(self, patience_s: float = STOP_S) -> None:
        """End it and all it started, politely first."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), patience_s)
            except TimeoutError:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its session: helpers that it left behind hold the GPU
        except (ProcessLookupError, PermissionError):
            pass
        await process.wait()


# Above, Linux takes ports for connections that go out, unless it is set up otherwise. SGLang opens a second one 10,000 higher.
FIRST_PORT, LAST_PORT = 10_000, 32_767


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


__all__ = ("PYTHON", "ArgValue", "Child", "command_line", "flag_name", "free_port")
