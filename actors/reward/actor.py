"""Reward room: scores finished rollouts.

Reads  rollouts, eval.rollouts (readers "reward")    Writes  scored, eval.scored    Owns  nothing that outlives it
Score and acknowledgement share one commit: killed at any await it loses no sample and scores none twice downstream. A
scorer (or teacher) that raises, hangs or crashes costs its sample further attempts, then a dead letter, followed by a
RolloutLost, so that the group still closes. One that fails for every sample costs none: they wait, and the run ends with its
text.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from actors.reward.sample import Reward, Sample, settle
from actors.reward.scorer import Scorers
from actors.reward.teacher import Teacher
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.context import Context
from actors.runtime.refusals import Row
from actors.runtime.retry import NotItsFault
from actors.runtime.run import Refused
from bus import Commit, Entry, Out
from bus.errors import Poison, Transient
from bus.messages.base import Packed, unpack_ints
from bus.messages.samples import Episode, RolloutDone, RolloutLost, Scored
from bus.topology import EVAL_ROLLOUTS, EVAL_SCORED, ROLLOUTS, SCORED

MOST_FAILED, GROUPS_FAILED = 16, 4  # attempts in a row, and groups among them; then it is not the samples


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings. The deadline of one attempt is the knob reward_timeout_s."""

    tokenizer_dir: str  # holds tokenizer.json
    rm_type: str  # scorer of samples that name none
    custom_rm_path: str  # function(sample: dict) -> float | dict, sync or async; replaces rm_type
    rm_url: str  # for rm_type remote_rm
    reward_key: str  # which part of a table is the reward
    eval_reward_key: str  # the same for evaluation; empty = reward_key
    skip_special_tokens: bool = True
    n_workers: int = 2  # verifier processes of a custom function
    concurrency: int = 32  # samples at once when the scorer sets no bound
    max_retries: int = 3  # further attempts before the dead letter; max_deliveries of the bus bounds it too
    patience_s: float = 60.0  # with a scorer that fails for every sample; then the run ends with its text
    boot_deadline_s: float = 60.0  # for a verifier process to load its function
    teacher_urls: tuple[str, ...] = ()  # servers asked for log-probs of every training sample; empty = none


