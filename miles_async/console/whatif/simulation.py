"""A run in simulated time: what is issued, let go, trained and dropped is decided by the rooms' own code
(actors.sampler.admission and progress, actors.filter.groups, actors.trainer.cut); this file brings time.

Times come from `SimulatedPace`, samples from an endless iterator. Not simulated: failures, evaluations, checkpoints other than as
seconds between two steps, the room of the bus.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from actors.filter.groups import GroupTable, Half, leaves_now, tips
from actors.generation.slots import LOOK_S, Limits
from actors.runtime.staleness import bound_in_steps, rule_of
from actors.sampler.admission import engine_room, group_credits
from actors.sampler.progress import SamplerProgress
from actors.trainer.batches import PARTING
from actors.trainer.cut import Part, cut
from bus.messages.active import PolicyActive
from bus.messages.base import EMPTY
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup, part_key
from bus.messages.policy import GroupsGivenUp, StepDone
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import PolicyVersion
from bus.streams.entry import Entry
from bus.topology import SCORED
from miles_async.console.whatif.engines import NEVER, Engines, SimulatedSample, SimulatedWorker
from miles_async.console.whatif.outcome import Seen, SimulatedOutcome
from miles_async.console.whatif.setup import DrawnGroup, SimulatedKnobs, SimulatedPace

NO_END = 1 << 40  # steps: the run goes on for ever, so that its end is not counted
EVENTS_A_SAMPLE = 64  # far more than any sample needs; then the run stands still
MAX_WAVES = 16  # rollout batches that are dropped in a row, as the sampler counts them


class Stands(Exception):
    """The simulated run makes no further step; the text says what the trainer waits for."""


class Simulation:
    """One run; `play` it once."""

    def __init__(self, knobs: SimulatedKnobs, pace: SimulatedPace, groups: Iterator[DrawnGroup], chance: Random) -> None:
        self._knobs, self._pace, self._groups, self._chance = knobs, pace, groups, chance
        self._engines = Engines(knobs, pace.slowdown)
        self._rule = rule_of(knobs.staleness_policy, knobs.max_weight_staleness)
        self._bound = bound_in_steps(knobs.max_weight_staleness, knobs.update_weights_interval)
        self._progress, self._table = SamplerProgress(keeps=False), GroupTable()
        self._drawn: dict[str, DrawnGroup] = {}
        self._again: deque[DrawnGroup] = deque()  # prompts that were given up and start again
        self._untrained: dict[str, int] = {}  # group -> samples that no step has trained, in the order of issue
        self._away: Counter[int] = Counter()  # samples that are not with the trainer, by the step of their issue
        self._ready: dict[str, Part] = {}
        self._n_ready = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._step = self._issued = self._on_way = self._scored = 0
        self._training, self._turned, self._free_at = False, True, 0.0
        self._starts = self._warm = 0
        self._news = False  # since the last look for a batch
        self._missing = ""
        self._seen = Seen(0.0, self._engines)
        self._share = self._told = (-1, 0.0)  # newest step, and share of its batch that was masked; what workers have heard of it

    # -- time -----------------------------------------------------------------------------------------------------------

    def play(self, steps: int, warm: int) -> SimulatedOutcome:
        """`steps` that count, after `warm` that do not. Stands: a step does not come."""
        for worker in self._engines.workers:
            self._activate(worker, 0)
        self._warm = warm
        if self._knobs.auto is not None:
            self._in(LOOK_S, partial(self._look_at_engines, self._knobs.auto))
        left = EVENTS_A_SAMPLE * self._knobs.size * (steps + warm + self._bound + 1)
        while self._starts <= steps + warm:
            self._fill()
            starts = self._starts
            self._cut()
            if self._starts > starts:
                continue  # a step that takes no time has freed credits already
            end, worker = self._engines.next_end()
            at = min(end, self._events[0][0] if self._events else NEVER)
            left -= 1
            if at == NEVER or not left:
                raise Stands(self._missing or "samples, and none is issued")
            self._engines.advance(at)
            self._now = at
            if end <= at:
                self._end(worker)
            else:
                heapq.heappop(self._events)[2]()
        return self._seen.outcome(self._now, self._knobs, self._pace, self._engines, steps)

    def _in(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds > 0:
            heapq.heappush(self._events, (self._now + seconds, next(self._count), call))
        else:
            call()

    def _one(self, values: tuple[float, ...]) -> float:
        return self._chance.choice(values)

    # -- sampler and engines --------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """As the sampler's `_fill`, then into the slots."""
        knobs, progress, engines = self._knobs, self._progress, self._engines
        group = knobs.n_samples_per_prompt
        if progress.drops_in_a_row >= MAX_WAVES * group * max(knobs.rollout_batch_size, knobs.over_sampling_batch_size):
            raise Stands("samples that the filter keeps")
        room = engine_room(slots=engines.slots, under_way=engines.under_way + self._on_way, group=group)
        if room > 0:
            credits = group_credits(
                bound=knobs.max_weight_staleness,
                interval=knobs.update_weights_interval,
                batch=knobs.rollout_batch_size,
                over=knobs.over_sampling_batch_size,
                group=group,
                lookahead=knobs.staleness_lookahead if self._rule == "wait" else 0,
                open_samples=progress.open_samples,
                untrained=progress.untrained,
                coming=progress.coming(knobs.update_weights_interval),
                unjudged=progress.unjudged,
                steps_left=NO_END,
            )
            for _ in range(min(credits, -(-room // group))):
                self._issue(group)
        engines.fill()

    def _issue(self, n: int) -> None:
        self._issued += 1
        name = f"g{self._issued:07d}"
        opened = OpenGroup(group_id=name, prompt_id="", n_samples=n, step=self._progress.active_step)
        drawn = self._drawn[name] = self._again.popleft() if self._again else next(self._groups)
        self._progress.issued(opened)
        self._untrained[name] = n
        self._away[opened.step] += n
        self._on_way += n
        self._in(self._pace.hop_s, partial(self._arrive, opened, drawn))

    def _arrive(self, opened: OpenGroup, drawn: DrawnGroup) -> None:
        self._on_way -= len(drawn.members)
        for index, draw in enumerate(drawn.members):
            self._engines.issue(SimulatedSample(opened, index, draw))

    def _end(self, worker: SimulatedWorker) -> None:
        run = self._engines.end(worker)
        if run is not None:
            self._seen.work += run.draw.seconds
            self._in(2 * self._pace.hop_s + run.draw.score_s, partial(self._judge, run))

    def _activate(self, worker: SimulatedWorker, step: int) -> None:
        if step <= worker.step:
            return
        self._engines.load(worker, step, self._one(self._pace.pause_s) if step else 0.0, abort=self._knobs.aborts)
        serving = {w.name: w.step + 1 for w in self._engines.workers if w.step >= 0}
        newest = max(serving.values())
        said = PolicyActive(
            version=PolicyVersion(newest, newest - 1),
            serving=serving,
            masked_step=self._share[0],
            masked_fraction=self._share[1],
        )
        self._in(self._pace.hop_s if step else 0.0, partial(self._hear, said))

    def _hear(self, said: PolicyActive) -> None:
        self._progress.fold(said)
        self._told = (said.masked_step, said.masked_fraction)

    def _look_at_engines(self, limits: Limits) -> None:
        self._engines.look(limits, *self._told)
        if self._events or self._engines.running:  # else nothing will ever come
            self._in(LOOK_S, partial(self._look_at_engines, limits))

    # -- filter ---------------------------------------------------------------------------------------------------------

    def _judge(self, run: SimulatedSample) -> None:
        """A scored sample reaches the filter."""
        group_id = run.group.group_id
        task = SampleTask(
            sample_id=f"{group_id}/{run.index}", group_id=group_id, index=run.index, n_samples=run.group.n_samples,
            prompt_id="", prompt_tokens=EMPTY, step=run.group.step,
        )  # fmt: skip
        done = RolloutDone(task=task, response=Response(spans=run.spans()), finish="stop")
        if not self._table.knows(group_id):
            self._table.begin(group_id, run.group)
        self._scored += 1
        entry = Entry(id=f"{self._scored}-0", stream=SCORED, readers="filter", fields={}, body=b"", size=0)
        self._table.add(entry, Scored(rollout=done, reward=0.0))
        self._release(self._table.get(group_id), came=run.index)

    def _release(self, half: Half, came: int | None = None) -> None:
        """As the filter's `_release`; what its judge says was drawn with the group."""
        rule, step, bound = self._rule, self._step, self._bound
        if not leaves_now(half, policy=rule, step=step, bound=bound):
            return
        basis = half.basis(came if tips(half, policy=rule, step=step, bound=bound) else None)
        group_id, indexes = half.group_id, sorted(half.members)
        samples = tuple(m for i in indexes if isinstance(m := half.members[i], Scored))
        whole = not half.split and half.complete
        reason = self._drawn[group_id].reason
        members = () if whole else tuple(indexes)
        self._progress.fold(
            GroupVerdict(group_id=group_id, prompt_id="", kept=not reason, reason=reason, n_samples=len(samples), members=members)
        )
        if reason:
            self._away[half.opened.step] -= len(samples)
            self._gone(group_id, reason, len(samples))
        else:
            known = () if whole else tuple(half.known.values())
            key = group_id if whole else part_key(group_id, indexes)
            kept = GroupKept(group_id=group_id, prompt_id="", samples=samples, part="" if whole else key, known=known)
            self._in(self._pace.hop_s, partial(self._keep, key, kept, half.opened.step))
        self._table.release(half, indexes, basis)

    def _keep(self, key: str, kept: GroupKept, issued: int) -> None:
        """A group or part reaches the trainer."""
        self._ready[key] = Part.of(kept, came=self._step + self._training)
        self._away[issued] -= len(kept.samples)
        self._n_ready += len(kept.samples)
        self._news = self._n_ready >= self._knobs.size or self._rule == "drop"

    def _gone(self, group_id: str, reason: str, n: int) -> None:
        self._seen.drop(reason, n)
        self._closed(group_id, n)

    def _closed(self, group_id: str, n: int) -> None:
        self._untrained[group_id] -= n
        if not self._untrained[group_id]:
            del self._untrained[group_id], self._drawn[group_id]

    # -- trainer --------------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Begin a step if the trainer's cut gives a batch."""
        if self._training or self._now < self._free_at or not (self._turned and self._news):
            return
        self._news = False
        knobs, step = self._knobs, self._step
        window: frozenset[str] | None = None
        if self._rule == "wait":
            first = knobs.rollout_batch_size + max(1, knobs.staleness_lookahead) - 1
            window = frozenset(itertools.islice(self._untrained, first))
        elsewhere = dict(+self._away) if self._rule in PARTING else None
        made = cut(
            ready=self._ready,
            step=step,
            size=knobs.size,
            bound=self._bound,
            rule=self._rule,
            elsewhere=elsewhere,
            window=window,
        )
        self._missing = made.missing
        for key, reason in made.drop:
            self._give_up(key, reason)
        if made.take:
            self._train(made.take)

    def _give_up(self, key: str, reason: str) -> None:
        """As the trainer's intake; under `drop` the prompts of whole groups start again."""
        part = self._ready.pop(key)
        self._n_ready -= len(part.left)
        group_id = part.group.group_id
        if self._rule == "drop" and not part.group.part and len(part.left) == len(part.group.samples):
            self._again.append(self._drawn[group_id])
        ids = tuple(part.group.samples[at].sample_id for at in part.left)
        self._progress.fold(GroupsGivenUp(groups=((group_id, reason),), samples=ids))
        self._gone(group_id, reason, len(ids))

    def _train(self, take: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        ids: list[str] = []
        tokens = masked = 0
        self._seen.wait += self._now - self._free_at
        self._starts += 1
        if self._starts == self._warm + 1:
            self._seen = Seen(self._now, self._engines)
        for key, positions in take:
            part = self._ready[key]
            for at in positions:
                rollout = part.group.samples[at].rollout
                ids.append(rollout.task.sample_id)
                tokens += rollout.n_made
                masked += self._seen.train(rollout, self._step, self._bound)
            self._seen.groups.setdefault(part.group.group_id, self._table.knows(part.group.group_id))
            part.left = tuple(at for at in part.left if at not in positions)
            self._n_ready -= len(positions)
            if not part.left:
                del self._ready[key]
            self._closed(part.group.group_id, len(positions))
        self._training, self._share = True, (self._step, masked / max(1, tokens))
        pace = self._pace
        seconds = pace.train_s + pace.train_token_s * tokens + self._one(pace.train_noise_s)
        self._in(seconds, partial(self._done, tuple(ids)))

    def _done(self, ids: tuple[str, ...]) -> None:
        pace, before = self._pace, self._step
        self._step += 1
        self._training, self._turned = False, self._rule not in PARTING
        version = PolicyVersion(self._step + 1, self._step)
        self._progress.fold(
            StepDone(step=self._step, version=version, trained_on=PolicyVersion(before + 1, before), groups=(), samples=ids)
        )
        if self._step % self._knobs.update_weights_interval == 0:
            for worker in self._engines.workers:
                self._in(self._one(pace.publish_s), partial(self._activate, worker, self._step))
        between = self._one(pace.between_s)
        self._free_at = self._now + between
        if self._turned:
            self._in(between, self._look)
        else:
            self._in(between + self._one(pace.turned_s) - pace.hop_s, self._turn)

    def _turn(self) -> None:
        """The filter has heard of the step and lets go what is on its last turn; its word follows that to the trainer."""
        for half in self._table.halves():
            self._release(half)
        self._in(self._pace.hop_s, self._look)

    def _look(self) -> None:
        self._turned = self._news = True
