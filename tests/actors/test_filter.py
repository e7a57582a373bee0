"""The filter room: groups leave whole, once, with a reason."""

from __future__ import annotations

import msgspec

from actors.filter.actor import FilterSpec, run
from bus import Commit, Guard
from bus.ledger import check, read_accounts
from bus.messages.groups import OpenGroup
from bus.messages.samples import RolloutLost
from bus.topology import DEAD, GROUPS, SCORED, VERDICTS
from tests.actors.house import messages, open_bus, put, running, scored, until


async def issue(bus, *groups: int, n: int = 2, tokens: int = 3) -> None:
    """Book groups as issued and their tokens as generated, as sampler and generation do."""
    opened = {f"g{g}": msgspec.msgpack.encode(OpenGroup(group_id=f"g{g}", prompt_id=f"p{g}", n_samples=n)) for g in groups}
    await bus.commit(
        Commit(
            open_groups=opened,
            ledger={"issued": n * len(groups), "tokens/generated": n * tokens * len(groups)},
            guard=Guard("issued", "", "yes"),
        )
    )


async def test_a_complete_group_is_kept_in_index_order(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, scored(1, 1, 1.0), scored(1, 0, 0.0))
            [group] = await until(lambda: messages(bus, GROUPS))
        assert [s.rollout.task.index for s in group.samples] == [0, 1]
        assert await bus.length(SCORED) == 0
        [verdict] = await messages(bus, VERDICTS)
        assert verdict.kept and verdict.tokens == 6
        assert (await check(bus)).residual == 0


async def test_equal_rewards_are_dropped_with_their_reason_and_the_ledger_closes(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, scored(1, 0, 1.0), scored(1, 1, 1.0))
            [verdict] = await until(lambda: messages(bus, VERDICTS))
        assert verdict.reason == "zero_std_1" and not verdict.kept
        accounts = await read_accounts(bus)
        assert accounts.issued == sum(accounts.dropped.values()) == 2
        assert await bus.length(GROUPS) == 0
        assert await bus.hash_of(bus.keys.open_groups) == {}


async def test_a_filter_written_for_miles_is_asked_with_args_and_samples(redis_url: str, run_name: str) -> None:
    hook = "tests.miles_async.test_try_hooks.keeps_of_miles"
    async with open_bus(redis_url, run_name, knobs={"dynamic_sampling_filter_path": hook, "rollout_batch_size": 2}) as bus:
        await issue(bus, 1, 2)
        async with running(bus, "filter", run, FilterSpec(custom_filter=hook, hooks_within_s=20.0, hook_values={"reward_key": ""})):
            await put(bus, SCORED, *(scored(group, i, float(i + group)) for group in (1, 2) for i in range(2)))
            verdicts = await until(lambda: two_of(bus))
    assert {one.group_id: (one.kept, one.reason) for one in verdicts} == {"g1": (False, "easy"), "g2": (True, "")}


async def two_of(bus) -> list:
    found = await messages(bus, VERDICTS)
    return found if len(found) == 2 else []


async def test_a_lost_sibling_closes_its_group(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()):
            lost = RolloutLost(sample_id="g1/1", group_id="g1", n_samples=2, reason="poison", tokens_made=3)
            await put(bus, SCORED, scored(1, 0, 1.0), lost)
            [verdict] = await until(lambda: messages(bus, VERDICTS))
        assert verdict.reason == "lost_poison"
        assert (await check(bus)).token_residual == 0


async def test_a_half_assembled_group_survives_the_filter(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as first:
            await put(bus, SCORED, scored(1, 0, 0.0))
            await until(lambda: _true(first.vitals().note.startswith("1 samples of 1 groups")))
        assert await bus.length(SCORED) == 1, "the member stays pending"
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, scored(1, 1, 1.0))
            await until(lambda: messages(bus, GROUPS))
        assert await bus.length(SCORED) == 0


async def test_a_second_result_of_one_sample_is_acknowledged_and_forgotten(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, scored(1, 0, 0.0), scored(1, 0, 1.0), scored(1, 1, 1.0))
            [group] = await until(lambda: messages(bus, GROUPS))
        assert [s.reward for s in group.samples] == [0.0, 1.0]
        assert await bus.length(SCORED) == 0


async def test_garbage_goes_to_the_dead_letters_and_its_group_closes(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1, tokens=0)
        key = bus.keys.stream(SCORED.name)
        await bus.link.run("XADD", key, "*", "type", "rollout.scored", "id", "g1/0", "group", "g1", "body", b"\xff\x00junk")
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, scored(1, 1, 1.0, tokens=0))
            [verdict] = await until(lambda: messages(bus, VERDICTS))
        assert verdict.reason == "lost_malformed"
        [letter] = await messages(bus, DEAD)
        assert letter.stream == "scored" and "undecodable" in letter.error


async def test_a_group_with_no_readable_member_still_closes(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1, tokens=0)
        key = bus.keys.stream(SCORED.name)
        async with running(bus, "filter", run, FilterSpec()):
            for index in range(2):
                fields = ("type", "rollout.scored", "id", f"g1/{index}", "group", "g1", "tokens", "many", "body", b"\xc1")
                await bus.link.run("XADD", key, "*", *fields)
            [verdict] = await until(lambda: messages(bus, VERDICTS))
        assert verdict.reason == "lost_malformed" and verdict.n_samples == 2
        assert await bus.hash_of(bus.keys.open_groups) == {}


async def _true(value: bool) -> bool:
    return value
