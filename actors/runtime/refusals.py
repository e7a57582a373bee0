"""What an actor met and could not use: counted, said once, and after so many in a row the end of the run.

Nobody else does these three. `ActorRefusals` is one per actor (`context.refusals`): each kind of refusal has a counter
`refused/<what>` and one event, with a further one when there are a hundred times as many. `Streak` watches one thing that
everything here must pass (a hook, a scorer, an engine): when it fails for all, no entry is to blame, and going on would only
burn prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable

from bus.errors import MilesAsyncError
from bus.messages.events import EventKind

MOST_KINDS = 64  # told apart; a flood of ever new texts is one kind more
REMEMBERED = 10_000  # samples that failed before something worked
Tell = Callable[[EventKind, str], Awaitable[None]]


class Refused(MilesAsyncError):
    """This actor cannot start with what it was given; a restart would not help."""


class RunEnds(MilesAsyncError):
    """What this actor met at work would meet it again after a restart: the run ends with this text, its entries pending."""


class ActorRefusals:
    """One actor's. `count` and `tell` are those of its context."""

    def __init__(self, count: Callable[[str], None], tell: Tell) -> None:
        self._count = count
        self._tell = tell
        self._met: dict[tuple[str, str], int] = {}

    async def add(self, what: str, text: str, *, kind: EventKind = EventKind.REFUSED) -> None:
        """One more: counted under `what`, told in an event of `kind` if it is the first of its like."""
        self._count(f"refused/{what}")
        like = (what, _shape(text))
        if like not in self._met and len(self._met) >= MOST_KINDS:
            like = (what, "")
        times = self._met[like] = self._met.get(like, 0) + 1
        while times > 1 and times % 100 == 0:
            times //= 100
        if times == 1:
            so_far = f" ({self._met[like]} times so far)" if self._met[like] > 1 else ""
            await self._tell(kind, f"{what}{so_far}: {text}"[:400])


class Streak:
    """Failures in a row. The run ends after `most` of them, over `of` different groups, in no less than `patience_s`.
    `remedy`: what the operator can do, a sentence. `spares_s`: how long after the first of a row nobody is to blame."""

    def __init__(
        self, now: Callable[[], float], what: str, remedy: str, *, most: int, of: int = 1, patience_s: float = 0.0,
        spares_s: float = math.inf,
    ) -> None:  # fmt: skip
        self._now = now
        self._what = what
        self._remedy = remedy
        self._most = most
        self._of = of
        self._patience_s, self._spares_s = patience_s, spares_s
        self._began = 0.0
        self.n = 0
        self.groups: set[str] = set()
        self._samples: set[str] = set()
        self._before: set[str] = set()  # of rows that are over

    def failed(self, group: str, text: str, sample: str = "") -> None:
        """Once more, for a sample of this group. One that is named counts once, and not when it failed before it worked for others:
        at the end of a batch those that never work are left. Raises RunEnds with the text when it is enough."""
        if sample in self._before:
            return
        now = self._now()
        self._began = now if not self.n else self._began
        self.n += not sample or sample not in self._samples
        self._samples |= {sample} - {""}
        self.groups.add(group)
        if self.n >= self._most and len(self.groups) >= self._of and now - self._began >= self._patience_s:
            raise RunEnds(
                f"{self._what} failed {self.n} times in a row, for {len(self.groups)} groups, last {' '.join(text.split())[:400]}. "
                f"{self._remedy} What is not done stays pending; the same command resumes."
            )

    def worked(self) -> None:
        """It does work."""
        if self.n:
            self.n = 0
            self.groups.clear()
            if len(self._before) > REMEMBERED:
                self._before.clear()
            self._before |= self._samples
            self._samples.clear()

    def suspects(self, group: str) -> bool:
        """Whether with a failure of this group too so many fail that it may be for all."""
        return len(self.groups | {group}) >= self._of

    @property
    def for_all(self) -> bool:
        """Whether it has failed for so many groups, and worked for nobody since, that none of them is to blame."""
        return len(self.groups) >= self._of and self._now() - self._began < self._spares_s


def _shape(text: str) -> str:
    """The text without what differs between two of one kind."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{6,}|[-+]?\d[\d.e+-]*", "#", text)[:160]
