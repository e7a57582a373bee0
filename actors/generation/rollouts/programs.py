"""The rollout program of a run: found by its path, run in its time, its failures named with file and line.

A program that raises or does not end costs its sample further attempts, which go on from what the journal holds, then a dead
letter. One that fails for every sample costs none: they wait, and the run ends with its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actors.generation.rollouts import Program, Trajectory, single
from actors.generation.rollouts.adapters import program_of
from actors.generation.rollouts.live import Live
from actors.generation.rollouts.outcome import Outcome
from actors.generation.sample import Running
from actors.generation.turns import Leaves
from actors.runtime.consume import STOPS
from actors.runtime.context import Context
from actors.runtime.miles import Decode
from actors.runtime.refusals import Streak
from actors.runtime.retry import NotItsFault
from actors.runtime.whole import said
from bus.errors import Poison, Transient

MOST_FAILED, GROUPS_FAILED = 16, 4  # samples in a row, and groups among them; then it is not the samples
SPARED_S = 60.0  # those that fail in a row and are fewer: at the end of a batch only they are left
MOST_TRIES = 4  # of one sample


class ProgramFailed(Transient):
    """A rollout program raised, or did not end in time; another attempt may do."""


class LeftOut(Exception):
    """A rollout function gave up the group of this sample: it neither returned it nor put it back."""


class Programs:
    """One worker's: `program`, else the one at the dotted path `path`, else the single turn. `extra`: the user's own values for
    Miles' `args`. Raises Refused when it cannot be loaded."""

    def __init__(
        self,
        context: Context,
        path: str,
        deadline_s: float,
        extra: Mapping[str, Any],
        decode: Decode,
        program: Program | None = None,
    ) -> None:
        self._context = context
        self._name = str(program or path or "single turn")
        self._program: Program = program or single.rollout
        if path and program is None:
            self._program = program_of(path, lambda: {**context.knobs.values, **extra}, decode)
        self._deadline_s = deadline_s if (path or program) and not getattr(program, "has_deadline", False) else None
        self.resumable = bool(getattr(self._program, "resumable", True))
        remedy = "Mend the program, or what it talks to."
        self._failing = Streak(context.clock.monotonic, self._name, remedy, most=MOST_FAILED, of=GROUPS_FAILED, spares_s=SPARED_S)

    async def play(self, live: Live, attempt: int, settle: Callable[[list[Trajectory]], Outcome]) -> Outcome | Leaves:
        """One run, the `attempt`-th, and what `settle` makes of its trajectories. Raises Transient while attempts are left for what
        the program raises, then Poison, at once for what it returns and cannot be; LeftOut."""
        try:
            found = await live.play(self._program, self._deadline_s)
            ended = found if isinstance(found, str) else settle(found)
        except (*STOPS, ProgramFailed, LeftOut):
            raise
        except Poison as error:
            if self._program is not single.rollout:
                self._failed(live, str(error), error)
            raise
        except Exception as error:  # whatever a program of the user's raises
            if self._program is single.rollout:
                raise
            text = f"{self._name} on {live.task.sample_id} {said(error, self._deadline_s)}"
            self._context.count("programs_failed")
            self._failed(live, text, error)
            if attempt >= MOST_TRIES:
                raise Poison(f"attempt {attempt} was the last: {text}") from error
            raise ProgramFailed(text) from error
        self._failing.worked()
        return ended

    def _failed(self, live: Live, text: str, error: Exception) -> None:
        """Raises RunEnds when it fails for all, before that NotItsFault."""
        self._failing.failed(live.task.group_id, text, live.task.sample_id)
        if self._failing.for_all:
            raise NotItsFault(text) from error

    def restarted(self, running: Running, why: str) -> Running:
        """The same sample from its start; counted."""
        self._context.count("episodes_restarted")
        self._context.log.warning("%s of %s begins again: %s", self._name, running.task.sample_id, why)
        return running.again()
