"""Which groups are open, and how far they got (pure): folded from what the other rooms say."""

from __future__ import annotations

from typing import Any, Literal

from bus.messages.groups import GroupVerdict
from bus.messages.policy import Checkpointed, Finished, GroupsGivenUp, PolicyActive, Restored, StepDone

Stage = Literal["generating", "kept"]


class Progress:
    """Open groups by stage. Groups enter by `issued` only and leave by messages only, so a late message errs on the side
    of fewer slots, never of more."""

    def __init__(self) -> None:
        self.step = 0  # updates inside the newest weights
        self.active_step = -1  # step of the newest version that an engine serves; -1 = none
        self.finished = False
        self.drops_in_a_row = 0
        self._stage: dict[str, Stage] = {}
        self._trained: dict[str, int] = {}  # group -> step of the version that holds it

    def issued(self, group_id: str, *, kept: bool = False) -> None:
        """A group that is open now."""
        self._stage[group_id] = "kept" if kept else "generating"

    def fold(self, message: Any) -> None:
        """Take in one message of verdicts, policy or active; others change nothing."""
        match message:
            case GroupVerdict(kept=True):
                self.drops_in_a_row = 0
                if message.group_id in self._stage:
                    self._stage[message.group_id] = "kept"
            case GroupVerdict():
                self.drops_in_a_row += 1
                self._stage.pop(message.group_id, None)
            case StepDone():
                self.step = message.step
                for group_id in message.groups:
                    self._trained[group_id] = message.step
                for group_id, _ in message.dropped:
                    self._stage.pop(group_id, None)
            case GroupsGivenUp():
                for group_id, _ in message.groups:
                    self._stage.pop(group_id, None)
            case Restored():
                # Steps after the checkpoint are a lost future: their groups are open again and will be trained again.
                self.step = message.step
                self.finished = False  # a finished run that was given more steps
                self.active_step = min(self.active_step, message.step)
                self._trained = {g: s for g, s in self._trained.items() if s <= message.step}
                self._trained |= dict.fromkeys(message.groups, message.step)
            case Checkpointed():
                for group_id in [g for g, s in self._trained.items() if s <= min(message.step, self.active_step)]:
                    del self._trained[group_id]
                    self._stage.pop(group_id, None)
            case PolicyActive():
                self.active_step = message.version.step
            case Finished():
                self.finished = True

    def untrained(self) -> set[str]:
        """Groups that hold a slot and that no step has trained, as far as is known here."""
        return {g for g in self._stage if g not in self._trained}

    def close(self, group_id: str) -> None:
        """Forget a group that the run's registry no longer lists."""
        self._stage.pop(group_id, None)

    @property
    def open_groups(self) -> int:
        """Groups that hold a slot."""
        return sum(1 for g in self._stage if self._trained.get(g, self.active_step + 1) > self.active_step)

    @property
    def in_generation(self) -> int:
        """Groups not yet judged."""
        return sum(1 for g, stage in self._stage.items() if stage == "generating" and g not in self._trained)

    def trained_step(self, group_id: str) -> int | None:
        """Step that trained a group, if any did."""
        return self._trained.get(group_id)


__all__ = ("Progress",)
