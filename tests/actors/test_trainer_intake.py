"""What the trainer does with entries that come again, in parts, or after a checkpoint that holds them."""

from __future__ import annotations

import msgspec
import pytest

from actors.trainer.checkpoint import Consumed
from bus import Commit, Reader
from bus.ledger import read_accounts
from bus.messages.groups import GroupKept
from bus.messages.policy import GroupsGivenUp
from bus.topology import DEAD, GROUPS, POLICY
from tests.actors.house import messages, open_bus, put
from tests.actors.test_trainer_parts import SPLIT, Trainer, arrive, closes, kept, trainer_of

WHOLE = SPLIT | {"staleness_policy": "whole"}


async def take_all(trainer: Trainer) -> None:
    while await trainer.intake.fetch(64, 0.0, step=trainer.step):
        continue


def consumed(group: GroupKept) -> Consumed:
    """All of a group as trained; what the accounts get for it."""
    samples = len(group.samples)
    members = tuple(s.rollout.task.index for s in group.samples)
    return Consumed(group.key, samples, 0, 2 * samples, 0, ((1, 2 * samples),), members)


async def test_of_an_entry_that_a_checkpoint_holds_in_part_the_rest_is_trained(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        group = kept(1, 0, 1, 2)
        inside = consumed(msgspec.structs.replace(group, samples=group.samples[:1]))
        trainer.intake.adopt((inside,), 1)  # a server that lost its last second brings the entry later
        await arrive(bus, group, kept(2, 0, 1, 2))
        await take_all(trainer)
        assert trainer.intake.n_ready == 5 and trainer.intake.ready["g1"].left == (1, 2)
        [said] = [m for m in await messages(bus, POLICY) if isinstance(m, GroupsGivenUp)]
        assert said.samples == ("g1/0",) and not said.reissue, "its credit is free before the rest is trained"
        trainer.step = 1
        assert await trainer.train() == ("g1/1", "g1/2", "g2/0")
        await trainer.intake.acknowledge(2, None)
        assert (await read_accounts(bus)).trained == 3 and await bus.length(GROUPS) == 1
        await closes(bus)


async def test_an_entry_inside_a_checkpoint_is_acknowledged_and_booked_when_it_comes(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        group = kept(1, 0, 1, 2)
        trainer.intake.adopt((consumed(group),), 1)
        await arrive(bus, group)
        await take_all(trainer)
        assert trainer.intake.n_ready == 0 and await bus.length(GROUPS) == 0
        assert (await read_accounts(bus)).trained == 3 and await bus.hash_of(bus.keys.open_groups) == {}
        await put(bus, GROUPS, group)  # and again, when the accounts have it
        await take_all(trainer)
        assert (await read_accounts(bus)).trained == 3 and await bus.length(GROUPS) == 0


async def test_a_second_entry_of_a_group_that_is_here_is_forgotten(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2))
        await take_all(trainer)
        await put(bus, GROUPS, kept(1, 0, 1, 2))
        await take_all(trainer)
        assert (trainer.intake.n_ready, await bus.length(GROUPS)) == (3, 1)
        assert await trainer.train() == ("g1/0", "g1/1", "g1/2")
        await trainer.intake.acknowledge(1, None)
        assert await bus.length(GROUPS) == 0
        await closes(bus)
        await put(bus, GROUPS, kept(1, 0, 1, 2))  # and once more, when a checkpoint holds it
        await take_all(trainer)
        assert (trainer.intake.n_ready, await bus.length(GROUPS), await bus.length(DEAD)) == (0, 0, 0)
        assert (await read_accounts(bus)).trained == 3


async def test_what_earlier_checkpoints_hold_is_known_when_it_comes_again(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        for group in (1, 2, 3):
            await arrive(bus, kept(group, 0, 1, 2))
            await trainer.train()
            await trainer.intake.acknowledge(group, None)
        await put(bus, GROUPS, kept(1, 0, 1, 2))
        await take_all(trainer)
        assert (trainer.intake.n_ready, await bus.length(GROUPS), await bus.length(DEAD)) == (0, 0, 0)
        assert (await read_accounts(bus)).trained == 9


@pytest.mark.parametrize("trained", [False, True])
async def test_a_group_whose_entry_the_server_forgot_goes_on_under_the_new_one(
    redis_url: str, run_name: str, trained: bool
) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2))
        await take_all(trainer)
        if trained:
            await trainer.train()
        thief = Reader(bus, [GROUPS], "trainer", "another")
        await thief.open()
        await bus.commit(Commit(ack=await thief.claim(0)))  # as if it had never been there
        await thief.close()
        await put(bus, GROUPS, kept(1, 0, 1, 2))
        await take_all(trainer)
        if not trained:
            assert await trainer.train() == ("g1/0", "g1/1", "g1/2")
        await trainer.intake.acknowledge(1, None)
        assert await bus.length(GROUPS) == 0 and (await read_accounts(bus)).trained == 3
        await closes(bus)


