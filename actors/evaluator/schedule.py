"""When to evaluate, and what a finished evaluation says (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bus.messages.samples import RolloutLost, Scored


class Issued(msgspec.Struct, frozen=True):
    """Durable state: the evaluation issued last, and how many of its samples are on the bus."""

    step: int = -1
    version: int = 0
    offset: int = 0

    def text(self) -> str:
        """Form in the run's state."""
        return f"{self.step}:{self.version}:{self.offset}"

    @staticmethod
    def parse(text: str) -> Issued:
        """Inverse; the empty text = nothing issued yet."""
        return Issued(*map(int, text.split(":"))) if text else Issued()


def due(*, active_step: int, last_step: int, interval: int, before_train: bool, final: bool) -> bool:
    """Whether the version that is active now should be evaluated. The last one always is."""
    if active_step <= last_step:
        return False
    if final:
        return True
    if active_step == 0:
        return before_train
    return interval > 0 and active_step // interval > max(last_step, 0) // interval


def summarize(name: str, members: Sequence[Scored | RolloutLost]) -> dict[str, float]:
    """Metrics of one data set: mean reward, share truncated, share lost, mean length. Lost samples count as reward 0."""
    scored = [m for m in members if isinstance(m, Scored)]
    n = max(1, len(members))
    lengths = [s.rollout.response.n_tokens for s in scored]
    return {
        f"eval/{name}": sum(s.reward for s in scored) / n,
        f"eval/{name}-truncated_ratio": sum(s.rollout.finish == "length" for s in scored) / n,
        f"eval/{name}-lost_ratio": (len(members) - len(scored)) / n,
        f"eval/{name}/response_len/mean": sum(lengths) / max(1, len(lengths)),
    }


__all__ = ("Issued", "due", "summarize")
