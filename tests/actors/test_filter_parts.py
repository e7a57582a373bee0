"""The filter lets a group go in parts: on its last turn within the bound, and late members one by one."""

from __future__ import annotations

import sys
import threading

import msgspec
import pytest

from actors.filter.actor import MOST_RAISED, FilterSpec, run
from actors.runtime.run import RunEnds
from bus import Commit, Guard
from bus.ledger import check, read_accounts
from bus.messages.groups import GroupKept, OpenGroup, Turned
from bus.messages.policy import Restored, StepDone
from bus.messages.samples import RolloutLost, Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import EVENTS, GROUPS, POLICY, SCORED, VERDICTS
from tests.actors.house import messages, open_bus, put, running, scored, until

SPLIT = {"staleness_policy": "split", "max_weight_staleness": 2}
N, TOKENS = 4, 3


async def issue(bus, *groups: int, n: int = N) -> None:
    """Book groups as issued and their tokens as generated, as sampler and generation do."""
    opened = {f"g{g}": msgspec.msgpack.encode(OpenGroup(group_id=f"g{g}", prompt_id=f"p{g}", n_samples=n)) for g in groups}
    ledger = {"issued": n * len(groups), "tokens/generated": n * TOKENS * len(groups)}
    await bus.commit(Commit(open_groups=opened, ledger=ledger, guard=Guard("issued", "", "yes")))


def member(group: int, index: int, reward: float, *, step: int = 0) -> Scored:
    """A scored sample whose tokens were made at `step`."""
    plain = scored(group, index, reward, n=N, tokens=TOKENS)
    response = msgspec.structs.replace(plain.rollout.response, spans=(VersionSpan(step + 1, step, TOKENS),))
    return msgspec.structs.replace(plain, rollout=msgspec.structs.replace(plain.rollout, response=response))


async def held(context, n: int) -> None:
    """The filter has taken in so many members that wait."""
    await until(lambda: _true(context.vitals().note.startswith(f"{n} samples")))


async def trained(bus, step: int) -> None:
    """The trainer has done this step."""
    version = PolicyVersion(step + 1, step)
    await put(bus, POLICY, StepDone(step=step, version=version, trained_on=PolicyVersion(step, step - 1), groups=()))


async def turned(bus, step: int) -> bool:
    return any(isinstance(m, Turned) and m.step == step for m in await messages(bus, GROUPS))


async def kept(bus) -> list[GroupKept]:
    return [m for m in await messages(bus, GROUPS) if isinstance(m, GroupKept)]


def indexes(part: GroupKept) -> list[int]:
    return [s.rollout.task.index for s in part.samples]


async def closes(bus) -> None:
    """Every sample is in exactly one place, and all that was issued is accounted for."""
    found = await check(bus)
    assert not (found.extra or found.doubled or found.residual or found.missing), found.text()


async def test_a_group_leaves_in_parts_on_its_last_turn_and_late_members_follow(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, member(1, 2, 0.0), member(1, 0, 1.0))
            await held(context, 2)
            await trained(bus, 1)
            await until(lambda: turned(bus, 1))
            assert await kept(bus) == [], "one step more and it is still within the bound"
            await trained(bus, 2)
            await until(lambda: turned(bus, 2))
            assert isinstance((await messages(bus, GROUPS))[-1], Turned), "the word comes after what it is about"
            [first] = await kept(bus)
            assert (first.key, indexes(first), first.known) == ("g1+0", [0, 2], (1.0, 0.0))
            await put(bus, SCORED, member(1, 3, 0.5, step=1), member(1, 1, 1.0, step=2))
            await until(lambda: _n(kept(bus), 3))
            assert context.counters["parts_kept"] == 3
        _, second, third = await kept(bus)
        assert (second.key, indexes(second), second.known) == ("g1+3", [3], (1.0, 0.0, 0.5))
        assert (third.key, indexes(third), third.known) == ("g1+1", [1], (1.0, 1.0, 0.0)), "not with the one before it"
        listed = await bus.hash_of(bus.keys.open_groups)
        assert sorted(listed) == ["g1+0", "g1+1", "g1+3"], "the parts are open until they are trained"
        assert await bus.length(SCORED) == 0
        assert [v.members for v in await messages(bus, VERDICTS)] == [(0, 2), (3,), (1,)]


