"""Where this worker's version stands among its peers' (pure), and whether a sample may go on here.

Always true: the first token of a sample is made by its task's step or a later one, and the versions of its tokens never fall.
Steps fall when the trainer goes back to a checkpoint. Versions of that lost future begin nothing any more, and a task that
was issued for one of its steps begins under the newest version there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from bus.messages.active import Activate, PolicyActive
from bus.messages.policy import Restored
from bus.messages.versions import PolicyVersion

Verdict = Literal["begin", "wait", "leave"]
NO_TOKENS = -1  # version of the last token of a sample that has none


class Standing:
    """Folded from active and policy. `ordered`: what this worker was told last to serve."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._active: PolicyVersion | None = None
        self._serving: Mapping[str, int] = {}
        self._restored: list[PolicyVersion] = []  # ids rise, steps rise: an earlier one that says less is left out
        self.ordered: PolicyVersion | None = None

    def fold(self, message: object) -> None:
        """Take in one message; others change nothing. An older word about who serves what comes too late."""
        match message:
            case PolicyActive() if not self._lost(message.version):
                if self._active is None or message.version.id >= self._active.id:
                    self._active, self._serving = message.version, message.serving
            case Restored():
                self._restored = [r for r in self._restored if r.step < message.step] + [message.version]
                if self._active is not None and self._lost(self._active):
                    self._active = None
            case Activate() if not message.workers or self._me in message.workers:
                self.ordered = message.version

    def _lost(self, version: PolicyVersion) -> bool:
        """Whether it belongs to a future that a restored trainer does not have."""
        return any(version.id < r.id and version.step > r.step for r in self._restored)

    def unheard(self, step: int) -> bool:
        """Whether a task of this step may have been issued for a version that is active, which was not heard here."""
        return self._active is None or self._active.step < step

    def least_step(self, step: int) -> int:
        """The step at which a task of `step` may begin. Nothing newer than what is active was ever active, but for a lost
        future."""
        return step if self._active is None else min(step, self._active.step)

    def behind(self, serving: PolicyVersion | None) -> bool:
        """Whether fresh prompts are for others now: a newer version is active, or ours belongs to a lost future."""
        if serving is None or self._lost(serving):
            return True
        return self._active is not None and serving.step < self._active.step

    def peers_have(self, version: int | None = None) -> bool:
        """Whether a peer serves this version, or a later one; None: the newest that is active."""
        wanted = version if version is not None else self._active.id if self._active is not None else None
        if wanted is None:
            return False
        newest = self._active.id if self._active is not None else wanted
        lost = range(newest + 1, self._restored[-1].id if self._restored else 0)  # else these would be the newest active
        return any(v >= wanted and v not in lost for name, v in self._serving.items() if name != self._me)

    def peer_serves(self, version: int) -> bool:
        """Whether a peer serves just this version."""
        return any(v == version for name, v in self._serving.items() if name != self._me)

    def verdict(self, serving: PolicyVersion | None, *, step: int, last: int = NO_TOKENS) -> Verdict:
        """What to do with a sample of a task of `step` whose last token `last` made: wait for what is ordered already, or if
        nobody else could take it; leave it to a peer otherwise."""
        if serving is not None and self._serves(serving, step, last):
            return "begin"
        ordered = self.ordered
        if ordered is not None and (serving is None or ordered.id > serving.id) and self._serves(ordered, step, last):
            return "wait"
        return "leave" if self.peers_have(None if last == NO_TOKENS else last) else "wait"

    def _serves(self, version: PolicyVersion, step: int, last: int) -> bool:
        if last != NO_TOKENS:
            return version.id >= last
        return not self._lost(version) and version.step >= self.least_step(step)
