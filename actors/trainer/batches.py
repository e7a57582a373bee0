"""The next batch: waits until it is complete, and until cutting it now breaks no promise of the staleness bound.

Reads  what the intake holds, the open groups    Owns  what a lowered bound or batch has cost while the run drains to it
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager

import msgspec

from actors.runtime.context import Context
from actors.runtime.deadline import within
from actors.runtime.run import RunEnds
from actors.runtime.staleness import Rule, bound_in_steps, rule_of
from actors.trainer.accounts import consumed_by
from actors.trainer.backend import StepResult
from actors.trainer.cut import Cut, Part, cut
from actors.trainer.intake import Intake
from bus import Commit
from bus.errors import UNREADABLE, BadMessage
from bus.knobs.live import KnobValues
from bus.messages.events import EventKind
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.reasons import DropReason
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait

READ = 64  # entries at once
LOOK_S = 0.1  # between two looks for entries while a step is trained; a blocking read would outlast the step
PATIENCE_S = 300.0  # without a new entry; then older samples under way are waited for no longer, and may lose tokens
PARTING: tuple[Rule, ...] = ("split", "member")  # rules under which groups leave the filter in parts


class Batch(msgspec.Struct, frozen=True):
    """Samples of one step in training order, by entry: its key, the part it is cut from, and the samples as one group. `bound` in
    steps. A recorded batch has no entries."""

    groups: tuple[GroupKept, ...]
    bound: int
    keys: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    images: dict[str, bytes] = {}  # pictures of its prompts, by blob


class Drain(msgspec.Struct, frozen=True):
    """A change after which more is open than is admitted: `what` it was, at which step, and the step after which it explains
    nothing more."""

    what: str
    since: int
    until: int


class Known(msgspec.Struct, frozen=True):
    """Live settings at the last look, and what drains since one of them was lowered; on the bus, since a trainer that starts again
    finds open what was admitted under those before. `bound` in steps, -1 = no look yet; `size`: samples of a batch."""

    bound: int = -1
    size: int = 0
    rule: Rule = "whole"
    drain: Drain | None = None


STATE_FIELD = "trainer.bound"


class Drained(msgspec.Struct):
    """What that has cost."""

    tokens: int = 0  # masked
    parts: int = 0  # of groups that these are of
    dropped: int = 0  # samples that had no other tokens
    since: str = "on the way"

    def text(self) -> str:
        masked = f"{self.tokens} tokens in {self.parts} parts of groups were masked"
        return f"{self.since} {masked} and {self.dropped} samples given up as too old"


class Batches:
    """Cuts batches from the intake. `interval`: steps between two published versions."""

    def __init__(self, context: Context, intake: Intake, *, interval: int, lookahead: int, ci_test: bool) -> None:
        self._context = context
        self._intake = intake
        self._interval = interval
        self._lookahead = lookahead
        self._ci_test = ci_test
        self._known = Known()
        self._first: int | None = None  # step of the first batch; behind a restored checkpoint more is open than the bound admits
        self._drained = Drained()
        self._restarts = -1  # of the server, at the last `check`; -1 = none yet, and a replay has none
        self.turned_s = 0.0  # of the last wait, how long the filter took to release what was on its last turn

    def bound(self, knobs: KnobValues) -> int:
        """The bound in steps."""
        return bound_in_steps(int(knobs.max_weight_staleness), self._interval)

    async def next(
        self, version: PolicyVersion, *, check: Callable[[], Awaitable[None]], idle: Callable[[], Awaitable[None]]
    ) -> Batch | None:
        """Waits for samples until a batch is complete; woken by the blocking read. None when draining. `check` runs before each
        look, `idle` before each wait."""
        with ExitStack() as wait:
            return await self._next(version, check, idle, wait)

    async def _next(
        self,
        version: PolicyVersion,
        check: Callable[[], Awaitable[None]],
        idle: Callable[[], Awaitable[None]],
        wait: ExitStack,
    ) -> Batch | None:
        """`wait` stays entered while it looks again after nothing came: it waits all along."""
        context, intake, step = self._context, self._intake, version.step
        began = came_at = context.clock.monotonic()
        self.turned_s, waits = 0.0, True
        while not context.draining.is_set():
            await check()
            self._restarts = context.bus.link.server_restarts
            while await intake.fetch(READ, 0.0, step=step):
                came_at = context.clock.monotonic()
            knobs = context.knobs
            bound = self.bound(knobs)
            rule = rule_of(str(knobs.staleness_policy), int(knobs.max_weight_staleness))
            size = int(knobs.rollout_batch_size) * int(knobs.n_samples_per_prompt)
            await self._hear(step=step, bound=bound, size=size, rule=rule)
            made = Cut(missing="the filter's word that all on its last turn has left it,")
            if rule not in PARTING or intake.turned >= version.id:
                if waits and rule in PARTING:
                    self.turned_s = context.clock.monotonic() - began
                waits = False
                patient = context.clock.monotonic() - came_at < PATIENCE_S
                ready = await self._of_one_version(size)
                made = await self._cut(ready, step=step, size=size, bound=bound, rule=rule, patient=patient)
            if made.drop:
                self._drained.dropped += sum(len(intake.ready[key].left) for key, _ in made.drop)
                await intake.give_up(made.drop, reissue=rule == "drop")
            if made.take:
                await self._promise(made, step=step, bound=bound, rule=rule)
                parts = tuple(intake.ready[key] for key, _ in made.take)
                return Batch(
                    groups=tuple(part.cut(at) for part, (_, at) in zip(parts, made.take, strict=True)),
                    bound=bound,
                    keys=tuple(key for key, _ in made.take),
                    parts=parts,
                )
            await idle()
            wait.close()
            wait.enter_context(context.waiting(Wait.GROUPS, missing=made.missing, step=step + 1))
            if await intake.fetch(READ, 0.5, step=step):
                came_at = context.clock.monotonic()
                wait.close()
        return None

    @asynccontextmanager
    async def ahead(self, tasks: asyncio.TaskGroup, *, step: int) -> AsyncIterator[None]:
        """Meanwhile what comes for `step`, the next one, is taken in, so that its batch need not wait for that."""
        ended = asyncio.Event()
        reads = tasks.create_task(self._read_ahead(step, ended), name="read ahead")
        try:
            yield
        finally:
            ended.set()
            await reads

    async def _read_ahead(self, step: int, ended: asyncio.Event) -> None:
        """Woken by time and the end. From a server that restarted nothing is taken before the next `check`."""
        link = self._context.bus.link
        while not ended.is_set() and link.server_restarts == self._restarts:
            if not await self._intake.fetch(READ, 0.0, step=step):
                await within(LOOK_S, ended)

    async def _of_one_version(self, size: int) -> dict[str, Part]:
        """What is ready, of one version of the reward: while that is enough for a batch, what earlier versions judged; then the
        rest of that is given up, its prompts are issued again, and the present version goes on."""
        ready, present = self._intake.ready, int(self._context.knobs.reward_version)
        old = {key: part for key, part in ready.items() if reward_version(part) != present}
        if not old:
            return ready
        oldest = min(map(reward_version, old.values()))
        alike = {key: part for key, part in old.items() if reward_version(part) == oldest}
        if sum(len(part.left) for part in alike.values()) >= size:
            return alike
        await self._intake.give_up(tuple((key, DropReason.REWARD_VERSION) for key in alike), reissue=True)
        return await self._of_one_version(size)

    async def _cut(self, ready: dict[str, Part], *, step: int, size: int, bound: int, rule: Rule, patient: bool) -> Cut:
        """What is open elsewhere is looked up only when there is enough for a batch. Without patience nothing under way is
        waited for."""
        intake = self._intake
        elsewhere: dict[int, int] | None = None
        window: frozenset[str] | None = None
        if rule in PARTING and intake.n_ready >= size:
            elsewhere = intake.elsewhere(await self._listed()) if patient else {}
        if rule == "wait":  # no straggler is passed by more than `lookahead` groups
            left = self._intake.still_open(await self._listed())
            window = first_groups((self._context.bus.group_of(*listed) for listed in left.items()), size, self._lookahead)
        return cut(ready=ready, step=step, size=size, bound=bound, rule=rule, elsewhere=elsewhere, window=window)

    async def _listed(self) -> dict[str, bytes]:
        return await self._context.bus.hash_of(self._context.bus.keys.open_groups)

    async def _hear(self, *, step: int, bound: int, size: int, rule: Rule) -> None:
        """Say so when live settings admit less than is open by now, or promise what those before did not."""
        if self._known.bound < 0:
            self._known = await self._remembered()
            self._drained.since = "since the trainer's start"
        known, drain = self._known, self._known.drain
        changed: dict[EventKind, str] = {}
        if 0 <= bound < known.bound:
            changed[EventKind.BOUND_LOWERED] = f"from {known.bound} to {bound} steps"
        if size < known.size:
            changed[EventKind.BATCH_LOWERED] = f"from {known.size} to {size} samples"
        if known.bound > 0 and rule in PARTING and known.rule not in PARTING:
            changed[EventKind.RULE_CHANGED] = f"from {known.rule} to {rule}"
        if changed:
            too_many = max(0, (known.bound + 1) * known.size - (bound + 1) * size)
            what, until = ", ".join(changed.values()), step - (-too_many // size) + bound
            drain, self._drained = Drain(what, step, max(until, drain.until if drain else 0)), Drained()
            text = f"{what}: samples that wait past the bound lose tokens until the run has drained to it"
            await self._context.event(next(iter(changed)), text)
        await self._remember(Known(bound, size, rule, drain))

    async def _remembered(self) -> Known:
        """Of the trainer before this one; nothing where that cannot be read, as of another release."""
        try:
            return msgspec.json.decode(await self._context.bus.state(STATE_FIELD), type=Known)
        except UNREADABLE:
            return Known()

    async def _remember(self, known: Known) -> None:
        if known != self._known:
            self._known = known
            await self._context.bus.commit(Commit(state={STATE_FIELD: msgspec.json.encode(known).decode()}))

    async def _promise(self, made: Cut, *, step: int, bound: int, rule: Rule) -> None:
        """Say so when finished samples wait past the bound, which only changed settings or a restored checkpoint explain."""
        self._first = step if self._first is None else self._first
        explained = self._known.drain is not None or step <= self._first + bound
        if rule not in PARTING or not made.left_behind or explained:
            return
        self._context.count("left_behind", made.left_behind)
        text = f"step {step + 1}: {made.left_behind} finished samples are on their last turn and not in the batch"
        await self._context.event(EventKind.BOUND_NOT_KEPT, f"{text}; their oldest tokens will be masked")
        if self._ci_test:
            raise RunEnds(f"{text} (--ci-test)")

    async def done(self, batch: Batch, result: StepResult, *, step: int) -> None:
        """Book a trained batch. `step` updates were inside the weights."""
        pieces = list(zip(batch.keys, batch.parts, batch.groups, strict=True))
        consumed = consumed_by(pieces, result, step=step, bound=batch.bound)
        self._intake.trained(consumed, step + 1)
        if (drain := self._known.drain) is None:
            return
        aged = [pair for item in consumed for pair in item.aged.values()]
        self._drained.parts += len(aged)
        self._drained.tokens += sum(tokens for _, tokens in aged)
        over = any(part.oldest(step + 1) > batch.bound for part in self._intake.ready.values())
        # What was open when it changed is over the bound, or gone, when so many steps are done.
        if step >= drain.until or (step >= drain.since + batch.bound and not over):
            await self._context.event(EventKind.BOUND_REACHED, f"{drain.what}; {self._drained.text()}")
            await self._remember(msgspec.structs.replace(self._known, drain=None))


def first_groups(untrained: Iterable[OpenGroup], size: int, lookahead: int) -> frozenset[str]:
    """The groups first issued that hold a batch of `size` samples between them, and the lookahead - 1 after those. It counts
    samples: under a rule that held before, some of a group may have been trained."""
    samples: dict[str, int] = {}
    for opened in untrained:
        samples[opened.group_id] = samples.get(opened.group_id, 0) + len(opened.indexes)
    order = sorted(samples)
    held = list(itertools.accumulate(samples[group] for group in order))
    return frozenset(order[: bisect_left(held, size) + max(1, lookahead)])


def reward_version(part: Part) -> int:
    """The version of the reward that judged it."""
    return max((part.group.samples[at].reward_version or 0 for at in part.left), default=0)


async def pictures_of(context: Context, groups: Sequence[GroupKept]) -> dict[str, bytes]:
    """Bytes of the groups' pictures, by blob. One that is gone is counted and empty: its groups are refused and given up."""

    async def get(blob: str) -> bytes:
        try:
            return await context.bus.blobs.get(blob)
        except BadMessage as error:
            context.count("pictures_lost")
            context.log.warning("a picture is gone: %s", error)
            return b""

    tasks = (scored.rollout.task for group in groups for scored in group.samples)
    blobs = sorted({picture.blob for task in tasks for picture in task.pictures})
    return dict(zip(blobs, await asyncio.gather(*map(get, blobs)), strict=True))


def sample_ids(groups: Sequence[GroupKept]) -> tuple[str, ...]:
    """Ids of a batch's samples in training order."""
    return tuple(s.sample_id for g in groups for s in g.samples)
