"""The trainer's intake and cut on a real bus: batches of exactly so many samples, entries that are trained in two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from actors.recorder.records import records_of
from actors.runtime.context import Context
from actors.trainer.accounts import remaining
from actors.trainer.backend import StepResult
from actors.trainer.batches import Batch, Batches, sample_ids
from actors.trainer.checkpoint import whole_again
from actors.trainer.convert import to_samples
from actors.trainer.intake import Intake
from actors.trainer.record import RecordedBatch, read_record, write_record
from actors.trainer.replay import batch_of
from bus import Commit, Guard
from bus.knobs.live import LiveKnobs, propose
from bus.ledger import check, read_accounts
from bus.messages.groups import GroupKept, OpenGroup, Turned
from bus.messages.policy import StepDone
from bus.messages.samples import Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import EVENTS, GROUPS, POLICY
from tests.actors.house import messages, open_bus, put, scored, until
from tests.declared import actor_of

N, TOKENS = 3, 2
SPLIT = {"staleness_policy": "split", "max_weight_staleness": 2, "rollout_batch_size": 1, "n_samples_per_prompt": N}


def member(group: int, index: int, *, step: int = 0) -> Scored:
    """A scored sample whose tokens were made at `step`; its reward is its index."""
    plain = scored(group, index, float(index), n=N, tokens=TOKENS)
    response = msgspec.structs.replace(plain.rollout.response, spans=(VersionSpan(step + 1, step, TOKENS),))
    return msgspec.structs.replace(plain, rollout=msgspec.structs.replace(plain.rollout, response=response))


def kept(group: int, *indexes: int, step: int = 0, known: tuple[float, ...] = ()) -> GroupKept:
    """A whole group, or with `known` a part of one."""
    part = f"g{group}+{min(indexes)}" if known else ""
    samples = tuple(member(group, i, step=step) for i in indexes)
    return GroupKept(group_id=f"g{group}", prompt_id=f"p{group}", samples=samples, part=part, known=known)


class Trainer:
    """Intake and batches with a step that gives every fresh token a gradient."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.intake = Intake(context)
        self.batches = Batches(context, self.intake, interval=1, lookahead=0, ci_test=False)
        self.step = 0

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.step + 1, self.step)

    async def next(self) -> Batch:
        """The next batch; fails when the trainer would wait."""

        async def nothing() -> None:
            return None

        async def waits() -> None:
            raise TimeoutError("the trainer waits")

        batch = await self.batches.next(self.version, check=nothing, idle=waits)
        assert batch is not None
        return batch

    async def train(self) -> tuple[str, ...]:
        """Cut and train one batch; the ids of its samples."""
        batch = await self.next()
        strands = [strand for g in batch.groups for s in g.samples for strand in s.rollout.strands]
        fresh = [tuple(p.n * (self.step - p.step <= batch.bound) for p in s.response.spans) for s in strands]
        await self.batches.done(batch, StepResult({}, (), fresh), step=self.step)
        self.step += 1
        return sample_ids(batch.groups)


@asynccontextmanager
async def trainer_of(bus) -> AsyncIterator[Trainer]:
    """A trainer that starts now."""
    knobs = LiveKnobs(bus)
    await knobs.open()
    trainer = Trainer(Context(actor_of(name="trainer", role="trainer", bus=bus.config), bus, knobs))
    await trainer.intake.reader.open()
    over = asyncio.Event()
    follow = asyncio.create_task(knobs.follow(over))
    try:
        yield trainer
    finally:
        over.set()
        await follow
        await trainer.intake.reader.close()


async def arrive(bus, *groups: GroupKept, turned: int | None = None, open_elsewhere: dict[str, OpenGroup] | None = None) -> None:
    """The filter has released these, as the registry and the accounts say."""
    opened = {
        g.key: msgspec.msgpack.encode(
            OpenGroup(
                group_id=g.group_id,
                prompt_id=g.prompt_id,
                n_samples=N,
                members=tuple(s.rollout.task.index for s in g.samples) if g.part else None,
            )
        )
        for g in groups
    }
    opened |= {key: msgspec.msgpack.encode(group) for key, group in (open_elsewhere or {}).items()}
    n = sum(len(g.samples) for g in groups)
    ledger = {"issued": n, "tokens/generated": n * TOKENS} if n else {}
    mark = await bus.state("arrived")
    await bus.commit(Commit(open_groups=opened, ledger=ledger, guard=Guard("arrived", mark, f"{mark}x")))
    await put(bus, GROUPS, *groups, *([Turned(step=turned, version=turned + 1)] if turned is not None else []))


async def closes(bus) -> None:
    found = await check(bus)
    assert found.closes, found.text()


