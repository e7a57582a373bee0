"""Siblings collected so far (pure): a table that is rebuilt from the filter's own pending entries at every start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actors.filter.judges import Member
from bus.messages.samples import RolloutLost, Scored
from bus.streams.entry import Entry


@dataclass(slots=True)
class Half:
    """A group under assembly: one entry and one member per sample id."""

    n_samples: int = 0  # 0 while unknown
    entries: dict[str, Entry] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return 0 < self.n_samples <= len(self.members)


class GroupTable:
    """Groups by id. A sample counts once: a second result for a sample id already here is a duplicate."""

    def __init__(self) -> None:
        self._groups: dict[str, Half] = {}

    def add(self, entry: Entry, member: Member) -> Literal["held", "complete", "duplicate"]:
        """Take one member in."""
        if isinstance(member, Scored):
            task = member.rollout.task
            group_id, sample_id, n_samples = task.group_id, task.sample_id, task.n_samples
        else:
            group_id, sample_id, n_samples = member.group_id, member.sample_id, member.n_samples
        half = self._groups.setdefault(group_id, Half())
        if sample_id in half.members:
            if half.entries[sample_id].id == entry.id:
                half.entries[sample_id] = entry  # the same entry, delivered again
                return "complete" if half.complete else "held"
            return "duplicate"
        half.n_samples = max(half.n_samples, n_samples)
        half.entries[sample_id] = entry
        half.members[sample_id] = member
        return "complete" if half.complete else "held"

    def take(self, group_id: str) -> tuple[list[Entry], list[Member]]:
        """Remove a group: its entries, and its members in index order."""
        half = self._groups.pop(group_id)
        order = sorted(half.members, key=lambda sample_id: int(sample_id.rpartition("/")[2]))
        return [half.entries[s] for s in order], [half.members[s] for s in order]

    def forget(self, entry_ids: set[str]) -> None:
        """Entries that somebody else finished."""
        for group_id, half in list(self._groups.items()):
            for sample_id in [s for s, e in half.entries.items() if e.id in entry_ids]:
                del half.entries[sample_id], half.members[sample_id]
            if not half.members:
                del self._groups[group_id]

    def clear(self) -> None:
        """Forget everything; the entries are pending and will be read again."""
        self._groups.clear()

    def __len__(self) -> int:
        return len(self._groups)

    def waiting(self) -> list[tuple[str, int, int]]:
        """(group, members here, members wanted) of every incomplete group."""
        return [(g, len(h.members), h.n_samples) for g, h in self._groups.items()]


def tokens_of(member: Member) -> int:
    """Generated tokens that a member stands for."""
    return member.tokens_made if isinstance(member, RolloutLost) else member.rollout.response.n_tokens


__all__ = ("GroupTable", "tokens_of")
