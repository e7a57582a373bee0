"""What is compared: the samples of one group that left the filter together, with what the run made of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from actors.filter.judges import Member
from actors.reward.sample import Sample
from actors.runtime.seeds import seed_for

WHOLE = 1 << 63
NICE = 15  # of what a shadow computes: below all of a run, which has at most 10. Reading stays prompt


class ShadowUnit(msgspec.Struct, frozen=True, kw_only=True):
    """`members`: as the filter saw them, lost ones too. From texts alone there are none, but `samples` with the run's `rewards`.
    `kept`, `reason`: the run's verdict. `part`: it is not the whole group."""

    group: str
    members: tuple[Member, ...] = ()
    samples: tuple[Sample, ...] = ()
    rewards: tuple[float, ...] = ()
    kept: bool = True
    reason: str = ""
    part: bool = False


class UnitSource(Protocol):
    """Where units come from. `missed`: groups that were not given out, by reason; `left_out`: samples, by reason."""

    missed: Counter[str]
    left_out: Counter[str]
    told: str  # where from, for people

    def units(self) -> AsyncGenerator[Any]:
        """What is compared, each once: a Unit; of losses a RecordedBatch."""
        ...


def step_back() -> None:
    """Lower this thread, and those that it starts, to NICE."""
    os.nice(max(0, NICE - os.nice(0)))


def chosen(group: str, share: float) -> bool:
    """Whether a group is in the share. By its id alone, so that all shadows of one share look at the same groups."""
    return share >= 1.0 or seed_for(0, "shadow", group) < share * WHOLE
