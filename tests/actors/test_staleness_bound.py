"""The staleness bound: admission, serving, the filter's last turns and the cut simulated together in random order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.filter.groups import GroupTable, leaves_now
from actors.sampler.admission import engine_room, free_samples, open_limit
from actors.sampler.progress import SamplerProgress
from actors.trainer.cut import Part, cut
from bus.messages.active import PolicyActive
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup, part_key
from bus.messages.policy import Restored, StepDone
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.streams.entry import Entry
from bus.topology import SCORED


def scored(group_id: str, index: int, steps: list[int], *, n: int = 1, reward: float = 1.0, issued: int = 0) -> Scored:
    """A sample with one token from each of these steps."""
    task = SampleTask(
        sample_id=f"{group_id}/{index}",
        group_id=group_id,
        index=index,
        n_samples=n,
        prompt_id="p0",
        prompt_tokens=memoryview(b""),
        step=issued,
    )
    response = Response(
        tokens=pack_ints([0] * len(steps)),
        logprobs=pack_floats([0.0] * len(steps)),
        loss_mask=memoryview(b"\x01" * len(steps)),
        spans=tuple(VersionSpan(step + 1, step, 1) for step in steps),
    )
    return Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=reward)


def part(*samples: Scored, came: int = 0, **fields: object) -> Part:
    group_id = samples[0].rollout.task.group_id
    return Part.of(GroupKept(group_id=group_id, prompt_id="p0", samples=samples, **fields), came=came)


class House:
    """Sampler, workers, filter and trainer by their own pure parts, one event at a time. `rule` split or member."""

    def __init__(self, *, rule: str, bound: int, size: int, n: int, workers: int, slots: int) -> None:
        self.went_back = False  # more is open then than the bound admits, until the run has drained to it
        self.rule, self.bound, self.size, self.n, self.slots = rule, bound, size, n, slots
        self.progress = SamplerProgress()
        self.serving = [0] * workers
        self.queue: list[tuple[OpenGroup, int]] = []
        self.running: list[tuple[OpenGroup, int, int, list[int]]] = []  # group, index, worker, steps of its tokens
        self.table = GroupTable()
        self.registry: dict[str, OpenGroup] = {}
        self.ready: dict[str, Part] = {}
        self.history: dict[int, list[tuple[str, OpenGroup, Part]]] = {}  # step -> what it trained, as it was
        self.step = self.issued = self.ended = self.trained = self.outlasted = self.entries = 0
        self.activate(0)

    def activate(self, worker: int) -> None:
        """One worker loads the newest weights; the first one makes them served."""
        self.serving[worker] = self.step
        best = max(self.serving)
        self.progress.fold(PolicyActive(version=PolicyVersion(best + 1, best), serving={"w": best + 1}))

    def issue(self) -> None:
        while (
            free_samples(
                open_samples=self.progress.open_samples,
                untrained=self.progress.untrained,
                unjudged=self.progress.unjudged,
                limit=open_limit(per_version=self.size, max_staleness=self.bound),
                over_sampling=0,
                still_needed=10_000_000,
                engine_room=engine_room(slots=self.slots, under_way=len(self.queue) + len(self.running), group=self.n),
            )
            >= self.n
        ):
            self.issued += 1
            group = OpenGroup(group_id=f"g{self.issued:07d}", prompt_id="p0", n_samples=self.n, step=self.progress.active_step)
            self.progress.issued(group)
            self.registry[group.group_id] = group
            self.queue += [(group, index) for index in range(self.n)]

    def begin(self, worker: int) -> None:
        """A worker takes what waits longest among what it may begin."""
        for at, (group, index) in enumerate(self.queue):
            if len(self.running) < self.slots and min(group.step, self.progress.active_step) <= self.serving[worker]:
                del self.queue[at]
                self.running.append((group, index, worker, [self.serving[worker]]))
                return

    def finish(self, choice: int) -> None:
        """Some running sample ends; its last token is of what its worker serves by now."""
        if not self.running:
            return
        group, index, worker, steps = self.running.pop(choice % len(self.running))
        steps.append(max(steps[-1], self.serving[worker]))
        member = scored(group.group_id, index, steps, n=self.n, reward=float(index), issued=group.step)
        if not self.table.knows(group.group_id):
            self.table.begin(group.group_id, self.registry.get(group.group_id))
        self.entries += 1
        entry = Entry(id=f"{self.entries}-0", stream=SCORED, readers="filter", fields={}, body=b"", size=0)
        assert self.table.add(entry, member) == "held"
        self.ended += 1
        self.release(group.group_id)

    def release(self, group_id: str) -> None:
        half = self.table.get(group_id)
        if not leaves_now(half, policy=self.rule, step=self.step, bound=self.bound):
            return
        indexes = sorted(half.members)
        samples = tuple(half.members[i] for i in indexes)
        whole = not half.split and half.complete
        key = group_id if whole else part_key(group_id, indexes)
        rest = tuple(sorted(half.wanted - set(indexes)))
        base = self.registry[group_id]
        if not whole:
            self.registry[group_id] = msgspec.structs.replace(base, members=rest)
            self.registry[key] = msgspec.structs.replace(base, members=tuple(indexes))
            if not rest:
                del self.registry[group_id]
        known = () if whole else tuple(half.known.values())
        kept = GroupKept(group_id=group_id, prompt_id="p0", samples=samples, part="" if whole else key, known=known)
        self.progress.fold(GroupVerdict(group_id=group_id, prompt_id="p0", kept=True, members=() if whole else tuple(indexes)))
        self.table.release(half, indexes, half.basis())
        self.ready[key] = Part.of(kept, came=self.step)

    def go_back(self, step: int) -> None:
        """The trainer dies and starts again from the checkpoint of `step`: what came after is a lost future."""
        for lost in range(self.step, step, -1):
            for key, trained, was in self.history.pop(lost):
                here, listed = self.ready.get(key), self.registry.get(key)
                left = was.left if here is None else tuple(sorted({*here.left, *was.left}))
                members = trained.indexes if listed is None else tuple(sorted({*listed.indexes, *trained.indexes}))
                self.ready[key] = msgspec.structs.replace(was, left=left, came=step)
                self.registry[key] = msgspec.structs.replace(trained, members=members)
                self.trained -= len(was.left)
        self.step = step
        self.went_back = True
        self.progress.fold(Restored(step=step, version=PolicyVersion(1000, step)))
        for worker in range(len(self.serving)):
            self.activate(worker)

    def samples_left(self, key: str, taken: Sequence[int]) -> list[Scored]:
        """What a cut leaves of a ready part."""
        return [self.ready[key].group.samples[at] for at in self.ready[key].left if at not in taken]

    def train(self) -> bool:
        """Cut and train a batch if one may be cut. The invariants are asserted here, before any mask."""
        step, bound = self.step, self.bound
        elsewhere: dict[int, int] = {}
        for key, group in self.registry.items():
            if key not in self.ready:
                elsewhere[group.step] = elsewhere.get(group.step, 0) + len(group.indexes)
        made = cut(ready=self.ready, step=step, size=self.size, bound=bound, rule=self.rule, elsewhere=elsewhere)
        for key, reason in made.drop:
            gone = self.ready.pop(key)
            assert reason == "outlasted" or self.went_back, "what is dropped has outlasted the bound by its own generation"
            self.outlasted += len(gone.left)
            members = tuple(gone.group.samples[at].rollout.task.index for at in gone.left)
            self.progress.fold(GroupVerdict(group_id=gone.group.group_id, prompt_id="p0", kept=False, members=members))
            del self.registry[key]
        if not made.take:
            return False
        left = [s for key in self.ready for s in self.samples_left(key, dict(made.take).get(key, ()))]
        late = [s for s in left if step - min(span.step for span in s.rollout.response.spans) >= bound]
        assert not late or self.went_back, "a finished sample on its last turn is not in the batch"
        assert len(late) == made.left_behind
        assert sum(len(at) for _, at in made.take) == self.size
        ids = []
        done = self.history[step + 1] = []
        for key, positions in made.take:
            taken = self.ready[key]
            members = tuple(taken.group.samples[at].rollout.task.index for at in positions)
            trained = msgspec.structs.replace(self.registry[key], members=members)
            done.append((key, trained, msgspec.structs.replace(taken, left=positions)))
            for at in positions:
                if taken.age(step, at) > bound and not self.went_back:
                    assert taken.came == step, "a sample over the bound had come for an earlier batch"
                ids.append(taken.group.samples[at].rollout.task.sample_id)
            left = tuple(at for at in taken.left if at not in positions)
            if left:
                taken.left = left
                members = tuple(taken.group.samples[at].rollout.task.index for at in left)
                self.registry[key] = msgspec.structs.replace(self.registry[key], members=members)
            else:
                del self.ready[key], self.registry[key]
        self.trained += len(ids)
        self.step += 1
        version = PolicyVersion(self.step + 1, self.step)
        self.progress.fold(
            StepDone(step=self.step, version=version, trained_on=PolicyVersion(self.step, step), groups=(), samples=tuple(ids))
        )
        for half in self.table.halves():
            self.release(half.group_id)
        for half in self.table.halves():
            held = [m for m in half.members.values() if half.age(self.step) >= bound]
            assert len(held) < 2, "finished siblings on their last turn are still at the filter"
        return True


@settings(max_examples=80, deadline=None)
@given(
    rule=st.sampled_from(["split", "member"]),
    bound=st.integers(1, 4),
    groups=st.integers(1, 4),
    n=st.integers(2, 4),
    workers=st.integers(1, 3),
    slots=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    train_often=st.floats(0.02, 0.6),
)
def test_no_finished_sample_waits_past_the_bound(
    rule: str, bound: int, groups: int, n: int, workers: int, slots: int, seed: int, train_often: float
) -> None:
    chance = random.Random(seed)
    house = House(rule=rule, bound=bound, size=groups * n, n=n, workers=workers, slots=slots)
    for _ in range(300):
        house.issue()
        assert house.progress.open_samples <= (bound + 1) * groups * n
        house.begin(chance.randrange(workers))
        event = chance.random()
        if event < train_often:
            house.train()
        elif event < train_often + 0.1:
            house.activate(chance.randrange(workers))
        elif chance.random() < 0.7 or not house.running:
            house.finish(chance.randrange(1000))  # any may end next: stragglers are as old as they like
        else:
            house.finish(len(house.running) - 1)  # the youngest: the worst case for those before it
    goes_on(house)


@settings(max_examples=60, deadline=None)
@given(bound=st.integers(1, 4), n=st.integers(2, 4), slots=st.integers(4, 40), seed=st.integers(0, 10_000))
def test_a_run_whose_trainer_goes_back_goes_on_and_loses_nothing(bound: int, n: int, slots: int, seed: int) -> None:
    chance = random.Random(seed)
    house = House(rule="split", bound=bound, size=2 * n, n=n, workers=1, slots=slots)
    for _ in range(200):
        house.issue()
        house.begin(0)
        event = chance.random()
        if event < 0.3:
            house.train()
        elif event < 0.4:
            house.activate(0)
        else:
            house.finish(chance.randrange(1000))
    house.go_back(max(0, house.step - chance.randrange(1, 5)))
    goes_on(house)


def goes_on(house: House) -> None:
    """Once everything ends that is under way, the run makes its steps, and every sample is accounted for."""
    before = house.step
    for _ in range(40 * (house.bound + 2)):
        house.issue()
        for worker in range(len(house.serving)):
            house.activate(worker)
            while len(house.running) < house.slots and house.queue:
                house.begin(worker)
        while house.running:
            house.finish(0)
        house.train()
    assert house.step > before + house.bound
    lone = sum(len(half.members) for half in house.table.halves())
    ready = sum(len(part.left) for part in house.ready.values())
    assert house.ended == house.trained + house.outlasted + ready + lone


def test_bound_zero_never_overlaps_two_versions() -> None:
    """With bound 0 nothing is issued between the training of a batch and the activation of what it made."""
    progress = SamplerProgress()
    progress.fold(PolicyActive(version=PolicyVersion(1, 0)))
    for number in range(4):
        progress.issued(OpenGroup(group_id=f"g{number}", prompt_id="p0", n_samples=1))
    limit = open_limit(per_version=4, max_staleness=0)

    def room() -> int:
        return free_samples(
            open_samples=progress.open_samples,
            untrained=progress.untrained,
            unjudged=progress.unjudged,
            limit=limit,
            over_sampling=0,
            still_needed=99,
            engine_room=99,
        )

    assert room() == 0
    done = StepDone(
        step=1,
        version=PolicyVersion(2, 1),
        trained_on=PolicyVersion(1, 0),
        groups=tuple(f"g{n}" for n in range(4)),
        samples=tuple(f"g{n}/0" for n in range(4)),
    )
    progress.fold(done)
    assert room() == 0, "announced is not served"
    progress.fold(PolicyActive(version=PolicyVersion(2, 1)))
    assert room() == 4


def test_a_wave_at_bound_zero_may_be_larger_than_the_batch() -> None:
    assert open_limit(per_version=32, max_staleness=0, over_sampling=48) == 48
    assert open_limit(per_version=32, max_staleness=0, over_sampling=0) == 32
    assert open_limit(per_version=32, max_staleness=2, over_sampling=48) == 96, "beyond bound 0 it is a cap of its own"


@given(per_version=st.integers(1, 64), bound=st.integers(1, 8), lookahead=st.integers(1, 256))
def test_lookahead_is_paid_for_by_admission(per_version: int, bound: int, lookahead: int) -> None:
    plain = open_limit(per_version=per_version, max_staleness=bound)
    with_lookahead = open_limit(per_version=per_version, max_staleness=bound, lookahead=lookahead)
    assert per_version <= with_lookahead <= plain
    assert open_limit(per_version=per_version, max_staleness=bound, lookahead=1) == plain


def test_wait_takes_nothing_beyond_the_lookahead() -> None:
    ready = {f"g{n}": part(scored(f"g{n}", 0, [0])) for n in (1, 2, 3)}
    common = {"ready": ready, "step": 0, "size": 2, "bound": 1, "rule": "wait"}
    assert cut(**common, window=frozenset({"g0", "g1"})).take == ()
    assert cut(**common, window=frozenset({"g0", "g1", "g2"})).take == (("g1", (0,)), ("g2", (0,)))


@pytest.mark.parametrize(("came", "bound", "reason"), [(0, 2, "stale"), (5, 2, "outlasted"), (0, 0, "surplus")])
def test_a_group_with_no_fresh_token_is_dropped_with_its_reason(came: int, bound: int, reason: str) -> None:
    ready = {"g0": part(scored("g0", 0, [0]), came=came), "g1": part(scored("g1", 0, [5]))}
    made = cut(ready=ready, step=5, size=1, bound=bound, rule="whole")
    assert made.drop == (("g0", reason),)
    assert made.take == (("g1", (0,)),)


def test_the_oldest_groups_are_taken_first_and_whole_but_for_the_one_at_the_edge() -> None:
    ready = {
        "g1": part(*(scored("g1", i, [2], n=3) for i in range(3))),
        "g2": part(*(scored("g2", i, [1], n=3) for i in range(3))),
    }
    made = cut(ready=ready, step=3, size=4, bound=4, rule="split")
    assert made.take == (("g2", (0, 1, 2)), ("g1", (0,)))


def test_where_more_is_on_its_last_turn_than_fits_younger_siblings_wait() -> None:
    ready = {
        "g1": part(scored("g1", 0, [3], n=3), scored("g1", 1, [0], n=3), scored("g1", 2, [3], n=3)),
        "g2": part(scored("g2", 0, [1], n=2), scored("g2", 1, [3], n=2)),
    }
    made = cut(ready=ready, step=3, size=2, bound=2, rule="split", elsewhere={})
    assert dict(made.take) == {"g1": (1,), "g2": (0,)}
    assert made.left_behind == 0


def test_what_is_cut_off_a_group_keeps_the_groups_rewards() -> None:
    whole = part(*(scored("g1", i, [0], n=3, reward=float(i)) for i in range(3)))
    assert whole.cut((0, 2)).known == (0.0, 1.0, 2.0)
    assert whole.cut((0, 1, 2)).known == ()


def test_a_token_of_a_lost_future_counts_its_distance_in_steps() -> None:
    lost = part(scored("g0", 0, [5]))
    assert lost.over(3, bound=1) and not lost.over(3, bound=2)
    assert lost.oldest(3) == -2, "its turn is yet to come: what the present future made is taken first"


def test_nothing_is_waited_for_that_is_here_already() -> None:
    """A trainer that went back from step 4 to step 2 has more samples than the bound admits, and none is under way."""
    lost = {f"g{n}": part(scored(f"g{n}", 0, [4])) for n in range(4)}
    ready = lost | {f"h{n}": part(scored(f"h{n}", 0, [1])) for n in range(7)}
    made = cut(ready=ready, step=2, size=2, bound=2, rule="split", elsewhere={})
    assert [key for key, _ in made.take] == ["h0", "h1"]
