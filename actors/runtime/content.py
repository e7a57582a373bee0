"""What a message must hold before a room works on it (pure): one set of rules for every stream that is read.

The decoder has checked types. Here: names that fit each other, arrays that fit each other, numbers within their range. A
fault is one line; the message is then dead-lettered and what waits for it is told (consume.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from actors.runtime.arrays import INT32, floats_fault, ids_fault
from bus.messages.active import Activate, PolicyActive
from bus.messages.groups import GroupKept, GroupVerdict, index_of
from bus.messages.policy import GroupsGivenUp, PolicyAnnounced, Restored, StepDone, WeightsReady
from bus.messages.samples import (
    Parked,
    PrefixDropped,
    PrefixResume,
    Response,
    RolloutDone,
    RolloutLost,
    SampleTask,
    Scored,
)
from bus.messages.versions import spans_cover
from bus.streams.entry import Entry

MOST_SAMPLES = 1_000_000  # of one group or evaluation; bit masks and tables are made over indexes
LARGEST_REWARD = 3e38  # of float32, in which advantages are trained


def fault_of(message: Any, vocabulary: int = 0) -> str:
    """Why a decoded message cannot be what it says; empty when it can. `vocabulary`: token ids are below it; 0 = unknown."""
    match message:
        case SampleTask():
            return _task(message, vocabulary)
        case RolloutDone():
            return _task(message.task, vocabulary) or _strands(message, vocabulary)
        case Parked() | PrefixResume():
            return _task(message.task, vocabulary) or response_fault(message.response, vocabulary) or _journal(message)
        case Scored():
            return fault_of(message.rollout, vocabulary) or _teacher(message)
        case RolloutLost():
            return _name(message.sample_id, message.group_id) or _count(message.tokens_made)
        case PrefixDropped():
            return _name(message.task.sample_id, message.task.group_id) or _count(message.tokens_made)
        case GroupKept():
            return _group(message, vocabulary)
        case GroupVerdict():
            return _indexes(message.members)
        case StepDone() | Restored() | GroupsGivenUp():
            return _indexes(map(index_of, message.samples))
        case PolicyAnnounced() | WeightsReady() | Activate():
            return "its path holds a NUL byte" if "\0" in message.manifest.path else ""
        case PolicyActive():
            return "slots below 0" if any(n < 0 for n in message.slots.values()) else ""
    return ""


def response_fault(response: Response, vocabulary: int = 0) -> str:
    """Why tokens, log-probs, mask and spans do not make a response."""
    n, rest = divmod(len(response.tokens), 4)
    if rest:
        return f"{len(response.tokens)} bytes of tokens are no whole number of int32"
    if len(response.logprobs) != 4 * n or len(response.loss_mask) != n:
        return f"{n} tokens with {len(response.logprobs)} bytes of log-probs and {len(response.loss_mask)} of mask"
    if not spans_cover(response.spans, n) or any(s.version < 0 or s.step < 0 for s in response.made):
        return f"its version spans do not cover its {n} tokens"
    at = 0
    for span in response.spans:
        if not span.made and any(response.loss_mask[at : at + span.n]):
            return f"tokens of an environment shall be trained, from {at} on"
        at += span.n
    return ids_fault(response.tokens, vocabulary) or floats_fault(response.logprobs)


def _strands(rollout: RolloutDone, vocabulary: int) -> str:
    for strand in rollout.strands:
        known = strand.prompt_tokens is rollout.task.prompt_tokens
        fault = "" if known else ids_fault(strand.prompt_tokens, vocabulary)
        if fault := fault or response_fault(strand.response, vocabulary):
            return fault
    return ""


def _journal(message: Parked | PrefixResume) -> str:
    if any(not span.made for span in message.response.spans):
        return "tokens that nobody made are in a prefix"
    if message.journal is UNSET:
        return ""
    told = sum(call.n for call in message.journal)
    fits = told == message.response.n_tokens and all(call.n >= 0 <= call.no for call in message.journal)
    return "" if fits else f"its journal tells of {told} tokens, {message.response.n_tokens} are here"


def reward_fault(scored: Scored) -> str:
    """Why a reward cannot be trained."""
    return "" if abs(scored.reward) <= LARGEST_REWARD else f"reward {scored.reward} is no number that can be trained"


def lost_of(entry: Entry, message: Any, error: str) -> RolloutLost | None:
    """The sample of a dead entry as one that will never finish, so that its group closes: from the message, or if there is
    none from the readable fields. None where these name no sample."""
    if isinstance(message, RolloutLost) and not fault_of(message):
        return message
    rollout = message.rollout if isinstance(message, Scored) else message
    task = rollout if isinstance(rollout, SampleTask) else getattr(rollout, "task", None)
    tokens = header_tokens(entry)
    if isinstance(task, SampleTask) and not _name(task.sample_id, task.group_id):
        return RolloutLost(
            sample_id=task.sample_id,
            group_id=task.group_id,
            n_samples=task.n_samples,
            reason="poison",
            error=error,
            prompt_id=task.prompt_id,
            tokens_made=tokens,
            eval_name=task.eval_name,
        )
    sample_id, group_id = entry.fields.get("id", ""), entry.fields.get("group", "")
    if _name(sample_id, group_id):
        return None
    return RolloutLost(sample_id=sample_id, group_id=group_id, n_samples=0, reason="malformed", error=error, tokens_made=tokens)


def header_tokens(entry: Entry) -> int:
    """Tokens by an entry's readable fields; 0 when they do not tell or it is no number (headers come from outside too)."""
    text = entry.fields.get("tokens", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0


def _task(task: SampleTask, vocabulary: int) -> str:
    if not (0 <= task.index < task.n_samples <= MOST_SAMPLES):
        return f"index {task.index} of {task.n_samples} samples"
    if task.sample_id != f"{task.group_id}/{task.index}" or not task.group_id:
        return f"sample {task.sample_id!r} is not number {task.index} of group {task.group_id!r}"
    sampling = task.sampling
    if not (0 <= sampling.temperature < math.inf and 0 <= sampling.top_p <= 1):
        return f"temperature {sampling.temperature} and top_p {sampling.top_p} cannot be sampled under"
    if not 0 <= sampling.max_new_tokens < INT32:
        return f"max_new_tokens {sampling.max_new_tokens}"
    if task.given_tokens is not UNSET or task.given_mask is not UNSET:
        if task.given_tokens is UNSET or task.given_mask is UNSET or len(task.given_tokens) != 4 * len(task.given_mask):
            return "a given response and its mask are not of one length"
        if set(task.given_mask) - {0, 1}:
            return "a mask of a given response holds what is neither 0 nor 1"
        if fault := ids_fault(task.given_tokens, vocabulary):
            return fault
    return ids_fault(task.prompt_tokens, vocabulary)


def _group(group: GroupKept, vocabulary: int) -> str:
    if not group.samples:
        return "a group without samples"
    for scored in group.samples:
        if fault := fault_of(scored, vocabulary) or reward_fault(scored):
            return f"{scored.sample_id}: {fault}"
        if scored.group_id != group.group_id:
            return f"sample {scored.sample_id} is not of group {group.group_id}"
    indexes = [scored.rollout.task.index for scored in group.samples]
    if len(set(indexes)) < len(indexes):
        return "a sample is in it twice"
    return "" if all(abs(r) <= LARGEST_REWARD for r in group.known) else "a known reward is no number"


def _teacher(scored: Scored) -> str:
    taught = scored.teacher_logprobs
    if not isinstance(taught, memoryview):
        return ""
    if len(taught) != len(scored.rollout.response.tokens):
        return f"{len(taught)} bytes of teacher's log-probs for {scored.rollout.response.n_tokens} tokens"
    fault = floats_fault(taught)
    return f"of the teacher: {fault}" if fault else ""


def _name(sample_id: str, group_id: str) -> str:
    named = group_id and sample_id.rpartition("/")[0] == group_id and 0 <= index_of(sample_id) < MOST_SAMPLES
    return "" if named else f"sample {sample_id!r} is none of group {group_id!r}"


def _count(n: int) -> str:
    return "" if 0 <= n < INT32 else f"{n} tokens"


def _indexes(indexes: Iterable[int]) -> str:
    bad = next((i for i in indexes if i >= MOST_SAMPLES), None)
    return "" if bad is None else f"it names sample number {bad} of a group"
