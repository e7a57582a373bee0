"""Which samples are open, and how far they got (pure): folded from the messages of the other rooms.

Sets of samples of one group are bit masks over their indexes, so that a message taken in twice changes nothing. What is kept
grows with the samples that are open and with the steps since the last checkpoint, not with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bus.messages.active import PolicyActive
from bus.messages.groups import GroupVerdict, OpenGroup, index_of
from bus.messages.policy import Checkpointed, Finished, GroupsGivenUp, Restored, StepDone


class SamplerProgress:
    """Open samples by stage. Samples are added by `issued` only and removed by messages only, so because of a late message
    too few are issued, never too many. `keeps`: the trainer writes checkpoints and may go back to one."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.step = 0  # updates inside the newest weights
        self.active_step = -1  # step of the newest version that is served; -1 = none
        self.slots: dict[str, int] = {}  # worker that serves a version -> samples it takes at once, 0 = as the knob says
        self.finished = False
        self.drops_in_a_row = 0  # samples
        self.last_drop = ""  # reason
        self.unjudged = 0  # samples issued and not yet judged
        self._keeps = keeps
        self._untrained: dict[str, int] = {}  # group -> mask of its open samples that no step has trained
        self._waiting: dict[str, int] = {}  # group -> mask of those not yet judged
        self._n_untrained = 0
        self._trained: dict[int, dict[str, int]] = {}  # step -> group -> mask of what was open; until a checkpoint holds it
        self._restored_at = 0  # a trainer that goes on from a checkpoint publishes its weights
        self._unserved: dict[int, int] = {}  # step -> samples in it, while its weights are not served

    def issued(self, opened: OpenGroup, *, judged: bool = False) -> None:
        """These samples are open now."""
        mask = mask_of(opened.indexes)
        self._open(opened.group_id, mask)
        if not judged:
            fresh = mask & ~self._waiting.get(opened.group_id, 0)
            self.unjudged += fresh.bit_count()
            self._waiting[opened.group_id] = self._waiting.get(opened.group_id, 0) | mask

    def fold(self, message: Any) -> None:
        """Take in one message of verdicts, policy or active; others change nothing."""
        match message:
            case GroupVerdict():
                self._verdict(message)
            case StepDone():
                self.step = message.step
                self._trained[message.step] = self._train(message.samples)
                self._unserved[message.step] = len(message.samples)
                for group_id, _ in message.dropped:
                    self.close(group_id)
                self._forget(self.active_step if not self._keeps else -1)
            case GroupsGivenUp():
                for group_id, mask in masks_of(message.samples).items():
                    self.close(group_id, mask)
                for group_id, _ in message.groups if not message.samples else ():
                    self.close(group_id)
            case Restored():
                self._restored(message)
            case Checkpointed():
                self._forget(message.step)
            case PolicyActive():
                self.active_step = message.version.step
                self.slots = {name: message.slots.get(name, 0) for name, version in message.serving.items() if version >= 0}
                for step in [s for s in self._unserved if s <= self.active_step]:
                    del self._unserved[step]
                self._forget(self.active_step if not self._keeps else -1)
            case Finished():
                self.finished = True

    def _verdict(self, verdict: GroupVerdict) -> None:
        mask = mask_of(verdict.members) if verdict.members else ~0
        self._judged(verdict.group_id, mask)
        if verdict.kept:
            self.drops_in_a_row = 0
            return
        self.drops_in_a_row += max(1, verdict.n_samples)
        self.last_drop = verdict.reason
        self.close(verdict.group_id, mask)

    def _restored(self, message: Restored) -> None:
        """Steps after the checkpoint are a lost future: their samples are open again and will be trained again."""
        self.step = self._restored_at = message.step
        self.finished = False  # a finished run that was given more steps
        self.active_step = min(self.active_step, message.step)
        for step in [s for s in self._trained if s > message.step]:
            for group_id, mask in self._trained.pop(step).items():
                self._open(group_id, mask)
            self._unserved.pop(step, None)
        inside = self._trained.setdefault(message.step, {})
        for group_id, mask in self._train(message.samples).items():
            inside[group_id] = inside.get(group_id, 0) | mask

    def _train(self, sample_ids: Iterable[str]) -> dict[str, int]:
        """Take samples out; what of them was open here, by group."""
        found: dict[str, int] = {}
        for group_id, mask in masks_of(sample_ids).items():
            self._judged(group_id, mask)
            if taken := self._take(group_id, mask):
                found[group_id] = taken
        return found

    def _open(self, group_id: str, mask: int) -> None:
        before = self._untrained.get(group_id, 0)
        self._untrained[group_id] = before | mask
        self._n_untrained += (mask & ~before).bit_count()

    def _take(self, group_id: str, mask: int) -> int:
        before = self._untrained.get(group_id, 0)
        taken, left = before & mask, before & ~mask
        self._n_untrained -= taken.bit_count()
        if left:
            self._untrained[group_id] = left
        else:
            self._untrained.pop(group_id, None)
        return taken

    def _judged(self, group_id: str, mask: int) -> None:
        before = self._waiting.get(group_id, 0)
        self.unjudged -= (before & mask).bit_count()
        if left := before & ~mask:
            self._waiting[group_id] = left
        else:
            self._waiting.pop(group_id, None)

    def _forget(self, step: int) -> None:
        """Forget what only a restore to before `step` would need: there is none any more."""
        for done in [s for s in self._trained if s <= min(step, self.active_step)]:
            del self._trained[done]

    def close(self, group_id: str, mask: int = ~0) -> None:
        """Forget samples that are closed; all of the group by default."""
        self._judged(group_id, mask)
        self._take(group_id, mask)

    def unlisted(self, listed: Mapping[str, int]) -> dict[str, int]:
        """Untrained samples by group that `listed`, the run's open samples by group, does not have."""
        gone = {group_id: mask & ~listed.get(group_id, 0) for group_id, mask in self._untrained.items()}
        return {group_id: mask for group_id, mask in gone.items() if mask}

    @property
    def untrained(self) -> int:
        """Open samples that no step has trained."""
        return self._n_untrained

    def coming(self, interval: int) -> int:
        """Samples trained in weights that are not yet served and will be without a further step. `interval`: steps from one
        published version to the next."""
        published = max(self._restored_at, self.step - self.step % interval)
        return sum(n for step, n in self._unserved.items() if self.active_step < step <= published)

    @property
    def open_samples(self) -> int:
        """Samples that hold a credit: untrained, or trained in weights that are not yet served."""
        return self._n_untrained + sum(n for step, n in self._unserved.items() if step > self.active_step)

    @property
    def size(self) -> int:
        """Number of things kept here, to watch memory grow."""
        return len(self._untrained) + len(self._waiting) + len(self._unserved) + sum(map(len, self._trained.values()))


def mask_of(indexes: Iterable[int]) -> int:
    """Bit i for index i."""
    mask = 0
    for index in indexes:
        mask |= 1 << index if index >= 0 else 0
    return mask


def masks_of(sample_ids: Iterable[str]) -> dict[str, int]:
    """Masks by group of sample ids `<group_id>/<index>`."""
    masks: dict[str, int] = {}
    for sample_id in sample_ids:
        group_id = sample_id.rpartition("/")[0]
        masks[group_id] = masks.get(group_id, 0) | mask_of((index_of(sample_id),))
    return masks