async def test_nothing_is_cut_before_the_filter_has_said_that_all_on_its_last_turn_has_left_it(
    redis_url: str, run_name: str
) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2))
        with pytest.raises(TimeoutError):
            await trainer.next()
        assert trainer.batches.turned_s == 0.0
        await arrive(bus, turned=0)
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")
        assert trainer.batches.turned_s > 0.0, "how long the filter took is told"


async def test_a_group_at_the_edge_of_a_batch_is_trained_in_two_steps_and_booked_once(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 2, known=(0.0, 2.0)), kept(2, 0, 1, 2), turned=0)
        batch = await trainer.next()
        assert [g.known for g in batch.groups] == [(0.0, 2.0), (0.0, 1.0, 2.0)], "baselines stay those of the groups"
        assert await trainer.train() == ("g1/0", "g1/2", "g2/0")
        await trainer.intake.acknowledge(1, None)
        assert (await read_accounts(bus)).trained == 2, "the rest of g2 is not trained yet"
        await closes(bus)
        await arrive(bus, kept(1, 1, known=(0.0, 1.0, 2.0)), turned=1)
        assert await trainer.train() == ("g1/1", "g2/1", "g2/2")
        await trainer.intake.acknowledge(1, None)
        assert (await read_accounts(bus)).trained == 2, "what step 2 trained is not durable yet"
        await trainer.intake.acknowledge(2, None)
        assert (await read_accounts(bus)).trained == 6
        assert await bus.hash_of(bus.keys.open_groups) == {}
        assert await bus.length(GROUPS) == 0
        await closes(bus)


def test_a_part_that_was_recorded_is_trained_again_as_it_was(tmp_path: Path) -> None:
    groups = (kept(1, 0, 2, known=(0.0, 1.0, 2.0)), kept(2, 0, 1, 2), kept(3, 1, known=(2.0, 1.0)))
    version = PolicyVersion(4, 3)
    done = StepDone(step=4, version=version, trained_on=version, groups=("g1", "g2", "g3"), seed=7)
    write_record(str(tmp_path / "{rollout_id}"), RecordedBatch(done=done, groups=groups, knobs=dict(SPLIT)))
    again = batch_of(read_record(tmp_path / "3"))
    assert [s.train.known_rewards for s in again.samples] == [(0.0, 1.0, 2.0)] * 2 + [()] * 3 + [(2.0, 1.0)]
    assert repr(again.samples) == repr(to_samples(groups)) and (again.step, again.seed) == (3, 7)