async def test_an_entry_that_the_server_forgot_holds_up_no_other(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2), kept(2, 0, 1, 2))
        await trainer.train()
        await trainer.train()
        [first, _] = await bus.scan_all(GROUPS)
        await bus.link.run("XACK", bus.keys.stream(GROUPS.name), "trainer", first.id)
        await bus.link.run("XDEL", bus.keys.stream(GROUPS.name), first.id)
        await trainer.intake.acknowledge(2, None)
        assert (await bus.length(GROUPS), (await read_accounts(bus)).trained) == (0, 3)
        assert sorted(await bus.hash_of(bus.keys.open_groups)) == ["g1"], "it comes again"


async def test_what_is_trained_and_not_yet_durable_is_not_under_way(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2), kept(2, 0, 1, 2), turned=0)
        await trainer.train()
        await arrive(bus, turned=1)
        await trainer.train()
        await arrive(bus, kept(3, 0, 1, 2, step=2), turned=2)
        assert await trainer.train() == ("g3/0", "g3/1", "g3/2")


async def test_what_is_acknowledged_is_what_the_checkpoint_holds(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2), kept(2, 0, 1, 2), kept(3, 0, 1, 2))
        await trainer.train()
        await trainer.train()
        await trainer.intake.acknowledge(1, None)
        assert (await bus.length(GROUPS), (await read_accounts(bus)).trained) == (2, 3)
        assert sorted(await bus.hash_of(bus.keys.open_groups)) == ["g2", "g3"] and await bus.state("saved") == "1"
        assert trainer.intake.still_open(await bus.hash_of(bus.keys.open_groups)).keys() == {"g3"}
        await closes(bus)


async def test_what_is_given_up_of_a_group_half_trained_waits_for_the_checkpoint(redis_url: str, run_name: str) -> None:
    """Its entry is one: it cannot be acknowledged before the step that trained the first half is durable."""
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 2, known=(0.0, 2.0)), kept(2, 0, 1, 2), turned=0)
        assert await trainer.train() == ("g1/0", "g1/2", "g2/0")
        await trainer.intake.give_up((("g2", "stale"),), reissue=True)
        [said] = [m for m in await messages(bus, POLICY) if isinstance(m, GroupsGivenUp)]
        assert (said.prompts, said.samples) == ((), ("g2/1", "g2/2")), "a prompt that is trained in part is not started again"
        assert trainer.intake.n_ready == 0 and (await read_accounts(bus)).dropped == {}
        assert sorted(await bus.hash_of(bus.keys.open_groups)) == ["g1+0", "g2"]
        await trainer.intake.acknowledge(0, None)
        assert await bus.length(GROUPS) == 2
        await trainer.intake.acknowledge(1, None)
        accounts = await read_accounts(bus)
        assert (accounts.trained, accounts.dropped) == (3, {"stale": 2}) and await bus.length(GROUPS) == 0
        await closes(bus)


async def test_what_two_checkpoints_hold_counts_once(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        group = kept(1, 0, 1, 2)
        await arrive(bus, group, kept(2, 0, 1, 2))
        await take_all(trainer)
        inside = consumed(msgspec.structs.replace(group, samples=group.samples[:1]))
        trainer.intake.adopt((inside, inside), 1)
        assert trainer.intake.n_ready == 5
        trainer.step = 1
        await trainer.train()
        await trainer.intake.acknowledge(2, None)
        assert (await read_accounts(bus)).trained == 3 and await bus.length(GROUPS) == 1
        await closes(bus)


@pytest.mark.parametrize("here_first", [False, True])
async def test_a_bus_that_went_back_may_cut_a_group_into_other_parts(here_first: bool, redis_url: str, run_name: str) -> None:
    """The checkpoint holds samples 0 and 2 as one part; the filter, which knows nothing of it, releases 1 and 2 together and then 0
    alone."""
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        known = (1.0, 0.0)
        inside = (consumed(kept(1, 0, 2, known=known)),)
        if not here_first:
            trainer.intake.adopt(inside, 1)
        await arrive(bus, kept(1, 1, 2, known=known), kept(1, 0, known=known), kept(2, 0, 1, 2), turned=2)
        await take_all(trainer)
        if here_first:
            trainer.intake.adopt(inside, 1)
        ready = {key: part.left for key, part in trainer.intake.ready.items()}
        assert ready == {"g1+1": (0,), "g2": (0, 1, 2)}, "of g1 only sample 1 is to be trained"
        await trainer.intake.acknowledge(1, None)
        assert (await read_accounts(bus)).trained == 1, "0; 2 is booked when the rest of its entry is trained"
        trainer.step = 1
        assert (await trainer.train())[:1] == ("g1/1",)
        await trainer.intake.acknowledge(2, None)
        assert (await read_accounts(bus)).trained == 3
        await closes(bus)


async def test_a_checkpoint_that_settles_no_entry_is_known_to_the_bus_all_the_same(redis_url: str, run_name: str) -> None:
    """Recorded batches are on no stream. A restart took the bus for older than the checkpoints, and made it anew."""
    async with open_bus(redis_url, run_name, knobs=WHOLE) as bus, trainer_of(bus) as trainer:
        await trainer.intake.acknowledge(4, None)
        assert await bus.state("saved") == "4"
