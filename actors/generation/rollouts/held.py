"""Groups of samples that a rollout function holds, and whose a call of the engine is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.generation.rollouts import Segment, Task, Trajectory
from actors.generation.rollouts.adapters import AnsweredCall
from actors.generation.rollouts.live import Live
from actors.runtime.miles import MilesSample


class HeldSample:
    """A sample that is here. `filled`: what the function had made of it when it gave it back."""

    def __init__(self, task: Task, session: Live, group: HeldGroup) -> None:
        self.task, self.session, self.group = task, session, group
        self.done: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self.turns: list[AnsweredCall] = []
        self.calls: set[asyncio.Future[Segment]] = set()
        self.filled: dict[str, Any] = {}

    def shown(self) -> dict[str, Any]:
        sample = MilesSample.of(self.task, self.task.prompt, group_index=self.group.key, session_id=self.task.sample_id)
        return vars(sample) | {"status": "pending"} | self.filled

    def own(self, found: AnsweredCall) -> Segment:
        """A turn that was found in this sample."""
        found.owner.turns = [one for one in found.owner.turns if one is not found]
        return found.turn if found.owner is self else self.session.adopt(found.turn, found.owner.session)


class HeldGroup:
    """Samples of a prompt. `key`: what the function calls it."""

    def __init__(self, key: str) -> None:
        self.key, self.taken = key, False
        self.seats: dict[int, HeldSample] = {}

    @property
    def in_order(self) -> list[HeldSample]:
        return [self.seats[index] for index in sorted(self.seats)]

    @property
    def whole(self) -> bool:
        return len(self.seats) == next(iter(self.seats.values())).task.n_samples


def seat_of(ids: list[int], rid: str, held: Sequence[HeldSample]) -> HeldSample | None:
    """Whose call these tokens are: the sample that is named, else the one whose turns they go on from furthest, else of those with
    this prompt one that has asked least."""
    if named := [seat for seat in held if seat.task.sample_id == rid]:
        return named[0]

    def known(seat: HeldSample) -> int:
        histories = (one.asked + one.turn.tokens for one in seat.turns)
        return max((len(h) for h in histories if ids[: len(h)] == h), default=0)

    begins = [seat for seat in held if ids[: len(seat.task.prompt)] == seat.task.prompt]
    return max(begins, key=lambda seat: (known(seat), -len(seat.calls) - len(seat.turns)), default=None)
