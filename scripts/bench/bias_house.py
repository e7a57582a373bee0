"""A run for study_bias.py: sampler, filter and cut by their own pure parts, over simulated time, with answers that are drawn from
a small table instead of a model. One token takes one tick on a slot, a training step `train_ticks`.

Always true: what is trained, when, with which ages and against which rewards is decided by the project's own code; the script
brings time, answers and the gradient.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from actors.filter.groups import GroupTable, Half, leaves_now, tips
from actors.runtime.staleness import rule_of
from actors.sampler.admission import engine_room, free_samples, open_limit
from actors.sampler.progress import SamplerProgress
from actors.trainer.cut import Part, cut
from bus.messages.active import PolicyActive
from bus.messages.base import pack_floats
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup, part_key
from bus.messages.policy import GroupsGivenUp, StepDone
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan, staleness
from bus.streams.entry import Entry
from bus.topology import SCORED

GROUPS, N, SLOTS = 16, 8, 64  # a batch, as in the model's tables of docs/scheduling.md
PARTING = ("split", "member")
NO_TOKENS = memoryview(b"")


@dataclass(frozen=True)
class Task:
    """Prompt classes times answers: mean length in tokens by answer [K], probability of reward 1 by class and answer [P, K]."""

    name: str
    lengths: np.ndarray
    rewards: np.ndarray
    sigma: float = 0.4  # of the logarithm of a length
    longest: int = 2048


@dataclass(frozen=True)
class Answer:
    """One drawn answer. `logp`: under the policy that began it."""

    prompt: int
    choice: int
    tokens: int
    reward: float
    logp: float


@dataclass
class Trained:
    """One sample of a batch. `fresh`: share of its tokens within the bound. `known`: rewards its part brings, empty for a whole
    group; `every`: the same with all rewards of the group that were known when the part left, late siblings included."""

    group: str
    answer: Answer
    fresh: float
    known: tuple[float, ...]
    every: tuple[float, ...]


@dataclass
class Running:
    group: OpenGroup
    index: int
    answer: Answer
    began: float
    spans: list[tuple[int, float]] = field(default_factory=list)  # step, tick it was loaded at


class House:
    """`logits` [P, K] may be changed between two batches; answers begin with what they are then."""

    def __init__(self, task: Task, *, policy: str, bound: int, train_ticks: float, seed: int, logits: np.ndarray) -> None:
        self.task, self.bound, self.train_ticks, self.logits = task, bound, train_ticks, logits
        self.rule = rule_of(policy, bound)
        self.size = GROUPS * N
        self.chance = random.Random(seed)
        self.progress, self.table = SamplerProgress(keeps=False), GroupTable()
        self.registry: dict[str, OpenGroup] = {}
        self.answers: dict[str, Answer] = {}
        self.queue: deque[tuple[OpenGroup, int]] = deque()
        self.running: dict[int, Running] = {}
        self.ends: list[tuple[float, int]] = []
        self.ready: dict[str, Part] = {}
        self.every: dict[str, tuple[float, ...]] = {}  # key of a part -> see Trained
        self.heard: dict[str, dict[int, float]] = {}  # split group -> all rewards so far
        self.again: deque[int] = deque()  # prompts of dropped groups
        self.now = 0.0
        self.step = self.number = self.entries = 0
        self.ended = self.ended_tokens = self.masked_tokens = self.dropped = self.parted = self.left_whole = 0
        self._serve()

    def batches(self) -> Iterator[list[Trained]]:
        """Batches for ever; the weights change when the next one is asked for."""
        while True:
            taken = self._cut()
            while taken is None:
                self._next_end()
                taken = self._cut()
            done = self.now + self.train_ticks
            self._begin()
            while self.ends and self.ends[0][0] <= done:
                self._next_end()
            self.now = done
            ids, batch = taken
            yield batch
            self.step += 1
            version = PolicyVersion(self.step + 1, self.step)
            before = PolicyVersion(self.step, self.step - 1)
            self.progress.fold(StepDone(step=self.step, version=version, trained_on=before, groups=(), samples=ids))
            self._serve()
            for half in self.table.halves():
                self._release(half)

    def _serve(self) -> None:
        self.progress.fold(PolicyActive(version=PolicyVersion(self.step + 1, self.step), serving={"w": self.step + 1}))
        for run in self.running.values():
            run.spans.append((self.step, self.now))
        logits = self.logits - self.logits.max(axis=1, keepdims=True)
        self.log_policy = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self.shares = np.cumsum(np.exp(self.log_policy), axis=1).tolist()

    def _draw(self, prompt: int) -> Answer:
        task, chance = self.task, self.chance
        choice = bisect(self.shares[prompt], chance.random() * self.shares[prompt][-1])
        length = task.lengths[choice] * math.exp(task.sigma * chance.gauss(0.0, 1.0) - task.sigma**2 / 2)
        reward = float(chance.random() < task.rewards[prompt, choice])
        tokens = min(task.longest, max(1, round(length)))
        return Answer(prompt, choice, tokens, reward, float(self.log_policy[prompt, choice]))

    def _begin(self) -> None:
        """Issue what the admission lets in, and fill free slots."""
        while True:
            free = free_samples(
                open_samples=self.progress.open_samples,
                unjudged=self.progress.unjudged,
                limit=open_limit(per_version=self.size, max_staleness=self.bound),
                over_sampling=0,
                still_needed=1 << 40,
                engine_room=engine_room(slots=SLOTS, under_way=len(self.queue) + len(self.running), group=N),
            )
            if free < N:
                break
            self.number += 1
            prompt = self.again.popleft() if self.again else self.number % len(self.task.rewards)
            group = OpenGroup(group_id=f"g{self.number:08d}", prompt_id=str(prompt), n_samples=N, step=self.progress.active_step)
            self.progress.issued(group)
            self.registry[group.group_id] = group
            self.queue.extend((group, index) for index in range(N))
        while self.queue and len(self.running) < SLOTS:
            group, index = self.queue.popleft()
            self.entries += 1
            run = Running(group, index, self._draw(int(group.prompt_id)), self.now, [(self.step, self.now)])
            self.running[self.entries] = run
            heapq.heappush(self.ends, (self.now + run.answer.tokens, self.entries))

    def _next_end(self) -> None:
        self._begin()
        self.now, number = heapq.heappop(self.ends)
        run = self.running.pop(number)
        starts = [at for _, at in run.spans] + [self.now]
        spans = tuple(
            VersionSpan(step + 1, step, max(1, round(starts[i + 1] - starts[i])))
            for i, (step, _) in enumerate(run.spans)
            if starts[i + 1] > starts[i]
        )
        group_id = run.group.group_id
        task = SampleTask(
            sample_id=f"{group_id}/{run.index}", group_id=group_id, index=run.index, n_samples=N,
            prompt_id=run.group.prompt_id, prompt_tokens=NO_TOKENS, step=run.group.step,
        )  # fmt: skip
        response = Response(tokens=NO_TOKENS, logprobs=pack_floats([]), loss_mask=NO_TOKENS, spans=spans)
        member = Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=run.answer.reward)
        self.answers[task.sample_id] = run.answer
        self.ended += 1
        self.ended_tokens += run.answer.tokens
        if not self.table.knows(group_id):
            self.table.begin(group_id, self.registry[group_id])
        entry = Entry(id=f"{number}-0", stream=SCORED, readers="filter", fields={}, body=b"", size=0)
        assert self.table.add(entry, member) == "held"
        self._release(self.table.get(group_id), came=run.index)

    def _release(self, half: Half, came: int | None = None) -> None:
        """As actors.filter.actor does, without a judge."""
        if not leaves_now(half, policy=self.rule, step=self.step, bound=self.bound):
            return
        basis = half.basis(came if tips(half, policy=self.rule, step=self.step, bound=self.bound) else None)
        group_id, indexes = half.group_id, sorted(half.members)
        samples = tuple(half.members[i] for i in indexes)
        whole = not half.split and half.complete
        key, rest = group_id if whole else part_key(group_id, indexes), half.wanted - set(indexes)
        known = () if whole else tuple(half.known.values())
        if whole:
            self.left_whole += 1
        else:
            self.parted += not half.split
            base = msgspec.structs.replace(self.registry.pop(group_id), rewards=basis)
            heard = self.heard.setdefault(group_id, {})
            heard.update({i: s.reward for i, s in zip(indexes, samples, strict=True)})
            self.every[key] = tuple(heard.values())
            if rest:
                self.registry[group_id] = msgspec.structs.replace(base, members=tuple(sorted(rest)))
            else:
                del self.heard[group_id]
            self.registry[key] = msgspec.structs.replace(base, members=tuple(indexes))
        kept = GroupKept(
            group_id=group_id, prompt_id=samples[0].rollout.task.prompt_id, samples=samples, part="" if whole else key, known=known
        )
        self.progress.fold(GroupVerdict(group_id=group_id, prompt_id="", kept=True, members=() if whole else tuple(indexes)))
        self.table.release(half, indexes, basis)
        self.ready[key] = Part.of(kept, came=self.step)

    def _cut(self) -> tuple[tuple[str, ...], list[Trained]] | None:
        if sum(len(part.left) for part in self.ready.values()) < self.size:
            return None
        elsewhere: dict[int, int] | None = None
        if self.rule in PARTING:
            elsewhere = {}
            for key, group in self.registry.items():
                if key not in self.ready:
                    elsewhere[group.step] = elsewhere.get(group.step, 0) + len(group.indexes)
        made = cut(ready=self.ready, step=self.step, size=self.size, bound=self.bound, rule=self.rule, elsewhere=elsewhere)
        for key, _ in made.drop:
            self._drop(key)
        if not made.take:
            return None
        batch, ids = [], []
        for key, positions in made.take:
            part = self.ready[key]
            piece = part.cut(positions)
            every = self.every.get(key, piece.known)
            for scored in piece.samples:
                ids.append(scored.rollout.task.sample_id)
                answer = self.answers.pop(ids[-1])
                spans = scored.rollout.response.spans
                fresh = sum(s.n for s in spans if staleness(self.step, s.step) <= self.bound) / sum(s.n for s in spans)
                self.masked_tokens += round((1 - fresh) * answer.tokens)
                batch.append(Trained(piece.group_id, answer, fresh, piece.known, every))
            part.left = tuple(at for at in part.left if at not in positions)
            if part.left:
                left = tuple(part.group.samples[at].rollout.task.index for at in part.left)
                self.registry[key] = msgspec.structs.replace(self.registry[key], members=left)
                continue
            del self.ready[key], self.registry[key]
            self.every.pop(key, None)
        return tuple(ids), batch

    def _drop(self, key: str) -> None:
        part = self.ready.pop(key)
        del self.registry[key]
        self.every.pop(key, None)
        ids = tuple(s.rollout.task.sample_id for s in (part.group.samples[at] for at in part.left))
        self.masked_tokens += sum(self.answers.pop(i).tokens for i in ids)
        self.dropped += len(ids)
        self.progress.fold(GroupsGivenUp(groups=(), samples=ids))
        if self.rule == "drop":
            self.again.append(int(part.group.prompt_id))
