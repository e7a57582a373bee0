"""What the filter decided about a whole prompt group."""

from __future__ import annotations

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


class GroupDropped(Message, frozen=True, kw_only=True, tag="group.dropped"):
    """A group that will not be trained, and why. filter -> sampler, which may start another prompt."""

    group_id: str
    prompt_id: str
    reason: str
    n_samples: int
    tokens: int = 0
    mean_reward: float = 0.0

    def header(self) -> Header:
        return Header(id=self.group_id, group=self.group_id, tokens=self.tokens, note=self.reason)


__all__ = ("GroupDropped", "GroupKept")
