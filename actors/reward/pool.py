"""A pool of verifier processes: custom reward functions run here, where they may hang, crash or leak, and are killed for it.

Owns its processes, ended with the pool. Always true: a sample's deadline runs from the moment a process has it, so that a
queue never costs a sample its time; and a sample is blamed only for a failure that is certainly its own. A sample that lost
its process to a neighbour is scored again in a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from actors.reward.process import Bystander, NoBoot, VerifierProcess
from actors.reward.sample import Sample, SampleGroup, ScorerFailed, Value
from actors.runtime.confine import Profile
from actors.runtime.leftovers import end_orphans
from actors.runtime.run import Refused
from bus.errors import InvariantBroken


class NoVerifier(ScorerFailed):
    """There was no process to score the sample in."""


CONCURRENT_PER_PROCESS = 32  # questions at once to an async hook; a sync hook gets one
BOOTS_BEFORE_STOP = 3


class _Seat:
    """Where one process after another sits."""

    def __init__(self) -> None:
        self.process: VerifierProcess | None = None
        self.booting = asyncio.Lock()
        self.load = 0

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    async def clear(self) -> None:
        if self.process is not None:
            await self.process.kill()


class VerifierPool:
    """`n_workers` processes with the hook `path`, which `setting` names. Use as `async with`; entering boots one and refuses a hook
    that does not load. The others start when there is work for them; the first too unless `eager`, for a hook that is not async.
    `profile`: limits of each process."""

    default_key = ""

    def __init__(
        self,
        path: str,
        *,
        n_workers: int,
        boot_deadline_s: float,
        name: str = "custom",
        setting: str = "custom_rm_path",
        eager: bool = True,
        profile: Profile | None = None,
        pass_env: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._path = path
        self._setting = setting
        self._eager = eager
        self._how: dict[str, Any] = {"deadline_s": boot_deadline_s, "profile": profile, "pass_env": pass_env}
        self._tasks = asyncio.TaskGroup()
        self._seats = [_Seat() for _ in range(max(1, n_workers))]
        self._slots = asyncio.Semaphore(1)
        self._alone = asyncio.Semaphore(len(self._seats))
        self._failed_boots = 0
        self.capacity = 1

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(end_orphans)
        await self._tasks.__aenter__()
        if not self._eager:
            self._slots = asyncio.Semaphore(len(self._seats))
            return self
        try:
            first = await VerifierProcess.boot(self._path, self._tasks, **self._how)
        except NoBoot as error:
            await self.__aexit__()
            raise Refused(f"{self._setting} {self._path!r} does not load: {error} Correct the function or its path.") from error
        except BaseException:
            await self.__aexit__()
            raise
        self._seats[0].process = first
        self.capacity = len(self._seats) * (CONCURRENT_PER_PROCESS if first.is_async else 1)
        self._slots = asyncio.Semaphore(self.capacity)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for seat in self._seats:
            await seat.clear()
        await self._tasks.__aexit__(None, None, None)

    async def reload(self) -> None:
        """The function as its file says now: processes are ended, what is in them is scored again in fresh ones."""
        for seat in self._seats:
            async with seat.booting:
                await seat.clear()

    async def score(self, sample: Sample | SampleGroup, deadline_s: float) -> Value:
        """The hook's answer. Raises ScorerFailed (it raised or crashed) or DeadlineExceeded (it hung and was ended)."""
        async with self._slots:  # waits at most for what is running, each under its own deadline
            seat = min(self._seats, key=lambda s: (s.load, not s.alive))
            try:
                return await self._ask(seat, sample, deadline_s)
            except Bystander:
                pass
        async with self._alone:
            own = _Seat()
            try:
                return await self._ask(own, sample, deadline_s)
            except Bystander as error:
                raise NoVerifier(f"{self._path}: the process that {sample.sample_id} had for itself is gone") from error
            finally:
                await own.clear()

    async def _ask(self, seat: _Seat, sample: Sample | SampleGroup, deadline_s: float) -> Value:
        seat.load += 1
        try:
            async with seat.booting:
                if seat.process is None or not seat.alive:
                    await seat.clear()
                    seat.process = await self._boot()
            answer = await seat.process.ask(sample, deadline_s)
        finally:
            seat.load -= 1
        if answer.error:
            failure = ScorerFailed(f"{self._path} on {sample.sample_id} raised {answer.error}")
            failure.add_note(answer.trace)
            raise failure
        return answer.value

    async def _boot(self) -> VerifierProcess:
        try:
            process = await VerifierProcess.boot(self._path, self._tasks, **self._how)
        except NoBoot as error:
            self._failed_boots += 1
            text = f"verifier process of {self._path} does not start: {error}"
            if self._failed_boots >= BOOTS_BEFORE_STOP:
                raise InvariantBroken(
                    f"{text}, {self._failed_boots} times in a row. Mend that function: samples stay pending, the same command "
                    "resumes."
                ) from error
            raise NoVerifier(text) from error
        self._failed_boots = 0
        return process
