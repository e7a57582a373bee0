"""The map: every stream, what travels on it, the one room that writes it, who reads it. `print(describe())` shows it.

Two kinds. A *data* stream has readers (one Redis consumer group each): an entry stays until it is acknowledged, and one
commit acknowledges it and appends what follows. A *log* stream is read from a position by anyone, with no acknowledgement;
what must survive in it is trimmed by its writer only below the oldest kept checkpoint, what is merely news is capped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bus.messages import active, control, environments, groups, policy, samples

ROLES = (
    *("sampler", "generation", "reward", "filter", "partial", "trainer", "publisher", "evaluator", "router", "environments"),
    "recorder",
)
"""Every room, in the order in which views show them; each is a package of `actors`."""
OPTIONAL = ("evaluator", "router", "environments")  # of them: runs without one are whole


class Stream(msgspec.Struct, frozen=True):
    """One stream. `cap` is an approximate length for news only; 0 = never capped."""

    name: str
    union: Any
    writer: str
    readers: tuple[str, ...] = ()
    tailed_by: tuple[str, ...] = ()
    cap: int = 0

    @property
    def is_data(self) -> bool:
        return bool(self.readers)


Rollout = samples.RolloutDone | samples.RolloutLost
ScoredOrLost = samples.Scored | samples.RolloutLost
Prefix = samples.PrefixResume | samples.PrefixDropped
Policy = (
    policy.PolicyAnnounced
    | policy.StepDone
    | policy.GroupsGivenUp
    | policy.Restored
    | policy.Checkpointed
    | policy.Finished
    | policy.WeightsReady
    | policy.SendFailed
    | policy.Sending
    | policy.Turn
)
Active = active.Activate | active.PolicyActive | active.Send
News = control.Vitals | control.Event

PROMPTS = Stream("prompts", samples.SampleTask, "sampler", ("generation",))
PARKED = Stream("parked", samples.Parked, "generation", ("partial",))
PREFIXES = Stream("prefixes", Prefix, "partial", ("generation",))
TAIL = Stream("tail", samples.PrefixResume, "partial", ("generation",))  # prefixes for the slots that are kept for them
ROLLOUTS = Stream("rollouts", Rollout, "generation", ("reward",))
SCORED = Stream("scored", ScoredOrLost, "reward", ("filter",))
GROUPS = Stream("groups", groups.GroupKept | groups.Turned, "filter", ("trainer",))
# Verdicts travel apart from kept groups, so that the sampler never reads the bodies that only the trainer needs.
VERDICTS = Stream("verdicts", groups.GroupVerdict, "filter", tailed_by=("sampler", "console"), cap=10_000)
POLICY = Stream(
    "policy", Policy, "trainer", tailed_by=("sampler", "filter", "partial", "publisher", "evaluator", "generation", "console")
)
TRAINED = Stream("trained", policy.SamplesTrained, "trainer", tailed_by=("console",), cap=1_000)
ACTIVE = Stream("active", Active, "publisher", tailed_by=("generation", "sampler", "evaluator", "trainer"), cap=1_000)
KNOBS = Stream("knobs", control.KnobPatch, "console", tailed_by=("all",))
EVENTS = Stream("events", News, "all", tailed_by=("publisher", "trainer", "console"), cap=20_000)
DEAD = Stream("dead", control.DeadLetter, "all", tailed_by=("console",))
EVAL_PROMPTS = Stream("eval.prompts", samples.SampleTask, "evaluator", ("generation",))
EVAL_ROLLOUTS = Stream("eval.rollouts", Rollout, "generation", ("reward",))
EVAL_SCORED = Stream("eval.scored", ScoredOrLost, "reward", ("evaluator",))
EVAL_RESULTS = Stream("eval.results", control.EvalDone, "evaluator", tailed_by=("console",), cap=1_000)
# A question has one asker, but only the asker knows itself: answers are news to all workers.
ENV_CALLS = Stream("environment.calls", environments.EnvironmentCall, "generation", ("environments",))
ENV_ANSWERS = Stream("environment.answers", environments.EnvironmentAnswer, "environments", tailed_by=("generation",), cap=1_000)

STREAMS: tuple[Stream, ...] = (
    PROMPTS,
    PARKED,
    PREFIXES,
    TAIL,
    ROLLOUTS,
    SCORED,
    GROUPS,
    VERDICTS,
    POLICY,
    TRAINED,
    ACTIVE,
    KNOBS,
    EVENTS,
    DEAD,
    EVAL_PROMPTS,
    EVAL_ROLLOUTS,
    EVAL_SCORED,
    EVAL_RESULTS,
    ENV_CALLS,
    ENV_ANSWERS,
)
BY_NAME: dict[str, Stream] = {stream.name: stream for stream in STREAMS}


def describe() -> str:
    """The map as text, one line a stream."""
    lines = [f"{'stream':14} {'writer':11} {'readers':12} tailed by"]
    lines += [f"{s.name:14} {s.writer:11} {','.join(s.readers):12} {','.join(s.tailed_by)}" for s in STREAMS]
    return "\n".join(lines)
