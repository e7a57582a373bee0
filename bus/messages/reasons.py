"""Why samples and tokens are dropped: a closed list, each with its meaning and what an operator may do.

A reason is written into messages, the ledger, counters and metrics by its value. A filter of the user's own may give any other
text; `declared` tells the two apart. The glossary's table, `trace`, the report, the console and the doctor are made from this list.
To add a reason: declare it here, give it where the drop is decided, and let `tests/floors/test_closed.py` write the glossary's row.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Self

from bus.messages.samples import LostReason


class DropReason(StrEnum):
    """One reason: the value as it is written, `meaning` and `remedy` as parts of a sentence, without a full stop. `remedy` is empty
    where nothing is to be done. `tail`: what the value is followed by, as in `zero_std_R`; see `of`.

    Example:
        ledger.dropped(DropReason.STALE, n_samples=2, tokens=31)   # {"dropped/stale": 2, "tokens/dropped/stale": 31}
    """

    meaning: str
    remedy: str
    tail: str

    def __new__(cls, value: str, meaning: str, remedy: str = "", tail: str = "") -> Self:
        self = str.__new__(cls, value)
        self._value_, self.meaning, self.remedy, self.tail = value, meaning, remedy, tail
        return self

    # -- the filter
    ZERO_STD = (
        "zero_std_",
        "all rewards of the group are equal (R, rounded to one decimal): no advantage to learn from",
        "easier or harder prompts, more samples a prompt, or a reward with more values",
        "R",
    )
    TRUNCATED = (
        "truncated",
        "a response was cut at the length limit, and the filter no_truncation is on",
        "raise --rollout-max-response-len, or use another filter",
    )
    REWARD_NOT_FINITE = (
        "reward_not_finite",
        "a reward is NaN, infinite or too large for float32",
        "mend the reward function",
    )
    NOTHING_TO_TRAIN = (
        "nothing_to_train",
        "no token of the group may be trained",
        "look at the loss masks of your rollout program",
    )
    JUDGE_RAISED = (
        "judge_raised",
        "the group filter raised an exception",
        "mend it: the event `judge raised` has its text",
    )
    OTHER_REASON = (
        "other_reason",
        "your filter gave a reason of its own, after two hundred others",
        "let it give fewer different texts",
    )
    LOST_POISON = (
        "lost_poison",
        "a sample could not be generated or scored in all its attempts",
        "miles-async bus dead list shows the errors",
    )
    LOST_MALFORMED = (
        "lost_malformed",
        "a message of the group could not be read",
        "miles-async bus dead list shows it; look for actors of another release",
    )
    LOST_EVICTED = (
        "lost_evicted",
        "the buffer policy gave a parked sample up",
        "more space in the buffer, or another policy",
    )
    LOST_CANCELLED = (
        "lost_cancelled",
        "the rollout function took the group and neither returned it nor gave it back",
        "return every group that it takes, or give it back",
    )
    # -- the trainer
    REWARD_VERSION = (
        "reward_version",
        "scored under an earlier reward_version: a step takes one alone; its prompt is issued again",
    )
    MALFORMED = (
        "malformed",
        "the trainer could not read a kept group",
        "miles-async bus dead list shows it; look for actors of another release",
    )
    REFUSED = (
        "refused",
        "the training library could not take the group, such as a token id outside the vocabulary",
        "the event `batch refused` has its text",
    )
    OUTLASTED = (
        "outlasted",
        "its own generation took longer than the staleness bound",
        "raise max_weight_staleness, or let answers be shorter",
    )
    STALE = (
        "stale",
        "over the staleness bound, because it waited for siblings or the bound was lowered",
        "raise max_weight_staleness, or let groups leave in parts (--staleness-policy split)",
    )
    MASKED = ("masked", "tokens without gradient for another reason than their staleness, such as a masked prefix")
    SURPLUS = (
        "surplus",
        "at bound 0: groups of a wave larger than its batch",
        "lower over_sampling_batch_size to the batch size",
    )
    NONFINITE_GRADIENT = (
        "nonfinite_gradient",
        "the step's gradient was not finite twice, so its groups were given up",
        "mend a NaN in rewards or log-probs, or lower lr",
    )
    # -- the rollout worker
    RESTARTED = (
        "restarted",
        "tokens of a sample that began again: its prefix was thrown away, or its program could not go on from its journal",
    )
    DISCARDED = ("discarded", "tokens of turns that a rollout program put into no trajectory")
    # -- a bus that was lost
    PROMPT_GONE = (
        "prompt_gone",
        "the bus was lost, and its prompt was no more in the data, or another one under its id, when it was to be issued again",
        "keep the data of a run as it is",
    )
    BUS_LOST = ("bus_lost", "tokens on a Redis that was lost with its data; their prompts are issued again")

    @property
    def shown(self) -> str:
        """The value with what follows it: `zero_std_R`."""
        return self.value + self.tail

    def of(self, what: object) -> str:
        """The reason with what follows it: `DropReason.ZERO_STD.of(0.5)` is `zero_std_0.5`. ValueError where nothing does."""
        if not self.tail:
            raise ValueError(f"the drop reason {self.value} stands alone")
        return f"{self.value}{what}"

    @classmethod
    def lost(cls, reason: LostReason) -> DropReason:
        """That of a group with a sample that will never finish."""
        return cls[f"LOST_{reason.upper()}"]


def declared(reason: str) -> DropReason | None:
    """What a reason on the bus is declared as; None = a text of the user's own filter."""
    return next((one for one in DropReason if reason == one or (one.tail and reason.startswith(one))), None)


def meaning(reason: str) -> str:
    """Why something was dropped, in words, also for a reason of the user's own."""
    known = declared(reason)
    if known is None:
        return "a reason of the run's own filter"
    return re.sub(rf"\b{known.tail}\b", reason.removeprefix(known), known.meaning) if known.tail else known.meaning
