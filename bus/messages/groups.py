"""What the filter decided about a whole prompt group."""

from __future__ import annotations

import msgspec

from bus.messages.base import Header, Message
from bus.messages.samples import Scored


class GroupKept(Message, frozen=True, kw_only=True, tag="group.kept"):
    """A complete group worth training. filter -> trainer. Samples are in index order."""

    group_id: str
    prompt_id: str
    samples: tuple[Scored, ...]
    knob_epoch: int = 0

    def header(self) -> Header:
        spans = [s for scored in self.samples for s in scored.rollout.response.spans]
        return Header(
            id=self.group_id,
            group=self.group_id,
            version=min((s.version for s in spans), default=-1),
            tokens=sum(s.rollout.response.n_tokens for s in self.samples),
            knob=self.knob_epoch,
            note=f"samples={len(self.samples)}",
        )


class GroupVerdict(Message, frozen=True, kw_only=True, tag="group.verdict"):
    """News of one judged group, without its data. filter -> sampler, console. `reason` is empty for a kept group."""

    group_id: str
    prompt_id: str
    kept: bool
    reason: str = ""
    n_samples: int = 0
    tokens: int = 0
    mean_reward: float = 0.0

    def header(self) -> Header:
        note = "kept" if self.kept else f"dropped: {self.reason}"
        return Header(id=self.group_id, group=self.group_id, tokens=self.tokens, note=note)


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group issued and not yet closed, with what is needed to issue it again. Lies in the run's open hash.

    `source_index` is the row of the data set, `epoch` the pass over it, `step` the training step at issue.
    """

    group_id: str
    prompt_id: str
    n_samples: int
    attempt: int = 0
    step: int = 0
    source_index: int = 0
    epoch: int = 0


__all__ = ("GroupKept", "GroupVerdict", "OpenGroup")
