"""Is a group, or a part of one, worth training (pure)? Each judge answers with a drop reason, or None to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from actors.runtime.content import LARGEST_REWARD
from bus.errors import printable
from bus.messages.reasons import DropReason
from bus.messages.samples import RolloutLost, Scored

MOST_REASONS, REASON_CHARS = 200, 80  # told apart, for the accounts keep each for ever; and of one

Member = Scored | RolloutLost
Judge = Callable[[Sequence[Scored]], str | None]


def lost_member(members: Sequence[Member]) -> str | None:
    """A group with a sample that will never finish cannot be compared within itself."""
    for member in members:
        if isinstance(member, RolloutLost):
            return DropReason.lost(member.reason)
    return None


def usable(reward: float) -> bool:
    """Whether a reward is a number that the trainer can hold."""
    return abs(reward) <= LARGEST_REWARD


def finite_rewards(samples: Sequence[Scored]) -> str | None:
    """A reward that is no number, or too large for the trainer's, teaches nothing."""
    return None if all(usable(s.reward) for s in samples) else DropReason.REWARD_NOT_FINITE


def nonempty(samples: Sequence[Scored]) -> str | None:
    """At least one token must be trainable, of any trajectory."""
    masks = (strand.response.loss_mask for s in samples for strand in s.rollout.strands)
    return None if any(map(any, masks)) else DropReason.NOTHING_TO_TRAIN


def equal_rewards(rewards: Sequence[float]) -> str | None:
    """The reason when finite rewards have no spread. hypot does not overflow where a sum of squares would."""
    mean = math.fsum(r / len(rewards) for r in rewards)
    std = math.hypot(*(r - mean for r in rewards)) / math.sqrt(len(rewards))
    return None if std > 1e-8 else DropReason.ZERO_STD.of(f"{round(rewards[0], 1):g}")


def nonzero_std(samples: Sequence[Scored]) -> str | None:
    """Equal rewards give zero advantage to every sample (DAPO's dynamic sampling)."""
    return equal_rewards([s.reward for s in samples])


def no_truncation(samples: Sequence[Scored]) -> str | None:
    """Only groups in which every response ended by itself."""
    return None if all(s.rollout.finish == "stop" for s in samples) else DropReason.TRUNCATED


def keep_all(samples: Sequence[Scored]) -> str | None:
    """No dynamic filter."""
    return None


JUDGES: dict[str, Judge] = {
    "none": keep_all,
    "nonzero_std": nonzero_std,
    "check_reward_nonzero_std": nonzero_std,
    "no_truncation": no_truncation,
}


def kept_reason(reason: str, known: set[str]) -> str:
    """A drop reason as the accounts take it, one short line; when too many are `known`, those that are new share a name."""
    short = printable(" ".join(reason.split()))[:REASON_CHARS]
    if short not in known and len(known) >= MOST_REASONS:
        return DropReason.OTHER_REASON
    known.add(short)
    return short


def judge(members: Sequence[Member], dynamic: Judge, known: Sequence[float] = ()) -> str | None:
    """Drop reason of a whole group or of a part, or None. Lost members first: the rest presumes complete scores.

    `known`: for a part, usable rewards of all members of the group, also of those that left before it. Whether rewards have a
    spread is asked of all of them; any other judge sees the part alone, since the samples that left are no longer here.
    """
    if reason := lost_member(members):
        return reason
    samples = [m for m in members if isinstance(m, Scored)]
    if reason := finite_rewards(samples) or nonempty(samples):
        return reason
    if dynamic is nonzero_std and known:
        return equal_rewards(known)
    return dynamic(samples)
