"""A reward that is changed in mid-run: what is not judged is scored anew, and no batch mixes two versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from actors.filter.actor import FilterSpec
from actors.filter.actor import run as run_filter
from actors.reward.actor import run as run_reward
from actors.reward.spec import RewardSpec
from bus import Bus, Commit
from bus.knobs.live import propose
from bus.ledger import check, read_accounts
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.policy import GroupsGivenUp
from bus.topology import GROUPS, POLICY, ROLLOUTS, SCORED
from tests.actors.house import messages, open_bus, put, running, scored, until
from tests.actors.test_filter import issue
from tests.actors.test_reward_actor import OPEN, done
from tests.actors.test_reward_actor import tokenizer_dir as tokenizer_dir
from tests.actors.test_trainer_parts import SPLIT, arrive, closes, kept, trainer_of
from tests.declared import room_of


async def swap(bus: Bus, context: Any, version: int) -> None:
    await propose(bus, {"reward_version": version}, author="me", reason="a better function")

    async def heard() -> bool:
        return context.knobs.reward_version == version

    await until(heard)


async def test_a_changed_function_is_loaded_and_stamps_what_it_scores(
    redis_url: str, run_name: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text("def hook(sample):\n    return 1.0\n")
    spec = room_of(RewardSpec, tokenizer_dir=tokenizer_dir, custom_rm_path=f"{hook}:hook", n_workers=1)
    async with open_bus(redis_url, run_name, groups=OPEN) as bus, running(bus, "reward-0", run_reward, spec) as context:
        await put(bus, ROLLOUTS, done(1, 0, "a"))
        await until(lambda: messages(bus, SCORED))
        hook.write_text("def hook(sample):\n    return 2.0\n")
        await put(bus, ROLLOUTS, done(1, 1, "a"))
        await until(lambda: _so_many(bus, 2))
        await swap(bus, context, 3)
        await put(bus, ROLLOUTS, done(2, 0, "a"))
        found = await until(lambda: _so_many(bus, 3))
    assert [(m.reward, m.reward_version or 0) for m in found] == [(1.0, 0), (1.0, 0), (2.0, 3)]


async def _so_many(bus: Bus, n: int) -> list[Any]:
    found = await messages(bus, SCORED)
    return found if len(found) >= n else []


async def test_members_of_an_earlier_version_go_back_to_be_scored_anew(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run_filter, FilterSpec()) as context:
            await put(bus, SCORED, scored(1, 0, 0.0))
            await until(lambda: _noted(context, "1 samples of 1 groups"))
            await swap(bus, context, 1)
            new = msgspec.structs.replace(scored(1, 1, 5.0), reward_version=1)
            await put(bus, SCORED, new)
            [back] = await until(lambda: messages(bus, ROLLOUTS))
            assert back.task.sample_id == "g1/0" and await bus.length(GROUPS) == 0
            assert (await check(bus)).closes
            await bus.link.run("DEL", bus.keys.stream(ROLLOUTS.name))  # the reward room takes it
            await put(bus, SCORED, msgspec.structs.replace(scored(1, 0, 4.0), reward_version=1))
            [group] = await until(lambda: messages(bus, GROUPS))
        assert [s.reward for s in group.samples] == [4.0, 5.0] and context.counters["scored_anew"] == 1


async def _noted(context: Any, text: str) -> bool:
    return context.noting().startswith(text)


def of_version(group: GroupKept, version: int) -> GroupKept:
    samples = tuple(msgspec.structs.replace(s, reward_version=version) for s in group.samples)
    return msgspec.structs.replace(group, samples=samples)


async def test_no_batch_mixes_two_versions(redis_url: str, run_name: str) -> None:
    knobs = SPLIT | {"staleness_policy": "whole", "rollout_batch_size": 2}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus, trainer_of(bus) as trainer:
        await arrive(bus, *(kept(g, 0, 1, 2) for g in (1, 2, 3)))
        await swap(bus, trainer.context, 1)
        await arrive(bus, *(of_version(kept(g, 0, 1, 2), 1) for g in (4, 5)))
        first = await trainer.train()
        assert {s.partition("/")[0] for s in first} == {"g1", "g2"}, "enough of the earlier version for a batch"
        second = await trainer.train()
        assert {s.partition("/")[0] for s in second} == {"g4", "g5"}
        [given_up] = [m for m in await messages(bus, POLICY) if isinstance(m, GroupsGivenUp)]
        assert given_up.groups == (("g3", "reward_version"),) and given_up.prompts == ("p3",) and given_up.reissue
        assert (await read_accounts(bus)).dropped == {"reward_version": 3}
        await closes(bus)


async def test_versions_are_trained_in_the_order_of_their_age(redis_url: str, run_name: str) -> None:
    knobs = SPLIT | {"staleness_policy": "whole", "rollout_batch_size": 2}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus, trainer_of(bus) as trainer:
        await arrive(bus, *(of_version(kept(g, 0, 1, 2), 1) for g in (1, 2)))
        await arrive(bus, *(kept(g, 0, 1, 2) for g in (3, 4)))
        await swap(bus, trainer.context, 2)
        await arrive(bus, *(of_version(kept(g, 0, 1, 2), 2) for g in (5, 6)))
        order = [{s.partition("/")[0] for s in await trainer.train()} for _ in range(3)]
        assert order == [{"g3", "g4"}, {"g1", "g2"}, {"g5", "g6"}]
        await closes(bus)


async def test_late_members_of_a_group_that_was_split_are_compared_as_they_were_scored(redis_url: str, run_name: str) -> None:
    """The others have left with rewards of the earlier version: scored anew it would be compared with those of another scale."""
    knobs = {"staleness_policy": "split", "max_weight_staleness": 2}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus:
        opened = OpenGroup(group_id="g1", prompt_id="p1", n_samples=3, members=(2,), rewards={0: 1.0, 1: 0.0})
        await bus.commit(Commit(open_groups={"g1": msgspec.msgpack.encode(opened)}))
        async with running(bus, "filter", run_filter, FilterSpec()) as context:
            await swap(bus, context, 1)
            await put(bus, SCORED, scored(1, 2, 0.5, n=3))
            [late] = await until(lambda: messages(bus, GROUPS))
        assert (late.known, await bus.length(ROLLOUTS)) == ((1.0, 0.0, 0.5), 0)
