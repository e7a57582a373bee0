"""Python code that nobody vouches for, run apart from the caller: one process each, forked from a server that is started once.

    async with Sandbox(reads=("/data/questions",)) as box:
        ran = await box.run("print(1 + 1)")                            # ran.cause == "ok", ran.stdout == "2\\n"
        ran = await box.examine(program, "assert add(1, 2) == 3")      # "ok": the assertions hold

What code here can and cannot do is in `confine.py` and `syscalls.py`. Always true: every `run` returns a result that names its
cause, within its deadline and a little more, whatever the code does; also when the server itself dies, which then starts anew: what
was in it runs again, each in a server of its own, so that no code pays for another's. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, Literal, Self

import msgspec

from actors.runtime.child import die_with_parent
from actors.runtime.hooks import framed
from bus.errors import MilesAsyncError

Cause = Literal["ok", "raised", "exit", "deadline", "cpu", "memory", "output", "crash", "killed", "lost", "unasked"]
"""ok: ran to its end. raised: an exception, its trace on stderr. exit: `sys.exit` with another code than 0. deadline, cpu (seconds
of processor), memory, output: a limit, and it was ended. crash: a signal. killed: servers that ran nothing else died of it, twice,
where harmless code came to its end. lost: those died too, so nothing is known of this code. unasked: tests that ask nothing, so
that there is no verdict."""

ENVIRONMENT = {"LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ROOT = str(Path(__file__).resolve().parents[2])  # of our packages; code finds them by no path
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from actors.runtime.sandbox_child import main; sys.path.pop(0); main()"
BOOT_S = 60.0
GRACE_S = 20.0  # past a deadline, before a server that does not answer is given up
TRIES = 2  # of servers for one piece of code alone
HARMLESS, HARMLESS_S = "print(1)", 10.0  # code that ends well wherever code can run, and its time


class SandboxUnavailable(MilesAsyncError):
    """This host cannot hold code to its limits, so none is run."""


class Ran(msgspec.Struct, frozen=True):
    """How a piece of code ended."""

    cause: Cause
    stdout: str = ""
    """Up to the limit of both outputs together; bytes that are no UTF-8 are replaced."""
    stderr: str = ""
    code: int = 0
    """Exit code; negative: ended by this signal."""
    seconds: float = 0.0


class _Lost(Exception):
    """The server ended before it answered."""


class _Server:
    """One server process, never used again after its end."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self._process = process
        self._open: dict[int, asyncio.Future[Ran]] = {}
        self._listener = asyncio.create_task(self._listen(), name=f"sandbox {process.pid}")
        self.confined, self.walled = bool(said["confined"]), bool(said["walled"])
        self.missing = tuple(said["missing"])

    @classmethod
    async def start(cls, profile: dict[str, Any]) -> Self:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-c", PROGRAM, json.dumps(profile)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, SubprocessError) as error:
            raise SandboxUnavailable(f"the Python sandbox cannot be started: {error}. No code was run.") from error
        try:
            async with asyncio.timeout(BOOT_S):
                said = await _read(process)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise SandboxUnavailable(f"the Python sandbox did not start within {BOOT_S:g} s ({type(error).__name__}).") from error
        if "refused" in said:
            await process.wait()
            raise SandboxUnavailable(f"{said['refused']} No code was run.")
        return cls(process, said)

    @property
    def alive(self) -> bool:
        return not self._listener.done()

    async def ask(self, number: int, order: dict[str, Any]) -> Ran:
        """The answer to one order. Raises _Lost."""
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        body = json.dumps({"number": number, **order}).encode()  # takes half of a surrogate pair too, which no UTF-8 does
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(float(order["deadline_s"]) + GRACE_S):
                with contextlib.suppress(ConnectionError):
                    self._process.stdin.write(framed(body))
                    await self._process.stdin.drain()
                if not self.alive:
                    raise _Lost
                return await answer
        except TimeoutError:
            await self.close()
            raise _Lost from None
        finally:
            del self._open[number]

    async def _listen(self) -> None:
        """Answers to their askers; waits for the next one, ends with the process."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                said = await _read(self._process)
                if (answer := self._open.get(said.pop("number"))) is not None and not answer.done():
                    answer.set_result(msgspec.convert(said, Ran))
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_Lost())
                answer.exception()  # seen: whoever asked may have gone

    async def close(self) -> None:
        """End it; what runs in it ends with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._listener