async def test_a_trainer_that_starts_again_goes_on_with_the_rest_of_a_group(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        async with trainer_of(bus) as first:
            await arrive(bus, kept(1, 0, 2, known=(0.0, 2.0)), kept(2, 0, 1, 2), turned=0)
            await first.train()
            consumed = tuple(t.consumed for t in first.intake.uncommitted)  # what a checkpoint made now keeps
            listed = await bus.hash_of(bus.keys.open_groups)
            rest = first.intake.still_open(listed)
        assert rest.keys() == {"g2"}
        left = msgspec.msgpack.decode(rest["g2"], type=OpenGroup)
        assert (left.members, left.rewards) == ((1, 2), {0: 0.0}), "the rest can be issued again alone"
        async with trainer_of(bus) as second:
            second.step = 1
            while await second.intake.fetch(64, 0.0, step=1):
                continue
            second.intake.adopt(consumed, 1)
            assert sorted(await second.intake.inside_but_open()) == ["g1/0", "g1/2", "g2/0"]
            await second.intake.acknowledge(1, None)
            await arrive(bus, kept(1, 1, known=(0.0, 1.0, 2.0)), turned=1)
            assert await second.train() == ("g1/1", "g2/1", "g2/2")
            await second.intake.acknowledge(2, None)
        assert (await read_accounts(bus)).trained == 6
        await closes(bus)


async def test_a_bound_that_is_lowered_says_what_that_costs(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT | {"max_weight_staleness": 4}) as bus, trainer_of(bus) as trainer:
        await arrive(bus, *(kept(g, 0, 1, 2) for g in range(1, 5)), turned=0)
        await trainer.train()
        await arrive(bus, turned=1)
        await propose(bus, {"max_weight_staleness": 1}, author="me", reason="test")
        await until(lambda: _bound(trainer, 1))
        assert await trainer.train() == ("g2/0", "g2/1", "g2/2")
        await arrive(bus, kept(5, 0, 1, 2, step=2), turned=2)
        assert await trainer.train() == ("g5/0", "g5/1", "g5/2"), "what has no token within the bound is dropped"
        said = [m.text for m in await messages(bus, EVENTS) if m.kind in ("bound lowered", "bound reached")]
        assert said[0].startswith("from 4 to 1 steps")
        assert said[1].endswith("0 tokens in 0 parts of groups were masked and 6 samples given up as too old")
        assert (await read_accounts(bus)).dropped == {"stale": 6}
        await closes(bus)


async def test_a_trainer_that_starts_again_still_knows_what_drains(redis_url: str, run_name: str) -> None:
    """What was admitted under the bound before is open still, and a bound lowered while no trainer ran is one too."""
    async with open_bus(redis_url, run_name, knobs=SPLIT | {"max_weight_staleness": 4}) as bus:
        async with trainer_of(bus) as first:
            await arrive(bus, *(kept(g, 0, 1, 2) for g in range(1, 4)), turned=0)
            await first.train()
        await propose(bus, {"max_weight_staleness": 1}, author="me", reason="test")
        for turned in (1, 2):
            async with trainer_of(bus) as again:
                again.step = turned
                await arrive(bus, kept(4 + turned, 0, 1, 2, step=turned), turned=turned)
                await until(lambda again=again: _bound(again, 1))
                await again.train()
        said = [(m.kind, m.text) for m in await messages(bus, EVENTS) if m.kind in ("bound lowered", "bound reached")]
    assert [kind for kind, _ in said] == ["bound lowered", "bound reached"]
    assert said[1][1].startswith("from 4 to 1 steps; since the trainer's start ")


async def test_a_group_of_which_parts_are_given_up_is_told_once_for_each_reason(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        parts = kept(1, 0, known=(0.0, 1.0)), kept(1, 1, known=(0.0, 1.0)), kept(1, 2, known=(0.0, 1.0))
        await arrive(bus, *parts, kept(2, 0, 1, 2))
        assert await trainer.intake.fetch(8, 0.0, step=0) == 4
        await trainer.intake.give_up((("g1+0", "stale"), ("g1+1", "stale"), ("g1+2", "outlasted"), ("g2", "stale")), reissue=True)
        lines = [line for entry in await bus.scan_all(POLICY) for line in records_of(entry, await bus.message(entry))]
        assert [(d["group"], d["prompt"], d["reason"], d["members"]) for d in lines if d["kind"] == "drop"] == [
            ("g2", "p2", "stale", [0, 1, 2]),
            ("g1", "", "stale", [0, 1]),
            ("g1", "", "outlasted", [2]),
        ]
        assert (await read_accounts(bus)).dropped == {"stale": 5, "outlasted": 1}
        await closes(bus)


async def test_younger_samples_wait_for_older_ones_that_would_not_fit_later(redis_url: str, run_name: str) -> None:
    """Bound 2, batches of 3. Six samples of step 0 are under way: they fit into the batches of steps 1 and 2 and no further."""
    knobs = SPLIT
    async with open_bus(redis_url, run_name, knobs=knobs) as bus, trainer_of(bus) as trainer:
        trainer.step = 1
        older = {f"g{g}": OpenGroup(group_id=f"g{g}", prompt_id="p", n_samples=N, step=0) for g in (1, 2)}
        await arrive(bus, kept(3, 0, 1, 2, step=1), turned=1, open_elsewhere=older)
        with pytest.raises(TimeoutError):
            await trainer.next()
        await put(bus, GROUPS, kept(1, 0, 1, 2))
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")


async def test_after_a_lost_bus_parts_are_whole_again_but_for_what_is_trained() -> None:
    def raw(members: tuple[int, ...], rewards: dict[int, float]) -> bytes:
        group = OpenGroup(group_id="g1", prompt_id="p1", n_samples=4, members=members, rewards=rewards)
        return msgspec.msgpack.encode(group)

    [group] = whole_again([raw((2,), {0: 1.0, 1: 0.0, 3: 0.5}), raw((0, 3), {0: 1.0, 1: 0.0, 3: 0.5})])
    assert (group.members, group.rewards, group.attempt) == ((0, 2, 3), {1: 0.0}, 1)
    assert remaining({"g1": raw((0, 3), {})}, ()) == {"g1": raw((0, 3), {})}


async def test_what_comes_late_over_the_bound_has_outlasted_it(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        trainer.step = 5
        await arrive(bus, kept(1, 0, 1, 2, step=5), kept(2, 1, step=1, known=(0.0, 1.0)), turned=5)
        await until(lambda: _read(trainer))
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")
        assert (await read_accounts(bus)).dropped == {"outlasted": 1}


async def _bound(trainer: Trainer, bound: int) -> bool:
    return trainer.batches.bound(trainer.context.knobs) == bound


async def _read(trainer: Trainer) -> bool:
    await trainer.intake.fetch(64, 0.0, step=trainer.step)
    return trainer.intake.n_ready == 4
