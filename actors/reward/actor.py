"""Reward room: scores finished rollouts.

Reads  rollouts, eval.rollouts (readers "reward")    Writes  scored, eval.scored    Owns  nothing that outlives it
With --group-rm all samples of a prompt are scored at once: entries wait here, pending, until their group is whole.
Score and acknowledgement share one commit: killed at any await it loses no sample and scores none twice downstream. A
scorer (or teacher) that raises, hangs or crashes costs its sample further attempts, then a dead letter, followed by a
RolloutLost, so that the group still closes. One that fails for every sample costs none: they wait, and the run ends with its
text. Where the same sample with a harmless answer is scored (blame.py) it does not fail for every sample: it is the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Literal

import msgspec

from actors.reward.blame import Probe
from actors.reward.sample import Reward, Sample, sample_of, settle
from actors.reward.scorer import Scorers, answer_of
from actors.reward.siblings import Siblings
from actors.reward.spec import RewardSpec, scorers_of, text_by
from actors.reward.teacher import Teacher
from actors.reward.verifier import tell_args
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.context import Context
from actors.runtime.deadline import beside
from actors.runtime.refusals import Streak
from actors.runtime.retry import NotItsFault
from bus import Commit, Entry, Out
from bus.errors import Poison, Transient
from bus.messages.base import Packed, pack_ints, unpack_ints
from bus.messages.events import EventKind
from bus.messages.samples import RolloutDone, RolloutLost, Scored
from bus.topology import EVAL_ROLLOUTS, EVAL_SCORED, ROLLOUTS, SCORED

SMOOTH = 0.1  # part of the newest in the smoothed time of a scoring
MOST_FAILED, GROUPS_FAILED = 16, 4  # attempts in a row, and groups among them; then it is not the samples


Judged = tuple[list[Reward], str, list[Packed | msgspec.UnsetType], str | msgspec.UnsetType]
"""Rewards, scorer, the teacher's log-probs, the answer of an evaluation sample."""


