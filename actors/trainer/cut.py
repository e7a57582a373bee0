"""Which ready samples make the next batch (pure).

A batch has exactly `size` samples, those first whose first token is oldest. Parts of groups are taken whole, but for the one at
the edge, or where the bound asks for more. A sample is due at the step in which its oldest token reaches the bound; one step later
it loses tokens. One that is not here yet may be due `bound` steps after its issue. The promise: no finished sample waits past the
bound, in whatever order samples end. It holds because before each step s, and for each step j from s on, at most
(j - s + 1) * size untrained samples are due at j or before:


- admission issues no more than that (actors.sampler.admission: with version k served, open samples are at most those);
- a cut takes what is due first, so what is due earliest only gets less;
- it takes younger samples in place of older ones still under way only if for each later step it leaves no more than that many.
  Otherwise it waits: what is under way comes, and takes their place.

"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from actors.runtime.staleness import Rule
from bus.messages.groups import GroupKept, index_of
from bus.messages.reasons import DropReason
from bus.messages.samples import Scored
from bus.messages.versions import staleness

Span = tuple[int, int]  # first and last step that made tokens of a sample


class Part(msgspec.Struct):
    """Samples of one entry of `groups` that no step has trained yet. `left`: their positions in the entry. `came`: number of
    the step whose batch was the first they could be in."""

    group: GroupKept
    left: tuple[int, ...]
    came: int
    steps: tuple[Span | None, ...] = ()  # by position; None = no tokens
    at: float = 0.0  # when its entry was appended, seconds

    @staticmethod
    def of(group: GroupKept, *, came: int, at: float = 0.0, without: frozenset[int] = frozenset()) -> Part:
        """All samples of an entry, but for indexes that a checkpoint holds already."""
        left = tuple(at for at, s in enumerate(group.samples) if index_of(s.sample_id) not in without)
        return Part(group, left, came, tuple(map(steps_of, group.samples)), at)

    def age(self, step: int, at: int) -> int:
        """Steps since the first token of one sample, 0 without tokens; below 0 in a lost future, whose turn is yet to come."""
        span = self.steps[at]
        return 0 if span is None else step - span[0]

    def oldest(self, step: int) -> int:
        """The same of the oldest sample left."""
        return max((self.age(step, at) for at in self.left), default=0)

    def over(self, step: int, bound: int) -> bool:
        """Whether any token of the samples left is over the bound, on either side."""
        spans = [span for at in self.left if (span := self.steps[at]) is not None]
        return any(staleness(step, made) > bound for span in spans for made in span)

    def hopeless(self, step: int, bound: int) -> bool:
        """Whether no token of the samples left is within the bound."""
        newest = [min(staleness(step, s) for s in span) for at in self.left if (span := self.steps[at]) is not None]
        return bool(newest) and min(newest) > bound

    def cut(self, positions: Sequence[int]) -> GroupKept:
        """The entry with these samples only; their baselines stay those of the group."""
        if len(positions) == len(self.group.samples):
            return self.group
        samples = self.group.samples
        known = self.group.known or tuple(s.reward for s in samples)
        return msgspec.structs.replace(self.group, samples=tuple(samples[at] for at in positions), known=known)


def steps_of(scored: Scored) -> Span | None:
    """First and last step that made tokens of a sample; None without tokens."""
    made = [span.step for span in scored.rollout.made]
    return (min(made), max(made)) if made else None


class Cut(msgspec.Struct, frozen=True):
    """`take`: key and positions in training order when the batch may be made, else empty. `drop` pairs key and reason. `missing`
    says what the trainer waits for. `left_behind`: samples not taken that are due now, and will lose tokens."""

    take: tuple[tuple[str, tuple[int, ...]], ...] = ()
    drop: tuple[tuple[str, DropReason], ...] = ()
    missing: str = ""
    left_behind: int = 0


Take = dict[str, list[int]]
UNDER_WAY = "older samples, still under way,"


def cut(
    *,
    ready: Mapping[str, Part],
    step: int,
    size: int,
    bound: int,
    rule: Rule,
    elsewhere: Mapping[int, int] | None = None,
    window: frozenset[str] | None = None,
) -> Cut:
    """The batch of `step` from what is ready. `bound` in steps. `elsewhere`: open samples that are not here yet, by the step of
    their issue; None = the rule gives no promise. `window`: groups that `wait` may take from, None = any."""
    drop: list[tuple[str, DropReason]] = []
    fit: list[tuple[int, str]] = []
    for key, part in ready.items():
        if part.hopeless(step, bound) or (rule == "drop" and part.over(step, bound)):
            drop.append((key, drop_reason(part, step, bound)))
        elif window is None or part.group.group_id in window:
            fit.append((-part.oldest(step), key))
    dropped = tuple(sorted(drop))
    there = sum(len(ready[key].left) for _, key in fit)
    if there < size:
        return Cut(drop=dropped, missing=f"{size - there} of {size} samples")
    # The oldest first; under `wait`, whose batches are the groups in the order of their issue, by that: ids count up.
    fit.sort(key=lambda item: item if window is None else (0, item[1]))
    keys = [key for _, key in fit]
    take = _by_part(ready, keys, step, size)
    if elsewhere is not None and excess(ready, keys, take, elsewhere, step=step, size=size, bound=bound):
        take = _by_sample(ready, keys, step, size)  # the siblings of what is due may wait, what is due may not
        # Nothing younger is taken now while anything older is here, so only what is still to come can be too much.
        waits = excess(ready, keys, take, elsewhere, step=step, size=size, bound=bound) if any(elsewhere.values()) else 0
        if waits:
            return Cut(drop=dropped, missing=f"{waits} {UNDER_WAY}")
    due = [(key, at) for key in keys for at in ready[key].left if ready[key].age(step, at) >= bound]
    return Cut(
        take=tuple((key, tuple(sorted(positions))) for key, positions in take.items()),
        drop=dropped,
        left_behind=sum(at not in take.get(key, ()) for key, at in due),
    )


def _by_part(ready: Mapping[str, Part], keys: Sequence[str], step: int, size: int) -> Take:
    """Part after part; of the one at the edge the oldest samples."""
    take: Take = {}
    room = size
    for key in keys:
        part = ready[key]
        taken = list(part.left) if len(part.left) <= room else sorted(part.left, key=lambda at: (-part.age(step, at), at))[:room]
        take[key] = taken
        room -= len(taken)
        if not room:
            break
    return take


def _by_sample(ready: Mapping[str, Part], keys: Sequence[str], step: int, size: int) -> Take:
    """The oldest samples of all parts."""
    every = [(-ready[key].age(step, at), key, at) for key in keys for at in ready[key].left]
    take: Take = {}
    for _, key, at in sorted(every)[:size]:
        take.setdefault(key, []).append(at)
    return take


def excess(
    ready: Mapping[str, Part],
    keys: Sequence[str],
    take: Take,
    elsewhere: Mapping[int, int],
    *,
    step: int,
    size: int,
    bound: int,
) -> int:
    """By how many samples this batch would break the promise, 0 = it keeps it: the worst of the coming steps, counting only
    those for which the batch holds younger samples that could wait."""
    worst = 0
    ages = [(ready[key].age(step, at), at in take.get(key, ())) for key in keys for at in ready[key].left]
    for coming in range(step, step + bound):
        due = bound - (coming - step)  # the age now of what is due then
        if any(taken and age < due for age, taken in ages):
            left = sum(not taken and age >= due for age, taken in ages)
            if coming > step:  # what is not here cannot be in this batch, whatever it holds
                left += sum(n for issued, n in elsewhere.items() if step - issued >= due)
            worst = max(worst, left - size * (coming - step))
    return worst


def drop_reason(part: Part, step: int, bound: int) -> DropReason:
    """Why a part with no trainable token left is dropped: it waited here (at bound 0: a wave larger than its batch), or its own
    generation outlasted the bound."""
    if part.came == step:
        return DropReason.OUTLASTED
    return DropReason.SURPLUS if bound == 0 else DropReason.STALE
