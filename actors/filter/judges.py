"""Is a complete group worth training (pure)? Each judge answers with a drop reason, or None to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bus.messages.samples import RolloutLost, Scored

Member = Scored | RolloutLost
Judge = Callable[[Sequence[Scored]], str | None]


def lost_member(members: Sequence[Member]) -> str | None:
    """A group with a sample that will never finish cannot be compared within itself."""
    for member in members:
        if isinstance(member, RolloutLost):
            return f"lost_{member.reason}"
    return None


def finite_rewards(samples: Sequence[Scored]) -> str | None:
    """A reward that is no number teaches nothing."""
    return None if all(math.isfinite(s.reward) for s in samples) else "reward_not_finite"


def nonempty(samples: Sequence[Scored]) -> str | None:
    """At least one token must be trainable."""
    return None if any(any(s.rollout.response.loss_mask) for s in samples) else "nothing_to_train"


def nonzero_std(samples: Sequence[Scored]) -> str | None:
    """Equal rewards give zero advantage to every sample (DAPO's dynamic sampling)."""
    rewards = [s.reward for s in samples]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return None if std > 1e-8 else f"zero_std_{round(rewards[0], 1):g}"


def no_truncation(samples: Sequence[Scored]) -> str | None:
    """Only groups in which every response ended by itself."""
    return None if all(s.rollout.finish == "stop" for s in samples) else "truncated"


def keep_all(samples: Sequence[Scored]) -> str | None:
    """No dynamic filter."""
    return None


JUDGES: dict[str, Judge] = {
    "none": keep_all,
    "nonzero_std": nonzero_std,
    "check_reward_nonzero_std": nonzero_std,
    "no_truncation": no_truncation,
}


def judge(members: Sequence[Member], dynamic: Judge) -> str | None:
    """Drop reason of a complete group, or None. Lost members first: the rest presumes complete scores."""
    if reason := lost_member(members):
        return reason
    samples = [m for m in members if isinstance(m, Scored)]
    return finite_rewards(samples) or nonempty(samples) or dynamic(samples)


__all__ = ("JUDGES", "Judge", "Member", "judge", "nonzero_std")
