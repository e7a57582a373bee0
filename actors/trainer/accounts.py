"""What the accounts get for trained samples, and what is told of each (pure).

A token of a trained sample without gradient is booked as dropped under one of three reasons: `outlasted` (over the staleness bound
although the sample was trained in the first step that could take it: its own generation took too long), `stale` (over the bound
after it had waited here), `masked` (anything else, such as a prefix that is not to be trained).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from actors.trainer.backend import StepResult
from actors.trainer.checkpoint import Consumed
from actors.trainer.cut import Part
from bus import Entry, ledger
from bus.messages.groups import GroupKept, OpenGroup, part_key
from bus.messages.policy import SamplesTrained, SampleTrained, life_of
from bus.messages.reasons import DropReason
from bus.messages.versions import VersionSpan, staleness

A_MESSAGE = 50  # samples: some 10 kB
MOST_PARTS = 4096  # looked for; a larger number is no group's


class Trained(msgspec.Struct, frozen=True):
    """Samples of one entry that a step trained: the entry, and what the accounts will get when the step is durable."""

    step: int
    entry: Entry
    consumed: Consumed


def consumed_by(batch: Sequence[tuple[str, Part, GroupKept]], result: StepResult, *, step: int, bound: int) -> list[Consumed]:
    """The accounts of a batch: key, part and samples taken, in training order; `step` updates were inside the weights."""
    found: list[Consumed] = []
    position = 0
    for key, part, group in batch:
        trained: list[Iterator[tuple[VersionSpan, int]]] = []  # by sample: its trajectories' spans, with their trained tokens
        for scored in group.samples:
            strands = scored.rollout.strands
            kept = result.trained_spans[position : position + len(strands)]
            trained.append(chain(*(zip(s.response.spans, k, strict=True) for s, k in zip(strands, kept, strict=True))))
            position += len(strands)
        reason = DropReason.OUTLASTED if part.came == step else DropReason.STALE
        aged_samples = aged_tokens = masked_samples = masked_tokens = 0
        versions: dict[int, int] = {}
        for spans in trained:
            old = learnt = 0
            for span, n in spans:
                if not span.made:
                    continue
                learnt += n
                if staleness(step, span.step) > bound:
                    old += span.n - n
                else:
                    masked_tokens += span.n - n
                if n:
                    versions[span.version] = versions.get(span.version, 0) + n
            aged_tokens += old
            if not learnt:
                aged_samples += old > 0
                masked_samples += old == 0
        found.append(
            Consumed(
                key,
                len(trained) - aged_samples - masked_samples,
                masked_samples,
                sum(versions.values()),
                masked_tokens,
                tuple(sorted(versions.items())),
                tuple(s.rollout.task.index for s in group.samples),
                {reason: (aged_samples, aged_tokens)} if aged_tokens else {},
                tuple(s.reward for s in group.samples) if len(group.samples) < len(part.group.samples) else (),
            )
        )
    return found


def inside_of(group: GroupKept, among: Mapping[str, Consumed]) -> Consumed | None:
    """What of an entry checkpoints hold, with the accounts of exactly these samples; None = nothing. `among`: by key. It goes by
    samples, because a bus that went back may have a group cut into other parts than those that were trained."""
    by_index = {s.rollout.task.index: s for s in group.samples}
    n = max((s.rollout.task.n_samples for s in group.samples), default=0)
    keys = (group.group_id, *(part_key(group.group_id, (i,)) for i in range(min(n, MOST_PARTS))))
    known = [among[key] for key in keys if key in among]
    own = among.get(group.key)
    held = sorted(by_index.keys() & {i for item in known for i in item.members})
    if not held or (own is not None and held == sorted(own.members)):
        return own if held else None
    samples = [by_index[i] for i in held]
    return Consumed(
        group.key,
        len(held),
        0,
        sum(s.rollout.n_made for s in samples),
        0,
        tuple((span.version, span.n) for s in samples for span in s.rollout.made),
        tuple(held),
        rewards=tuple(s.reward for s in samples),
    )


def booked(trained: Sequence[Trained]) -> dict[str, int]:
    """Ledger movements of durable samples; accounts that do not move are left out."""
    moves = {
        "trained": sum(t.consumed.samples for t in trained),
        "tokens/trained": sum(t.consumed.tokens for t in trained),
    }
    dropped: list[tuple[str, int, int]] = []
    for item in trained:
        for version, n in item.consumed.versions:
            account = f"tokens/trained/version/{version}"
            moves[account] = moves.get(account, 0) + n
        dropped.append((DropReason.MASKED, item.consumed.masked_samples, item.consumed.masked_tokens))
        dropped += [(reason, samples, tokens) for reason, (samples, tokens) in item.consumed.aged.items()]
    for one in dropped:
        for account, n in ledger.dropped(*one).items():
            moves[account] = moves.get(account, 0) + n
    return {account: n for account, n in moves.items() if n}


def remaining(listed: Mapping[str, bytes], trained: Sequence[Trained]) -> dict[str, bytes]:
    """The run's open groups without what was trained. Of an entry that is trained in part, the rest, with the rewards of the
    others, so that it can be issued again alone."""
    gone: dict[str, dict[int, float | None]] = {}  # key -> reward by index, None = not kept
    for t in trained:
        item = t.consumed
        rewards: tuple[float | None, ...] = item.rewards or (None,) * len(item.members)
        gone.setdefault(item.group_id, {}).update(zip(item.members, rewards, strict=True))
    left = {key: raw for key, raw in listed.items() if key not in gone}
    for key, members in gone.items():
        if key not in listed:
            continue
        opened = msgspec.msgpack.decode(listed[key], type=OpenGroup)
        rest = tuple(i for i in opened.indexes if i not in members)
        known = opened.rewards | {i: reward for i, reward in members.items() if reward is not None}
        if rest:
            left[key] = msgspec.msgpack.encode(msgspec.structs.replace(opened, members=rest, rewards=known))
    return left


def trained_samples(batch: Sequence[tuple[Part, GroupKept]], result: StepResult, *, step: int) -> Iterator[SamplesTrained]:
    """Messages about all samples of a batch, in training order. `step`: the number of the step just done."""
    found: list[SampleTrained] = []
    position = 0
    for part, group in batch:
        for scored in group.samples:
            first = position
            position += len(scored.rollout.strands)
            shares = result.shares[first:position]
            trained = sum(map(sum, result.trained_spans[first:position]))
            share = round(sum(shares), 6) if shares else -1.0
            found.append(life_of(scored, judged=part.at, trained=trained, share=share))
    return (SamplesTrained(step=step, samples=tuple(found[at : at + A_MESSAGE])) for at in range(0, len(found), A_MESSAGE))
