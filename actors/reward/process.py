"""One verifier process from the actor's side: started, asked, killed. Never used again after its end.

Owns one child in a process group of its own. Always true: every question is answered, or fails with a reason that says
whether it was this question's own doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Self

from actors.reward.sample import Sample, SampleGroup, ScorerFailed
from actors.reward.wire import MAX_FRAME_BYTES, Cancel, Ready, ScoreAnswer, ScoreOrder, decode_from_verifier, frame
from actors.runtime.child import PYTHON
from actors.runtime.confine import Profile, encoded, kept, without_ours
from actors.runtime.leftovers import MARK, end_below, end_marked, new_mark
from actors.runtime.loopwatch_acts import SHOW
from bus.errors import UNREADABLE, DeadlineExceeded, InvariantBroken

CANCEL_GRACE_S, SHOWN_S = 1.0, 0.2
KILL_DEADLINE_S = 5.0


class NoBoot(Exception):
    """The process ended, or was silent, before its hook was loaded."""


class Bystander(Exception):
    """The process went down with several questions in it, for a reason that is not known to be this one's."""


class VerifierProcess:
    """A running verifier with a loaded hook."""

    def __init__(self, child: asyncio.subprocess.Process, mark: str, path: str, is_async: bool, tasks: asyncio.TaskGroup) -> None:
        self._child, self._mark = child, mark
        self._path = path
        self._open: dict[int, asyncio.Future[ScoreAnswer]] = {}
        self._numbers = itertools.count()
        self._ending = False
        self.is_async = is_async
        self.pid = child.pid
        self._listener = tasks.create_task(self._listen(), name=f"verifier {child.pid}")

    @classmethod
    async def boot(
        cls, path: str, tasks: asyncio.TaskGroup, *, deadline_s: float, profile: Profile | None = None, pass_env: Sequence[str] = ()
    ) -> Self:
        """Start a process and wait until its hook is loaded. `profile`: its limits; then it has harmless variables only, and those
        of `pass_env`. Raises NoBoot."""
        mark = new_mark()
        child = await asyncio.create_subprocess_exec(
            *(*PYTHON, "actors.reward.verifier", path, str(os.getpid()), *((encoded(profile),) if profile else ())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_variables(profile, pass_env) | {MARK: mark},
            start_new_session=True,  # what the hook starts is killed with it
        )
        try:
            async with asyncio.timeout(deadline_s):
                body = await _read(child)
            ready = None if body is None else decode_from_verifier(body)
            if not isinstance(ready, Ready):
                raise NoBoot("it ended at once; why is in this actor's log")
            if ready.error:
                raise NoBoot(ready.error)
        except TimeoutError as error:
            await _end(child, mark)
            raise NoBoot(f"not ready within {deadline_s:g} s") from error
        except BaseException:
            await _end(child, mark)
            raise
        return cls(child, mark, path, ready.is_async, tasks)

    @property
    def alive(self) -> bool:
        return not self._ending and self._child.returncode is None

    async def ask(self, sample: Sample | SampleGroup, deadline_s: float) -> ScoreAnswer:
        """One question. Raises DeadlineExceeded when the process had to be relieved of it, ScorerFailed when it died of it,
        Bystander when it died of something else."""
        number, future = self._question(next(self._numbers))
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(ScoreOrder(number, sample.as_dict()))
                return await future
        except TimeoutError:
            if not (self.is_async and await self._cancelled(number)):
                await self._show()
                await self.kill()
            raise DeadlineExceeded(f"scoring {sample.sample_id} with {self._path} took longer than {deadline_s:g} s") from None
        finally:
            del self._open[number]

    def _question(self, number: int) -> tuple[int, asyncio.Future[ScoreAnswer]]:
        future: asyncio.Future[ScoreAnswer] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        if not self.alive:
            future.set_exception(Bystander())
        return number, future

    async def _show(self) -> None:
        """In this actor's log: what it is in, also where that is a call in C which lets no other thread run."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, SHOW)
            await asyncio.sleep(SHOWN_S)

    async def _cancelled(self, number: int) -> bool:
        """Did the hook let go of the question when asked to?"""
        _, let_go = self._question(number)
        with contextlib.suppress(TimeoutError, ScorerFailed, Bystander):
            async with asyncio.timeout(CANCEL_GRACE_S):
                await self._send(Cancel(number))
                await let_go
                return True
        return False

    async def _send(self, message: ScoreOrder | Cancel) -> None:
        """Write a frame; that the process is gone is told by the listener, not here."""
        assert self._child.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._child.stdin.write(frame(message))
            await self._child.stdin.drain()

    async def _listen(self) -> None:
        """Answers to their askers; waits for the next frame, ends with the process."""
        why = "ended"
        while (body := await _read(self._child)) is not None:
            try:
                answer = decode_from_verifier(body)
            except UNREADABLE as error:
                why = f"sent what is no answer ({error})"
                break
            if isinstance(answer, ScoreAnswer) and (future := self._open.get(answer.number)) and not future.done():
                future.set_result(answer)
        on_purpose, self._ending = self._ending, True
        await _end(self._child, self._mark)
        waiting = [future for future in self._open.values() if not future.done()]
        for future in waiting:
            if len(waiting) == 1 and not on_purpose:
                future.set_exception(ScorerFailed(f"{self._path}: its process {why}, {_cause(self._child.returncode)}"))
            else:
                future.set_exception(Bystander())

    async def kill(self) -> None:
        """End the process and all that it started. Idempotent."""
        self._ending = True
        await _end(self._child, self._mark)
        await asyncio.wait([self._listener], timeout=KILL_DEADLINE_S)
        self._listener.cancel()


def _variables(profile: Profile | None, pass_env: Sequence[str]) -> dict[str, str]:
    """Ours, without what a hook has no business with."""
    chosen = kept(os.environ, pass_env) if profile else without_ours(os.environ)
    return chosen | {"PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}


async def _end(child: asyncio.subprocess.Process, mark: str) -> None:
    if child.returncode is None:
        await asyncio.to_thread(end_below, child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(KILL_DEADLINE_S):
            await child.wait()
    except TimeoutError as error:
        raise InvariantBroken(f"verifier process {child.pid} does not die of SIGKILL; look at it with ps.") from error
    await asyncio.to_thread(end_marked, mark)


async def _read(child: asyncio.subprocess.Process) -> bytes | None:
    """One frame's body; None at the end of the pipe."""
    assert child.stdout is not None
    try:
        size = int.from_bytes(await child.stdout.readexactly(4), "little")
        return await child.stdout.readexactly(size) if size <= MAX_FRAME_BYTES else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _cause(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
