"""Who is to blame for a scoring that failed: the answer, if the same sample with a harmless one is scored; else all but the answer.

Always true: this is told by trying, never by counting, so that nothing that a model writes passes for a scorer that is broken, and
no broken scorer passes for a bad answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import msgspec

from actors.reward.sample import Sample
from bus.errors import Poison, Transient

PLAIN = "I do not know."
Told = Callable[[str, str], Awaitable[None]]
"""Counts an answer's own failure under its kind, and says it once."""


async def untold(kind: str, text: str) -> None:
    """Where nobody listens."""


def harmless(sample: Sample, answer: str = "") -> Sample:
    """The same with an answer that asks nothing special of its scorer: `answer`, else its label, else a plain sentence."""
    return msgspec.structs.replace(sample, response=answer or sample.label or PLAIN, finish="stop", n_tokens=1)


class Probe:
    """Trials with a harmless answer, one at a time. `now`: seconds that never fall."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._turn = asyncio.Lock()
        self._failed = -math.inf  # when the last trial that failed began

    async def blames_the_answer(self, trial: Callable[[], Awaitable[object]]) -> bool:
        """Whether `trial`, what has just failed but with a harmless answer, works. One that failed and began after this was asked
        speaks for all who wait: where a service is away each would wait for it again."""
        asked = self._now()
        async with self._turn:
            if self._failed >= asked:
                return False
            began = self._now()
            try:
                await trial()
            except (Transient, Poison):
                self._failed = began
                return False
            return True
