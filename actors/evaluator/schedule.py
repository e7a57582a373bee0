"""When to evaluate, and the result of an evaluation (pure but for `is_under_way`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

import msgspec

from actors.evaluator.estimates import at_k, interval
from actors.runtime.content import LARGEST_REWARD
from bus import Bus
from bus.messages.control import EvalDone
from bus.messages.samples import RolloutLost, Scored

NOT_FINITE = "reward_not_finite"
DONE = "eval.done"
"""State field: version of the last evaluation whose results are on the bus. Steps may be done again, versions never."""


class Issued(msgspec.Struct, frozen=True):
    """Durable state: the evaluation issued last, and how many of its samples are on the bus. `sets`: digest of the data sets and of
    how they are measured."""

    step: int = -1
    version: int = 0
    offset: int = 0
    sets: int = 0

    def text(self) -> str:
        """Form in the run's state; its last part is the offset."""
        return ":".join(map(str, (self.step, self.version, self.sets, self.offset)))

    @staticmethod
    def parse(text: str) -> Issued:
        """Inverse of text(); the empty text means that nothing was issued yet."""
        if not text:
            return Issued()
        step, version, sets, offset = map(int, text.split(":"))
        return Issued(step, version, offset, sets)


async def is_under_way(bus: Bus, issued: Issued) -> bool:
    """Whether samples of the evaluation that was issued last are still to come: its results come in one commit."""
    return issued != Issued() and issued.version > await bus.state_as(DONE, lambda text: int(text or -1))


def due(*, active_step: int, last_step: int, interval: int, before_train: bool, final: bool) -> bool:
    """Whether the version that is active now should be evaluated. `interval` 0: never. Otherwise the last one always is."""
    if interval <= 0 or active_step <= last_step:
        return False
    if final:
        return True
    if active_step == 0:
        return before_train
    return active_step // interval > max(last_step, 0) // interval


Member = Scored | RolloutLost


def result(
    name: str, by_prompt: Sequence[Sequence[Member]], *, issued: Issued, wall: float, duration_s: float, unreadable: str = ""
) -> EvalDone:
    """The result of one data set, from its members by prompt, under the version that made most of its tokens (the older one if two
    made as many): weights may be updated during an evaluation, and neither waits for the other. `unreadable`: why it has none."""
    members = [m for of in by_prompt for m in of]
    spans = [span for m in members if isinstance(m, Scored) for span in m.rollout.made]
    made: Counter[int] = Counter()
    for span in spans:
        made[span.version] += span.n
    version = min(made, key=lambda v: (-made[v], v)) if made else issued.version
    metrics = summarize(name, by_prompt)
    if made:
        metrics[f"eval/{name}/version_share"] = made[version] / made.total()
    return EvalDone(
        name=name,
        version=version,
        step=next((span.step for span in spans if span.version == version), issued.step),
        metrics=metrics,
        n_samples=len(members),
        wall=wall,
        duration_s=duration_s,
        versions=dict(sorted(made.items())),
        asked=issued.step,
        error=unreadable or losses(members) or msgspec.UNSET,
    )


def _measured(member: Member) -> TypeGuard[Scored]:
    """Whether it has a reward that can be counted: one NaN would be the mean of all, and of huge ones the sum is infinite."""
    return isinstance(member, Scored) and abs(member.reward) <= LARGEST_REWARD


def losses(members: Sequence[Scored | RolloutLost]) -> str:
    """How many samples were lost and why, in one line; empty when none was. One whose reward is no number is lost too."""
    lost = [m for m in members if not _measured(m)]
    if not lost:
        return ""
    why = Counter(m.reason if isinstance(m, RolloutLost) else NOT_FINITE for m in lost)
    reasons = ", ".join(f"{n} {reason}" for reason, n in why.most_common())
    first = next((m.error for m in lost if isinstance(m, RolloutLost) and m.error), "")
    return f"{len(lost)} of {len(members)} samples lost ({reasons})" + (f", the first: {first}"[:200] if first else "")


def summarize(name: str, by_prompt: Sequence[Sequence[Member]]) -> dict[str, float]:
    """Metrics of one data set: mean reward with its confidence interval, pass@k and maj@k, share truncated, share lost, mean
    length. Lost samples count as reward 0; if all are lost there is no mean reward, because nothing was measured."""
    members = [m for of in by_prompt for m in of]
    if not members:
        return {}
    scored = [m for m in members if _measured(m)]
    n = len(members)
    lost = {f"eval/{name}-lost_ratio": (len(members) - len(scored)) / n}
    if not scored:
        return lost
    rewards = [[m.reward if _measured(m) else 0.0 for m in of] for of in by_prompt]
    answers = [[(m.answer or "") if isinstance(m, Scored) else "" for m in of] for of in by_prompt]
    low, high = interval(rewards)
    return {
        f"eval/{name}": sum(s.reward for s in scored) / n,
        f"eval/{name}/ci95_low": low,
        f"eval/{name}/ci95_high": high,
        **{f"eval/{name}/{key}": value for key, value in at_k(rewards, answers).items()},
        f"eval/{name}-truncated_ratio": sum(s.rollout.finish == "length" for s in scored) / n,
        **lost,
        f"eval/{name}/response_len/mean": sum(s.rollout.response.n_tokens for s in scored) / len(scored),
    }