class Sandbox:
    """Runs code for any number of callers, `width` pieces at once. Use as `async with`; entering starts the server and raises
    SandboxUnavailable where it cannot work. `reads`: files and folders that code may read beside the interpreter's. `weak`: go on
    where the kernel lacks a part of the limits; `missing` tells which."""

    def __init__(
        self, *, width: int = 0, memory_bytes: int = 1 << 30, output_bytes: int = 1 << 16, deadline_s: float = 10.0,
        reads: Sequence[str] = (), weak: bool = False,
    ) -> None:  # fmt: skip
        self._limits = {"memory_bytes": memory_bytes, "output_bytes": output_bytes}
        self._profile = {"reads": [os.path.abspath(path) for path in reads], "weak": weak}
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(width or os.cpu_count() or 1)
        self._alone = asyncio.Semaphore(1)
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._server: _Server | None = None

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            await self._server.close()

    @property
    def confined(self) -> bool:
        """Whether code sees the interpreter's files and `reads` only; False: all files that we may read."""
        return self._server is not None and self._server.confined

    @property
    def walled(self) -> bool:
        """Whether the second wall stands: no other process, no network and no other file even has a name in there."""
        return self._server is not None and self._server.walled

    @property
    def missing(self) -> tuple[str, ...]:
        """What the kernel lacks for the limits."""
        return self._server.missing if self._server is not None else ()

    async def run(self, code: str, *, stdin: str = "", echo: bool = False, deadline_s: float | None = None) -> Ran:
        """Run `code` as a script whose standard input is `stdin`. `deadline_s` counts from its start, not from the call. `echo`:
        print the value of a last line that is an expression. Raises SandboxUnavailable only: the server does not start again."""
        return await self._order(code, deadline_s, stdin=stdin, echo=echo)

    async def examine(self, program: str, tests: str, *, deadline_s: float | None = None) -> Ran:
        """Run `tests`, assertions about what `program` defines, in a process that the program cannot reach; "ok" when they hold.
        How the two meet, and what that means for tests, is in `examiner.py`. Raises as `run`."""
        return await self._order(program, deadline_s, tests=tests)

    async def _order(self, code: str, deadline_s: float | None, *, stdin: str = "", echo: bool = False, tests: str = "") -> Ran:
        order = {
            "code": code, "stdin": stdin, "echo": echo, "tests": tests, "deadline_s": deadline_s or self._deadline_s,
            **self._limits,
        }  # fmt: skip
        async with self._slots:
            with contextlib.suppress(_Lost):
                return await (await self._ready()).ask(next(self._numbers), order)
        harmless = {**order, "code": HARMLESS, "tests": "", "deadline_s": HARMLESS_S}
        async with self._alone:
            for one in (*[order] * TRIES, harmless):
                server = await _Server.start(self._profile)
                try:
                    ran = await server.ask(next(self._numbers), one)
                except _Lost:
                    continue
                finally:
                    await server.close()
                if one is order:
                    return ran
                if ran.cause == "ok":
                    return Ran("killed", stderr=f"the sandbox died {TRIES} times with this code alone in it, and did not without")
        return Ran("lost", stderr=f"the sandbox died {TRIES} times with this code alone in it, and with harmless code too")

    async def _ready(self) -> _Server:
        async with self._starting:
            if self._server is None or not self._server.alive:
                if self._server is not None:
                    await self._server.close()
                self._server = await _Server.start(self._profile)
            return self._server


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """One frame. Raises IncompleteReadError at the end of the pipe."""
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(4), "little")
    return dict(msgspec.json.decode(await process.stdout.readexactly(size)))
