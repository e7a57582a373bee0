"""Siblings collected so far (pure): a table that is rebuilt from the filter's own pending entries and the open groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from actors.filter.judges import Member, usable
from bus.messages.groups import OpenGroup, index_of
from bus.messages.samples import RolloutLost, Scored
from bus.messages.versions import staleness
from bus.streams.entry import Entry


@dataclass(slots=True)
class Half:
    """A group under assembly: one entry and one member per index. `wanted`: indexes that have not left; `left`: rewards of
    those that left first, by index, for late members to be compared with; a group that has any is said to be split."""

    group_id: str
    opened: OpenGroup
    n_samples: int
    wanted: set[int]
    left: dict[int, float] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every member that has not left is here."""
        return bool(self.members) and self.wanted <= self.members.keys()

    @property
    def split(self) -> bool:
        return bool(self.left)

    @property
    def known(self) -> dict[int, float]:
        """Rewards by index that members here are compared with, their own included: before the split of all that are here, after
        it of `left`. What is no usable number is left out."""
        here = {i: m.reward for i, m in self.members.items() if isinstance(m, Scored)}
        return {i: reward for i, reward in sorted((self.left | here).items()) if usable(reward)}

    def basis(self, tipped_by: int | None = None) -> dict[int, float]:
        """The same for members still under way, when those here leave: rewards that do not depend on how long the late member
        itself takes, or the gradient would have a bias by length. So no sibling counts that leaves after the first part, nor
        the one that tipped the count of a first part: had the late member been early, that one would have come too late."""
        if self.split:
            return {i: reward for i, reward in self.left.items() if usable(reward)}
        known = self.known
        return {i: reward for i, reward in known.items() if i != tipped_by} or known

    @property
    def lost(self) -> bool:
        """Whether a member here will never finish."""
        return any(isinstance(m, RolloutLost) for m in self.members.values())

    def age(self, step: int) -> int:
        """Staleness at `step` of the oldest token here, 0 without tokens."""
        made = [s.step for m in self.members.values() if isinstance(m, Scored) for s in m.rollout.made]
        return max(staleness(step, min(made)), staleness(step, max(made))) if made else 0


def leaves_now(half: Half, *, policy: str, step: int, bound: int) -> bool:
    """Whether the members here go on now, without those still generating.

    Late members of a split group follow at once. `split`: two members at least, whose oldest token would be over the bound
    in the next step. `member`: as soon as half of the group is here. A group with a lost member stays, to be dropped whole.
    """
    if half.complete:
        return True
    if half.split:
        return bool(half.members)
    return not half.lost and len(half.members) >= _least(half, policy=policy, step=step, bound=bound)


def tips(half: Half, *, policy: str, step: int, bound: int) -> bool:
    """Whether a first part that leaves now has as many members as it must: its last one to come let it go."""
    return len(half.members) == _least(half, policy=policy, step=step, bound=bound)


def _least(half: Half, *, policy: str, step: int, bound: int) -> int:
    """Members that a first part must have; one more than are here, so never reached, where only the whole group may leave."""
    if policy in ("split", "member") and half.age(step) >= bound:
        return 2
    return max(2, -(-half.n_samples // 2)) if policy == "member" else len(half.members) + 1


class GroupTable:
    """Groups by id. A sample counts once: a second result for an index already here, or that has left, is a duplicate."""

    def __init__(self) -> None:
        self._groups: dict[str, Half] = {}

    def knows(self, group_id: str) -> bool:
        return group_id in self._groups

    def begin(self, group_id: str, opened: OpenGroup) -> None:
        """A group whose first member arrives, as the run lists it."""
        half = self._groups[group_id] = Half(group_id, opened, opened.n_samples, set(opened.indexes))
        half.left = {i: reward for i, reward in opened.rewards.items() if i not in half.wanted}

    def add(self, entry: Entry, member: Member) -> Literal["held", "duplicate"]:
        """Take one member of a group that has begun."""
        half, index = self._groups[member.group_id], index_of(member.sample_id)
        if index in half.members and half.entries[index].id == entry.id:
            half.entries[index] = entry  # the same entry, delivered again
            return "held"
        if index in half.members or index not in half.wanted:
            return "duplicate"
        half.entries[index], half.members[index] = entry, member
        return "held"

    def get(self, group_id: str) -> Half:
        return self._groups[group_id]

    def release(self, half: Half, indexes: Iterable[int], basis: dict[int, float]) -> None:
        """These members have left, with the commit done; the others will be compared with `basis`."""
        half.left = basis
        for index in list(indexes):
            del half.members[index], half.entries[index]
            half.wanted.discard(index)
        if not half.wanted:
            self._groups.pop(half.group_id, None)

    def bury(self, entry: Entry, message: Member | None) -> None:
        """This entry is a dead letter: its sample comes again as lost, and is no duplicate then."""
        if message is None:
            return
        half, index = self._groups.get(message.group_id), index_of(message.sample_id)
        if half is not None and index in half.entries and half.entries[index].id == entry.id:
            self.give_back(half, (index,))

    def give_back(self, half: Half, indexes: Iterable[int]) -> None:
        """These members will come again."""
        for index in indexes:
            del half.members[index], half.entries[index]

    def forget(self, group_id: str) -> None:
        """Begin anew with this group when its next member arrives."""
        self._groups.pop(group_id, None)

    def clear(self) -> None:
        """Forget everything; the entries are pending and will be read again."""
        self._groups.clear()

    def __len__(self) -> int:
        """Groups of which some member is here."""
        return sum(1 for half in self._groups.values() if half.members)

    @property
    def n_samples(self) -> int:
        """Members here."""
        return sum(len(half.members) for half in self._groups.values())

    def halves(self) -> list[Half]:
        """All groups under assembly, by id."""
        return [self._groups[g] for g in sorted(self._groups)]


def tokens_of(member: Member) -> int:
    """Generated tokens that a member stands for."""
    return member.tokens_made if isinstance(member, RolloutLost) else member.rollout.n_made
