"""One process for an environment: asked within a deadline, killed when it is late, its end told with a cause."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.runtime.child import PYTHON, adopt_orphans, die_with_parent, last_line
from actors.runtime.confine import Profile, encoded, kept, without_ours
from actors.runtime.hooks import framed
from actors.runtime.leftovers import MARK, end_below, end_marked, new_mark

BOOT_S = 120.0
END_S = 5.0
MOST_BYTES = 100_000  # of an answer: it travels inline on a log


def _below_us() -> None:
    die_with_parent()
    adopt_orphans()


class Died(Exception):
    """The process ended, or was ended, before it answered. The text is the cause."""


class Failed(Exception):
    """The environment raised, or answered what cannot be sent."""


class EnvironmentHost:
    """The process; its environment is begun anew by each `begin`."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, log: Path) -> None:
        self._process, self._mark, self._log = process, mark, log

    @classmethod
    async def start(cls, path: str, log: Path, profile: Profile | None = None, pass_env: Sequence[str] = ()) -> EnvironmentHost:
        """A process with the module at `path` loaded; what it prints goes to `log`. `profile`: its limits; then it has harmless
        variables only, and those of `pass_env`. Raises Died, Failed."""
        words = (*PYTHON, "actors.environments.child", path, *((encoded(profile),) if profile else ()))
        mark = new_mark()
        variables = kept(os.environ, pass_env) if profile else without_ours(os.environ)
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=out, start_new_session=True,
                preexec_fn=_below_us, env=variables | {MARK: mark},
            )  # fmt: skip
        host = cls(process, mark, log)
        await host._answer("the load of its module", BOOT_S)
        return host

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, verb: str, argument: bytes, deadline_s: float) -> bytes:
        """What it gave, msgpack. Raises Died, Failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(framed(msgspec.msgpack.encode([verb, msgspec.Raw(argument)])))
        return await self._answer(verb, deadline_s)

    async def _answer(self, verb: str, deadline_s: float) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.stdin.drain()
                size = int.from_bytes(await self._process.stdout.readexactly(4), "little")
                if size > MOST_BYTES:
                    await self.close()
                    raise Died(f"{verb} gave {size:,} bytes, more than {MOST_BYTES:,}")
                worked, value = msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=tuple[bool, msgspec.Raw])
        except TimeoutError:
            await self.close()
            raise Died(f"{verb} did not end within {deadline_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            await self.close()
            raise Died(f"its process ended with {self._process.returncode} in {verb}: {last_line(self._log)}") from None
        if not worked:
            raise Failed(str(msgspec.msgpack.decode(value)))
        return bytes(value)

    async def close(self) -> None:
        """End it and all that it started. What it said last is read away: a full pipe would keep asyncio from seeing its end."""
        if self.alive:
            await asyncio.to_thread(end_below, self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(end_marked, self._mark)
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):  # a process that left the group may hold the pipe
            async with asyncio.timeout(END_S):
                while await self._process.stdout.read(1 << 16):
                    continue
                await self._process.wait()