async def test_a_turn_ends_in_one_call_to_the_bus_however_many_groups_it_lets_go(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, *range(1, 7))
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, *(member(g, i, float(i)) for g in range(1, 7) for i in range(2)))
            await held(context, 12)
            exchange, commits = bus.link._wire.exchange, []

            async def counted(commands):
                commits.extend(len(c) for c in commands if c[0] == "EVALSHA" and "hop" in c)
                return await exchange(commands)

            monkeypatch.setattr(bus.link._wire, "exchange", counted)
            await trained(bus, 2)
            await until(lambda: turned(bus, 2))
            assert len(commits) == 1
        assert [part.group_id for part in await kept(bus)] == [f"g{g}" for g in range(1, 7)]
        assert isinstance((await messages(bus, GROUPS))[-1], Turned)


async def test_the_ledger_closes_between_the_parts(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, *(member(1, i, float(i)) for i in range(3)))
            await held(context, 3)
            await trained(bus, 2)
            await until(lambda: turned(bus, 2))
            found = await check(bus)
            assert found.missing == ("g1/3",) and not (found.extra or found.doubled or found.residual)
            await put(bus, SCORED, member(1, 3, 0.0))
            await until(lambda: _n(kept(bus), 2))
            await closes(bus)


async def test_one_finished_member_has_nobody_to_be_compared_with_and_waits_for_a_sibling(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, member(1, 0, 1.0))
            await held(context, 1)
            await trained(bus, 3)
            await until(lambda: turned(bus, 3))
            assert await kept(bus) == []
            await put(bus, SCORED, member(1, 1, 0.0, step=3))
            [part] = await until(lambda: kept(bus))
        assert indexes(part) == [0, 1]


async def test_equal_rewards_on_the_last_turn_train_nobody_but_a_late_member_counts(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, *(member(1, i, 0.0) for i in range(3)))
            await held(context, 3)
            await trained(bus, 2)
            await until(lambda: turned(bus, 2))
            [verdict] = await messages(bus, VERDICTS)
            assert (verdict.reason, verdict.members, verdict.n_samples) == ("zero_std_0", (0, 1, 2), 3)
            await put(bus, SCORED, member(1, 3, 1.0))
            [late] = await until(lambda: kept(bus))
        assert late.known == (0.0, 0.0, 0.0, 1.0)
        accounts = await read_accounts(bus)
        assert accounts.dropped == {"zero_std_0": 3}
        await closes(bus)


async def test_a_late_member_that_is_lost_takes_nobody_with_it(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, *(member(1, i, float(i)) for i in range(3)))
            await held(context, 3)
            await trained(bus, 2)
            await until(lambda: kept(bus))
            lost = RolloutLost(sample_id="g1/3", group_id="g1", n_samples=N, reason="poison", tokens_made=TOKENS)
            await put(bus, SCORED, lost)
            await until(lambda: _n(messages(bus, VERDICTS), 2))
        assert (await read_accounts(bus)).dropped == {"lost_poison": 1}
        await closes(bus)


async def test_a_filter_that_starts_again_knows_what_left_and_speaks_only_after_it_has_all(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        await issue(bus, 1, 2)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, member(1, 0, 1.0), member(1, 1, 0.0), member(2, 0, 0.0, step=1), member(2, 3, 1.0, step=1))
            await held(context, 4)
            await trained(bus, 2)
            await until(lambda: turned(bus, 2))
        await trained(bus, 3)  # while it is away
        async with running(bus, "filter", run, FilterSpec()):
            await until(lambda: turned(bus, 3))
            found = await messages(bus, GROUPS)
            after = [m.key for m in found[:-1] if isinstance(m, GroupKept)]
            assert isinstance(found[-1], Turned) and after == ["g1+0", "g2+0"]
            await put(bus, SCORED, member(1, 1, 0.0), member(1, 2, 1.0))
            await until(lambda: _n(kept(bus), 3))
        assert await bus.length(SCORED) == 0, "the member that had left is a duplicate"
        assert (await kept(bus))[-1].known == (1.0, 0.0, 1.0)


async def test_the_rule_member_lets_half_a_group_go(redis_url: str, run_name: str) -> None:
    knobs = {"staleness_policy": "member", "max_weight_staleness": 2}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, member(1, 3, 1.0), member(1, 1, 0.0))
            [part] = await until(lambda: kept(bus))
            await put(bus, SCORED, member(1, 0, 0.5))
            await until(lambda: _n(kept(bus), 2))
        late = (await kept(bus))[1]
        assert (indexes(part), part.known) == ([1, 3], (0.0, 1.0))
        assert (indexes(late), late.known) == ([0], (0.5, 1.0)), "had it been early, member 1 would not have been"


async def test_whole_groups_stay_whole_however_old(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs={"max_weight_staleness": 1}) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()) as context:
            await put(bus, SCORED, *(member(1, i, float(i)) for i in range(3)))
            await held(context, 3)
            await trained(bus, 9)
            await until(lambda: turned(bus, 9))
            assert await kept(bus) == []
            await put(bus, SCORED, member(1, 3, 0.0))
            [group] = await until(lambda: kept(bus))
        assert group.known == () and group.key == "g1"


