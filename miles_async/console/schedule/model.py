"""A simulated run in which only engines and trainer take time (pure): docs/scheduling.md has the rules it follows.

Events are ends of samples and of training steps. Between two events every running sample goes on at one speed, which falls
with the number of them; so the model keeps a second clock, the *work* clock, that runs at this speed. A sample ends when the
work clock has moved on by its seconds, and its tokens are spread evenly over them. A version is served the moment it is made.

Always true: issued and not yet trained samples are at most (bound + 1) batches; running ones at most the slots.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec

Rule = Literal["whole", "split", "member"]
NEVER = float("inf")


class Sample(msgspec.Struct, frozen=True):
    """What a sample asks of an engine: `seconds` if it ran alone, `tokens` made evenly in them."""

    seconds: float
    tokens: float


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A rule and its surroundings.

    `rule`: whole = complete groups only; split = groups stay whole while the bound allows, then what is finished is trained
    (at least two members) and the others follow one by one; member = members may leave when half of their group is done.
    `over_sampling`: groups in generation at most, 0 = what slots and bound admit. `queue`: samples issued beyond the slots.
    `slowdown`: seconds of one sample with k running are (1 + slowdown * k) times its own. A step lasts
    `train_s + train_token_s * tokens of its batch`.
    """

    rule: Rule
    bound: int
    batch: int = 16  # groups a step
    group: int = 8  # samples a group
    slots: int = 64
    over_sampling: int = 0
    queue: int = 0
    train_s: float = 0.0
    train_token_s: float = 0.0
    slowdown: float = 0.0
    steps: int = 60
    warm: int = 15  # steps that are not counted

    @property
    def credits(self) -> int:
        """Samples that may be open."""
        return (self.bound + 1) * self.batch * self.group


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the counted steps. `masked`, `ages`: shares of trained tokens, by age before the mask. `split`: groups that
    were trained while some of their members still ran, per group trained. `overdue`: samples that were done and within the
    bound when a batch was cut, stayed, and were over it when they were trained, per sample trained."""

    step_s: float
    running: float
    tokens_per_s: float
    masked: float
    mean_age: float
    max_age: int
    split: float
    overdue: float
    ages: dict[int, float]
    most_open: int  # samples


class Member(msgspec.Struct):
    """A finished sample: its tokens by the version that made them, and the first step that could train it (its number is
    the version that it trains)."""

    spans: list[tuple[int, float]]
    first_step: int

    @property
    def oldest(self) -> int:
        return self.spans[0][0]


class Group(msgspec.Struct):
    """An open group. `done` holds what is finished and not trained."""

    left: int  # members that run or wait for a slot
    trained: int = 0
    done: dict[int, Member] = {}


class Simulation:
    """One run; `outcome` plays it to its end."""

    def __init__(self, setup: Setup, samples: Iterator[Sample]) -> None:
        self.setup = setup
        self._samples = samples
        self._now = 0.0
        self._work = 0.0  # the clock that running samples follow
        self._activated = [0.0]  # work clock at each version
        self._groups: dict[int, Group] = {}
        self._issued = 0  # groups ever
        self._generating = 0  # groups with members left
        self._open = 0  # samples
        self._queue: deque[tuple[int, int]] = deque()
        # A heap: work clock at its end, group, member, work clock at its start.
        self._running: list[tuple[float, int, int, float, Sample]] = []
        self._finished = 0  # samples that are done and not trained
        self._step_ends = NEVER
        self._step_size = 0
        self._starts: list[float] = []
        self._seen = _Seen(setup.bound)

    @property
    def version(self) -> int:
        """Steps inside the weights."""
        return len(self._activated) - 1

    def outcome(self) -> Outcome:
        """Play until the last step starts. That step always comes: with nothing running, open samples are finished or in the
        trainer; if they make no batch, the credits, which are at least a batch, admit another group."""
        self._issue()
        while len(self._starts) < self.setup.steps:
            self._advance()
            if self._step_ends == NEVER:
                self._start_step()
        s, seen = self.setup, self._seen
        counted = len(self._starts) - 1 - s.warm
        step_s = (self._starts[-1] - self._starts[s.warm]) / counted
        return seen.outcome(step_s=step_s, steps=counted + 1)

    def _advance(self) -> None:
        """To the next event."""
        pace = 1 / (1 + self.setup.slowdown * len(self._running))
        first = self._running[0][0] if self._running else NEVER
        sample_ends = self._now + (first - self._work) / pace if self._running else NEVER
        at = min(sample_ends, self._step_ends)
        if len(self._starts) > self.setup.warm:
            self._seen.area += len(self._running) * (at - self._now)
            self._seen.seconds += at - self._now
        if sample_ends <= self._step_ends:
            self._work = first
            self._now = at
            self._end_sample()
        else:
            self._work += (at - self._now) * pace
            self._now = at
            self._activated.append(self._work)
            self._open -= self._step_size
            self._step_ends = NEVER
        self._issue()

    # -- engines ------------------------------------------------------------------------------------------------------

    def _issue(self) -> None:
        """Groups while slots, credits and the cap allow, then samples into slots."""
        s = self.setup
        while (
            self._open + s.group <= s.credits
            and len(self._queue) + len(self._running) < s.slots + max(s.queue, s.group)
            and (not s.over_sampling or self._generating < s.over_sampling)
        ):
            self._groups[self._issued] = Group(s.group)
            self._queue.extend((self._issued, i) for i in range(s.group))
            self._issued += 1
            self._generating += 1
            self._open += s.group
        self._seen.most_open = max(self._seen.most_open, self._open)
        while self._queue and len(self._running) < s.slots:
            number, index = self._queue.popleft()
            sample = next(self._samples)
            heapq.heappush(self._running, (self._work + sample.seconds, number, index, self._work, sample))

    def _end_sample(self) -> None:
        _, number, index, start, sample = heapq.heappop(self._running)
        group = self._groups[number]
        group.done[index] = Member(self._spans(start, sample), len(self._starts))
        group.left -= 1
        self._finished += 1
        self._generating -= group.left == 0

    def _spans(self, start: float, sample: Sample) -> list[tuple[int, float]]:
        """(version, tokens) of a sample that ends now; the first token is made at once."""
        version = bisect_right(self._activated, start) - 1
        spans, at = [], start
        for number in range(version, self.version + 1):
            until = self._activated[number + 1] if number < self.version else self._work
            part = (until - at) / sample.seconds if sample.seconds else 1.0
            spans.append((number, sample.tokens * part))
            at = until
        return spans

    # -- trainer ------------------------------------------------------------------------------------------------------

    def may_be_trained(self, group: Group) -> bool:
        """Whether the rule lets this group's finished members go."""
        s = self.setup
        if not group.done:
            return False
        if group.left == 0:
            return True
        match s.rule:
            case "split":
                age = self.version - min(m.oldest for m in group.done.values())
                return group.trained > 0 or (age >= s.bound and len(group.done) >= 2)
            case "member":
                return group.trained > 0 or 2 * len(group.done) >= s.group
        return False

    def _start_step(self) -> None:
        """A step, if there is a batch: oldest tokens first."""
        s = self.setup
        size = s.batch * s.group
        if self._finished < size:
            return
        ready = [
            (min(m.oldest for m in group.done.values()), number)
            for number, group in self._groups.items()
            if self.may_be_trained(group)
        ]
        batch: list[tuple[int, int]] = []
        for _, number in sorted(ready):
            if len(batch) >= size:
                break
            members = sorted(self._groups[number].done)
            batch += [(number, i) for i in (members if s.rule == "whole" else members[: size - len(batch)])]
        if len(batch) < size:
            return
        self._starts.append(self._now)
        tokens = self._take(batch)
        self._step_size = len(batch)
        self._step_ends = self._now + s.train_s + s.train_token_s * tokens

    def _take(self, batch: list[tuple[int, int]]) -> float:
        """Members leave their groups; their tokens."""
        counted = len(self._starts) > self.setup.warm
        tokens = 0.0
        for number, index in batch:
            group = self._groups[number]
            member = group.done.pop(index)
            tokens += sum(n for _, n in member.spans)
            if counted:
                self._seen.member(member, self.version)
                if group.trained == 0:
                    self._seen.groups += 1
                    self._seen.split += group.left > 0
            group.trained += 1
            if group.trained == self.setup.group:
                del self._groups[number]
        self._finished -= len(batch)
        return tokens


class _Seen:
    """What the counted steps show."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._ages: dict[int, float] = {}
        self._members = self._overdue = 0
        self.area = self.seconds = 0.0
        self.groups = self.split = self.most_open = 0

    def member(self, member: Member, version: int) -> None:
        self._members += 1
        self._overdue += member.first_step - member.oldest <= self._bound < version - member.oldest
        for made, n in member.spans:
            self._ages[version - made] = self._ages.get(version - made, 0.0) + n

    def outcome(self, *, step_s: float, steps: int) -> Outcome:
        tokens = sum(self._ages.values())
        ages = {age: n / tokens for age, n in sorted(self._ages.items())}
        return Outcome(
            step_s=step_s,
            running=self.area / self.seconds,
            tokens_per_s=tokens / steps / step_s,
            masked=sum(share for age, share in ages.items() if age > self._bound),
            mean_age=sum(age * share for age, share in ages.items()),
            max_age=max(ages),
            split=self.split / max(1, self.groups),
            overdue=self._overdue / self._members,
            ages=ages,
            most_open=self.most_open,
        )


def simulate(setup: Setup, samples: Iterator[Sample]) -> Outcome:
    """Play `setup` with endless `samples`, taken in the order in which they start."""
    return Simulation(setup, samples).outcome()
