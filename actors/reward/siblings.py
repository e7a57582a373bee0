"""Samples of prompts that are scored together: a table of the room's own pending entries, whose group is not whole yet (pure)."""

from __future__ import annotations

from collections import deque

from bus import Entry
from bus.messages.groups import index_of
from bus.messages.samples import RolloutDone

REMEMBERED = 4096
"""Groups with a lost member that are known as such. Only until what follows from it is on the bus; after that the bus tells."""


class Siblings:
    """Rollouts by group and index, and how often their scoring failed."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, tuple[Entry, RolloutDone]]] = {}
        self._failures: dict[str, int] = {}
        self._lost: deque[str] = deque(maxlen=REMEMBERED)

    def clear(self) -> None:
        """Forget everything; the entries are pending and will be read again."""
        self._groups.clear()

    def __len__(self) -> int:
        """Groups of which some sample is here."""
        return len(self._groups)

    def knows(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, entry: Entry, rollout: RolloutDone) -> list[tuple[Entry, RolloutDone]]:
        """All of its group in index order when it is whole with this one; else nothing. A second result of a sample takes the
        place of the first, whose entry is no more or is the same."""
        here = self._groups.setdefault(rollout.task.group_id, {})
        here[index_of(rollout.task.sample_id)] = (entry, rollout)
        return [here[i] for i in sorted(here)] if len(here) >= rollout.task.n_samples else []

    def failed(self, group_id: str) -> int:
        """One more failure of this group; returns how many."""
        self._failures[group_id] = self._failures.get(group_id, 0) + 1
        return self._failures[group_id]

    def lose(self, group_id: str) -> list[tuple[Entry, RolloutDone]]:
        """What is here of a group that lost a member. Whoever of it comes later is not to wait."""
        if group_id not in self._lost:
            self._lost.append(group_id)
        return self.take(group_id)

    def is_lost(self, group_id: str) -> bool:
        """Whether a member of this group was lost a short time ago."""
        return group_id in self._lost

    def take(self, group_id: str) -> list[tuple[Entry, RolloutDone]]:
        """What is here of a group, which is forgotten."""
        self._failures.pop(group_id, None)
        here = self._groups.pop(group_id, {})
        return [here[i] for i in sorted(here)]