async def test_a_trainer_that_went_back_is_told_anew(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus:
        async with running(bus, "filter", run, FilterSpec()):
            await trained(bus, 5)
            await until(lambda: turned(bus, 5))
            await put(bus, POLICY, Restored(step=3, version=PolicyVersion(9, 3)))
            await until(lambda: turned(bus, 3))
        assert [m.version for m in await messages(bus, GROUPS)] == [6, 9]


def stumbling(samples) -> str | None:
    """A filter of a user's that cannot take the reward 0.5, and answers with a number for 0.25."""
    if any(s.reward == 0.25 for s in samples):
        return 0  # type: ignore[return-value]
    if any(s.reward == 0.125 for s in samples):
        sys.exit()
    if any(s.reward == 0.75 for s in samples):
        threading.Event().wait(60)
    if any(s.reward == 0.5 for s in samples):
        raise ZeroDivisionError("no ratio of 0.5")
    return None


STUMBLING = {"dynamic_sampling_filter_path": f"{__name__}.stumbling"}
OWN = FilterSpec(custom_filter=STUMBLING["dynamic_sampling_filter_path"], hooks_within_s=20.0)


async def test_a_judge_that_raises_drops_the_group_and_the_rest_goes_on(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=STUMBLING) as bus:
        await issue(bus, 1, 2, 3, 4)
        rewards = ((1, 0.5), (3, 0.25), (4, 0.125), (2, 1.0))
        async with running(bus, "filter", run, OWN):
            await put(bus, SCORED, *(member(g, i, reward) for g, reward in rewards for i in range(N)))
            await until(lambda: kept(bus))
            assert [v.reason for v in await messages(bus, VERDICTS)] == [*["judge_raised"] * 3, ""]
        [said, _, left] = [m for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "judge raised"]
        assert "ZeroDivisionError: no ratio of 0.5" in said.text and ": SystemExit" in left.text
        await closes(bus)


async def test_a_judge_that_always_raises_ends_the_run_with_its_text(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name, knobs=STUMBLING) as bus:
        groups = range(1, MOST_RAISED + 1)
        await issue(bus, *groups)

        async def body(context, spec) -> None:
            with pytest.raises(ExceptionGroup) as caught:
                await run(context, spec)
            ends = caught.value
            while isinstance(ends, ExceptionGroup):
                [ends] = ends.exceptions
            assert isinstance(ends, RunEnds) and "ZeroDivisionError: no ratio of 0.5" in str(ends)
            context.note = "ended"

        async with running(bus, "filter", body, OWN) as context:
            await put(bus, SCORED, *(member(g, i, 0.5) for g in groups for i in range(N)))
            await until(lambda: _true(context.note == "ended"))


@pytest.mark.parametrize("reward", [1e300, float("nan"), float("-inf"), 3.5e38])
async def test_a_reward_the_trainer_cannot_hold_drops_its_group(redis_url: str, run_name: str, reward: float) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1)
        async with running(bus, "filter", run, FilterSpec()):
            await put(bus, SCORED, *(member(1, i, reward if i else 1.0) for i in range(N)))
            [verdict] = await until(lambda: messages(bus, VERDICTS))
        assert verdict.reason == "reward_not_finite"


async def _n(found, n: int) -> bool:
    return len(await found) >= n


async def _true(value: bool) -> bool:
    return value


async def test_a_judge_that_does_not_return_ends_the_run_with_its_name(redis_url: str, run_name: str) -> None:
    """What it should judge stays pending; meanwhile the room itself goes on, so that nobody takes it for dead."""
    async with open_bus(redis_url, run_name, knobs=STUMBLING) as bus:
        await issue(bus, 1)

        async def body(context, spec) -> None:
            with pytest.raises(ExceptionGroup) as caught:
                await run(context, spec)
            ends: BaseException = caught.value
            while isinstance(ends, ExceptionGroup):
                [ends] = ends.exceptions
            context.note = f"{type(ends).__name__}: {ends}"

        own = msgspec.structs.replace(OWN, hooks_within_s=0.3)
        async with running(bus, "filter", body, own) as context:
            await put(bus, SCORED, *(member(1, i, 0.75) for i in range(N)))
            await until(lambda: _true(context.note.startswith("RunEnds")))
        assert f"RunEnds: --dynamic-sampling-filter-path {__name__}.stumbling did not end within 0.3 s" in context.note
        assert await bus.length(SCORED) == N
        await closes(bus)
