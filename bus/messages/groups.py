"""What the filter decided about a prompt group, and which groups of a run are open.

A group leaves the filter whole, or in parts: on its last turn within the staleness bound its finished members go on as one
part, and each late member follows as a part of its own. A sample is in exactly one part.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bus.messages.base import Header, Message
from bus.messages.policy import SampleTrained
from bus.messages.samples import Scored

MOST_LIVES = 32  # told of a dropped group


class GroupKept(Message, frozen=True, kw_only=True, tag="group.kept"):
    """A group worth training, or a part of one. filter -> trainer. Samples are in index order.

    `known`: rewards that the baseline of each member here is taken over: of the members that left first, and for a late one its
    own. Empty for a whole group, whose own samples are all there is to know.
    """

    group_id: str
    prompt_id: str
    samples: tuple[Scored, ...]
    knob_epoch: int = 0
    part: str = ""  # its key among the open groups; empty = the group is whole
    known: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """Names this part: the group's id, or `part_key` of its members."""
        return self.part or self.group_id

    def header(self) -> Header:
        spans = [s for scored in self.samples for s in scored.rollout.made]
        return Header(
            id=self.key,
            group=self.group_id,
            version=min((s.version for s in spans), default=-1),
            tokens=sum(s.n for s in spans),
            knob=self.knob_epoch,
            note=f"samples={len(self.samples)}",
            asides=" ".join(filter(None, (scored.rollout.header().asides for scored in self.samples))),
        )


class Turned(Message, frozen=True, kw_only=True, tag="group.turned"):
    """Everything that must be trained now or lose tokens lies before this entry. filter -> trainer, once for each version
    of the trainer: the filter has heard of version `version` and released what is on its last turn at step `step`."""

    step: int
    version: int

    def header(self) -> Header:
        return Header(version=self.version, note=f"turned={self.step}")


class GroupVerdict(Message, frozen=True, kw_only=True, tag="group.verdict"):
    """News of one judged group or part, without its data. filter -> sampler, recorder, console. `reason` is empty for a kept
    one; `members` are the indexes it is about, empty = all of the group. `lives`: what the scored samples of a dropped one went
    through, MOST_LIVES of them."""

    group_id: str
    prompt_id: str
    kept: bool
    reason: str = ""
    n_samples: int = 0
    tokens: int = 0
    mean_reward: float = 0.0
    members: tuple[int, ...] = ()
    lives: tuple[SampleTrained, ...] | msgspec.UnsetType = msgspec.UNSET

    def header(self) -> Header:
        note = "kept" if self.kept else f"dropped: {self.reason}"
        return Header(id=self.group_id, group=self.group_id, tokens=self.tokens, note=note)


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one group that are issued and not yet closed, with what is needed to issue them again. Lies in the run's
    open hash, under the group's id, and for each part that left the filter under the part's key.

    `source_index` is the row of the data set, `epoch` the pass over it, `step` the step of the version that was served at
    issue: no token of the group is older.
    """

    group_id: str
    prompt_id: str
    n_samples: int
    attempt: int = 0
    step: int = 0
    source_index: int = 0
    epoch: int = 0
    members: tuple[int, ...] | None = None  # indexes of the samples under this key; None = all of the group
    rewards: dict[int, float] = {}  # by index: members of the group that left first, for the baseline of the others
    blobs: tuple[str, ...] = ()  # of the pictures of its prompt
    prompt_crc: int = 0  # of its prompt's text and label, since rows of a file may move

    @property
    def indexes(self) -> tuple[int, ...]:
        """Indexes of the samples under this key."""
        return tuple(range(self.n_samples)) if self.members is None else self.members

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(f"{self.group_id}/{index}" for index in self.indexes)


def part_key(group_id: str, members: Iterable[int]) -> str:
    """Key of a part. A sample leaves the filter once, so the first member's index tells parts of a group apart."""
    return f"{group_id}+{min(members)}"


def index_of(sample_id: str) -> int:
    """Index of a sample within its group, from `<group_id>/<index>`; -1 when there is none."""
    text = sample_id.rpartition("/")[2]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1  # a name may come from anywhere