class RewardRoom:
    """The room: a consumer whose handler scores one sample."""

    def __init__(self, context: Context, spec: RewardSpec, scorers: Scorers, teacher: Teacher | None = None) -> None:
        self._context = context
        self._spec = spec
        self._scorers = scorers
        self._teacher = teacher
        self._text = text_by(spec.tokenizer_dir, skip_special_tokens=spec.skip_special_tokens)
        self._siblings: Siblings | None = Siblings() if spec.group_rm else None
        self._version = int(context.knobs.reward_version)  # of what is loaded
        self._reloading = asyncio.Lock()
        self._running: set[asyncio.Timeout] = set()
        self._until: float | None = None  # loop time at which samples at work are given up; None = not draining
        # A few more than can be at work keep the processes fed; more would only be leases that a peer could use.
        concurrency = spec.concurrency if scorers.capacity is None else scorers.capacity + min(scorers.capacity, 8)
        self._consumer = Consumer(
            context,
            [EVAL_ROLLOUTS, ROLLOUTS],
            "reward",
            on_dead=self._dead,
            concurrency=max(2, concurrency),
            rebuild=self._siblings.clear if self._siblings is not None else None,
            holds=self._siblings is not None,
        )
        self._probe = Probe(context.clock.monotonic)
        remedy = "Mend the scorer, its settings or the labels of the data set."
        self._failing = Streak(
            context.clock.monotonic, "scoring", remedy, most=MOST_FAILED, of=GROUPS_FAILED, patience_s=spec.patience_s,
            spares_s=spec.patience_s or 60.0,
        )  # fmt: skip

    async def run(self) -> None:
        """Until draining. Shutdown: 1 no new entries · 2 samples at work get half of the drain time · 3 what is not done then
        stays pending for a successor."""
        async with beside(self._hurry_at_drain()):
            await self._consumer.run(self.handle)

    async def _hurry_at_drain(self) -> None:
        """Waits for the wish to drain; then no sample may take longer than half of the drain time."""
        await self._context.draining.wait()
        self._until = asyncio.get_running_loop().time() + self._context.spec.drain_timeout_s / 2
        for scope in self._running:
            scope.reschedule(self._until)

    async def handle(self, entry: Entry, message: RolloutDone | RolloutLost) -> Commit | None:
        """Score a rollout; pass a lost one on. None = its siblings are not here yet, or it was not finished before the end of the
        drain; so it stays pending."""
        to_score = [(entry, message)] if isinstance(message, RolloutDone) else []
        if self._siblings is not None and entry.stream.name == ROLLOUTS.name:
            group_id = message.task.group_id if isinstance(message, RolloutDone) else message.group_id
            went_on = "lost" if isinstance(message, RolloutLost) else await self._went_on(group_id)
            if isinstance(message, RolloutLost) or went_on == "lost":
                return self._unscored(Commit(ack=(entry,), append=(_onward(entry, _zero(message)),)), group_id)
            to_score = self._siblings.add(entry, message) if not went_on else to_score
            self._context.note = f"{len(self._siblings)} groups wait for siblings"
            if not to_score:
                return None
        if isinstance(message, RolloutLost):
            return Commit(ack=(entry,), append=(_onward(entry, message),))
        began = self._context.clock.monotonic()
        try:
            async with asyncio.timeout_at(self._until) as scope:
                self._running.add(scope)
                try:
                    version = await self._reward_version()
                    rewards, scorer, taught, answer = await self._score(entry, [rollout for _, rollout in to_score])
                finally:
                    self._running.discard(scope)
        except TimeoutError:
            if scope.expired():
                return None
            raise
        took_s = self._context.clock.monotonic() - began
        self._context.count(f"scored/{scorer}", len(to_score))
        slowly = self._context.counters.get("score_s", took_s)
        self._context.counters["score_s"] = slowly + SMOOTH * (took_s - slowly)
        if self._siblings is not None:
            self._siblings.take(message.task.group_id)
        outs = [
            _onward(
                one,
                Scored(
                    rollout=rollout,
                    reward=reward.scalar,
                    rewards=reward.parts,
                    scorer=scorer,
                    score_s=took_s,
                    teacher_logprobs=logprobs,
                    reward_version=version or msgspec.UNSET,
                    answer=answer,
                ),
            )
            for (one, rollout), reward, logprobs in zip(to_score, rewards, taught, strict=True)
        ]
        # Not bounded: the filter holds half a group until its last sibling is here, and waiting for room would keep it out.
        return Commit(ack=[one for one, _ in to_score], append=outs)

    async def _reward_version(self) -> int:
        """The version to score under, loaded."""
        wanted = int(self._context.knobs.reward_version)
        if wanted != self._version:
            async with self._reloading:
                if wanted != self._version:
                    await self._scorers.reload()
                    self._version = wanted
                    await self._context.event(EventKind.REWARD_VERSION, f"samples are scored by version {wanted} from here on")
        return wanted

    async def _went_on(self, group_id: str) -> Literal["", "lost", "alone"]:
        """How siblings went on before this one, if they did: without a score, for one is lost, or scored alone, before the run was
        started again with group_rm; this one is not to wait for them then. Told by the filter's stream, which keeps them until the
        group is whole, and of those that have left it by what is open of the group."""
        assert self._siblings is not None
        if self._siblings.knows(group_id):
            return ""
        bus = self._context.bus
        opened = await bus.open_group(group_id)
        types = {entry.fields.get("type") for entry in await bus.scan_all(SCORED) if entry.fields.get("group") == group_id}
        # Last: from here on nothing is waited for, so a sibling that is lost later finds this one here. One that was lost before
        # may not be on the stream yet.
        if self._siblings.is_lost(group_id):
            return "lost"
        if types:
            return "lost" if "rollout.lost" in types else "alone"
        return "alone" if opened is not None and opened.members else ""

    def _unscored(self, commit: Commit, group_id: str) -> Commit:
        """The same, with all that is here of a group that will be dropped for a lost member."""
        held = self._siblings.lose(group_id) if self._siblings is not None else []
        here = {entry.id for entry in commit.ack}
        held = [(entry, rollout) for entry, rollout in held if entry.id not in here]
        outs = [_onward(entry, _zero(rollout)) for entry, rollout in held]
        return msgspec.structs.replace(commit, ack=(*commit.ack, *(e for e, _ in held)), append=(*commit.append, *outs))

    async def _dead(self, entry: Entry, message: RolloutDone | RolloutLost | None, error: str) -> Commit:
        """What follows a dead rollout: its group closes, and in a group that is scored together its siblings go on."""
        follow = await as_lost(self._context, dead)(entry, message, error)
        lost = [out.message for out in follow.append if isinstance(out.message, RolloutLost)]
        if self._siblings is None or not lost:
            return follow
        found = self._unscored(msgspec.structs.replace(follow, ack=(entry,)), lost[0].group_id)
        return msgspec.structs.replace(found, ack=[e for e in found.ack if e is not entry])  # that one: by whoever buries it

    async def _score(self, entry: Entry, rollouts: Sequence[RolloutDone]) -> Judged:
        """One attempt: rewards, scorer, the teacher's log-probs of training samples, each under the knob's deadline, and the answer
        of an evaluation sample. Failures that may pass are Transient while attempts are left."""
        timeout_s = float(self._context.knobs.reward_timeout_s)
        task = rollouts[0].task
        samples = tuple(sample_of(one, self._text, self._context.spec.run_seed) for one in rollouts)
        try:
            found = await self._judged(rollouts, samples, timeout_s)
        except (Transient, Poison) as error:
            self._context.count("scorer_failures")
            text = f"{type(error).__name__}: {error}"
            if self._failing.suspects(task.group_id) and await self._probe.blames_the_answer(
                lambda: self._harmless(rollouts, samples, timeout_s)
            ):
                self._failing.worked()
                self._context.count("answers_blamed")
            else:
                self._failing.failed(task.group_id, text, task.sample_id)
                if self._failing.for_all:
                    raise NotItsFault(str(error)) from error
            attempts = self._consumer.attempt(entry) if self._siblings is None else self._siblings.failed(task.group_id)
            if isinstance(error, Poison) or attempts <= self._spec.max_retries:
                raise
            raise Poison(f"attempt {attempts} was the last: {error}") from error
        self._failing.worked()
        return found

    async def _judged(self, rollouts: Sequence[RolloutDone], samples: Sequence[Sample], timeout_s: float) -> Judged:
        """The same, with `samples` for what was read of them. Raises Transient, Poison."""
        task = rollouts[0].task
        key = self._spec.reward_key
        if task.eval_name:
            key = str(task.metadata.get("reward_key") or self._spec.eval_reward_key or key)
        answer: str | msgspec.UnsetType = msgspec.UNSET
        taught: list[Packed | msgspec.UnsetType] = [msgspec.UNSET] * len(rollouts)
        if task.given_tokens is not msgspec.UNSET:  # supervised: nothing is to be judged
            return [Reward(0.0)] * len(rollouts), "data", taught, answer
        given = [one.episode.reward if one.episode else msgspec.UNSET for one in rollouts]
        if msgspec.UNSET not in given:  # by the rollout program
            values, name, default_key = given, "program", ""
        elif self._siblings is None:
            scorer = self._scorers.named(task.rm_type)
            values = [await scorer.score(samples[0], timeout_s)]
            name, default_key = scorer.name, scorer.default_key
            answer = answer_of(scorer, samples[0]) if task.eval_name else answer
        else:
            name, default_key = self._scorers.of_groups.name, self._scorers.of_groups.default_key
            values = await self._scorers.score_group(samples, timeout_s)
        rewards = [settle(value, key or default_key, name) for value in values]
        if self._teacher is not None and not task.eval_name:
            taught = [await self._teacher.logprobs(rollout, timeout_s) for rollout in rollouts]
        return rewards, name, taught, answer

    async def _harmless(self, rollouts: Sequence[RolloutDone], samples: Sequence[Sample], timeout_s: float) -> None:
        """What has failed, with harmless answers of one token."""
        plain = [self._scorers.harmless(one, rollouts[0].task.rm_type) for one in samples]
        await self._judged([_short(one) for one in rollouts], plain, timeout_s)