class RewardRoom:
    """The room: a consumer whose handler scores one sample."""

    def __init__(self, context: Context, spec: RewardSpec, scorers: Scorers, teacher: Teacher | None = None) -> None:
        self._context = context
        self._spec = spec
        self._scorers = scorers
        self._teacher = teacher
        self._tokenizer = _load_tokenizer(spec.tokenizer_dir)
        self._running: set[asyncio.Timeout] = set()
        self._until: float | None = None  # loop time at which samples at work are given up; None = not draining
        # A few more than can be at work keep the processes fed; more would only be leases that a peer could use.
        concurrency = spec.concurrency if scorers.capacity is None else scorers.capacity + min(scorers.capacity, 8)
        self._consumer = Consumer(
            context, [EVAL_ROLLOUTS, ROLLOUTS], "reward", on_dead=as_lost(context, dead), concurrency=max(2, concurrency)
        )
        remedy = "Mend the scorer, its settings or the labels of the data set."
        self._failing = Row(
            context.clock.monotonic, "scoring", remedy, most=MOST_FAILED, of=GROUPS_FAILED, patience_s=spec.patience_s
        )

    async def run(self) -> None:
        """Until draining. Shutdown: 1 no new entries · 2 samples at work get half of the drain time · 3 what is not done then
        stays pending for a successor."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._hurry_at_drain(), name="drain")
            await self._consumer.run(self.handle)
            watch.cancel()

    async def _hurry_at_drain(self) -> None:
        """Waits for the wish to drain; then no sample may take longer than half of the drain time."""
        await self._context.draining.wait()
        self._until = asyncio.get_running_loop().time() + self._context.spec.drain_timeout_s / 2
        for scope in self._running:
            scope.reschedule(self._until)

    async def handle(self, entry: Entry, message: RolloutDone | RolloutLost) -> Commit | None:
        """Score a rollout; pass a lost one on. None = not finished before the end of the drain, so it stays pending."""
        if isinstance(message, RolloutLost):
            return Commit(ack=(entry,), append=(_onward(entry, message),))
        began = self._context.clock.monotonic()
        try:
            async with asyncio.timeout_at(self._until) as scope:
                self._running.add(scope)
                try:
                    reward, scorer, taught = await self._score(entry, message)
                finally:
                    self._running.discard(scope)
        except TimeoutError:
            if scope.expired():
                return None
            raise
        scored = Scored(
            rollout=message,
            reward=reward.scalar,
            rewards=reward.parts,
            scorer=scorer,
            score_s=self._context.clock.monotonic() - began,
            teacher_logprobs=taught,
        )
        self._context.count(f"scored/{scorer}")
        # Not bounded: the filter holds half a group until its last sibling is here, and waiting for room would keep it out.
        return Commit(ack=(entry,), append=(_onward(entry, scored),))

    async def _score(self, entry: Entry, rollout: RolloutDone) -> tuple[Reward, str, Packed | msgspec.UnsetType]:
        """One attempt: reward, scorer, and the teacher's log-probs of a training sample, each under the knob's deadline.
        Failures that may pass are Transient while attempts are left."""
        timeout_s = float(self._context.knobs.reward_timeout_s)
        key = self._spec.reward_key
        if rollout.task.eval_name and self._spec.eval_reward_key:
            key = self._spec.eval_reward_key
        taught: Packed | msgspec.UnsetType = msgspec.UNSET
        try:
            given = rollout.episode.reward if rollout.episode else msgspec.UNSET
            if given is not msgspec.UNSET:  # by the rollout program
                name, reward = "program", settle(given, key, "rollout program")
            else:
                scorer = self._scorers.named(rollout.task.rm_type)
                value = await scorer.score(self._sample(rollout), timeout_s)
                name, reward = scorer.name, settle(value, key or scorer.default_key, scorer.name)
            if self._teacher is not None and not rollout.task.eval_name:
                taught = await self._teacher.logprobs(rollout, timeout_s)
        except (Transient, Poison) as error:
            self._context.count("scorer_failures")
            self._failing.failed(rollout.task.group_id, f"{type(error).__name__}: {error}")
            if self._failing.for_all:
                raise NotItsFault(str(error)) from error
            if isinstance(error, Poison) or entry.deliveries <= self._spec.max_retries:
                raise
            raise Poison(f"attempt {entry.deliveries} was the last: {error}") from error
        self._failing.worked()
        return reward, name, taught

    def _sample(self, rollout: RolloutDone) -> Sample:
        task, episode = rollout.task, rollout.episode or Episode()
        answer = episode.answer
        return Sample(
            sample_id=task.sample_id,
            prompt=task.prompt_text or self._text(task.prompt_tokens),
            response=self._text(rollout.response.tokens) if answer is msgspec.UNSET else answer,
            label=task.label,
            metadata=episode.metadata | task.metadata,
            n_tokens=rollout.response.n_tokens,
            finish=rollout.finish,
            run_seed=self._context.spec.run_seed,
        )

    def _text(self, tokens: Packed) -> str:
        """int32 token ids [n] to text."""
        return str(self._tokenizer.decode(unpack_ints(tokens), skip_special_tokens=self._spec.skip_special_tokens))


def dead(entry: Entry, lost: RolloutLost) -> Commit:
    """What follows a dead rollout."""
    return Commit(append=(_onward(entry, lost),))


def _onward(entry: Entry, message: Scored | RolloutLost) -> Out:
    return Out(SCORED if entry.stream.name == ROLLOUTS.name else EVAL_SCORED, message)


def _load_tokenizer(folder: str) -> Tokenizer:
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise Refused(f"tokenizer_dir {folder!r} has no tokenizer.json; give the model's directory.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class than this
        raise Refused(f"{path} is no tokenizer: {error}") from error


async def run(context: Context, spec: RewardSpec) -> None:
    """The reward's process."""
    scorers = Scorers(
        rm_type=spec.rm_type,
        custom_rm_path=spec.custom_rm_path,
        rm_url=spec.rm_url,
        n_workers=spec.n_workers,
        boot_deadline_s=spec.boot_deadline_s,
        count=context.count,
    )
    if scorers.lacks_second_look:
        text = "math-verify is not installed: our own reading of an answer decides alone (pip install 'miles-async[math]')"
        await context.event("math rule", text)
    async with AsyncExitStack() as open_:
        await open_.enter_async_context(scorers)
        teacher = await open_.enter_async_context(Teacher(spec.teacher_urls)) if spec.teacher_urls else None
        await RewardRoom(context, spec, scorers, teacher).run()