def dead(entry: Entry, lost: RolloutLost) -> Commit:
    """What follows a dead rollout."""
    return Commit(append=(_onward(entry, lost),))


def _short(rollout: RolloutDone) -> RolloutDone:
    """The same with the first token of its response alone."""
    tokens = pack_ints(unpack_ints(rollout.response.tokens)[:1])
    return msgspec.structs.replace(rollout, response=msgspec.structs.replace(rollout.response, tokens=tokens))


def _zero(message: RolloutDone | RolloutLost) -> Scored | RolloutLost:
    """A member of a group that will be dropped for a lost one."""
    return Scored(rollout=message, reward=0.0, scorer="none") if isinstance(message, RolloutDone) else message


def _onward(entry: Entry, message: Scored | RolloutLost) -> Out:
    return Out(SCORED if entry.stream.name == ROLLOUTS.name else EVAL_SCORED, message)


async def run(context: Context, spec: RewardSpec) -> None:
    """The reward's process."""
    tell_args({**context.knobs.values, **spec.hook_values})
    scorers = scorers_of(spec, context.count, context.refusals.add)
    if scorers.lacks_second_look:
        text = "math-verify is not installed: our own reading of an answer decides alone (pip install 'miles-async[math]')"
        await context.event(EventKind.MATH_RULE, text)
    async with AsyncExitStack() as open_:
        await open_.enter_async_context(scorers)
        teacher = await open_.enter_async_context(Teacher(spec.teacher_urls)) if spec.teacher_urls else None
        await RewardRoom(context, spec, scorers, teacher).run()
