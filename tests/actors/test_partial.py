"""The partial room: parked samples go on, in an order, masked or anew, and none is lost or counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from actors.partial.actor import PartialSpec, run
from actors.partial.decide import POLICIES, Plan, Waiting
from bus import Bus, Commit, Guard
from bus.ledger import read_accounts
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import OpenGroup
from bus.messages.policy import PolicyAnnounced, StepDone, WeightManifest
from bus.messages.samples import Parked, PrefixDropped, PrefixResume, Response
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import DEAD, PARKED, POLICY, PREFIXES, TAIL
from tests.actors.house import messages, open_bus, put, rollout, running, task, until


def parked(group: int, *steps: int, reason: Any = "drain", each: int = 2) -> Parked:
    """A sample with two tokens of each step."""
    n = each * len(steps)
    response = Response(
        pack_ints([5] * n),
        pack_floats([-0.5] * n),
        memoryview(b"\x01" * n),
        tuple(VersionSpan(s + 1, s, each) for s in steps),
    )
    return Parked(task=task(group, 0, n=1), response=response, reason=reason)


def orders(policy: str, step: int, *waiting: Parked) -> list[tuple[int, str]]:
    found = [Waiting(order, one) for order, one in reversed(list(enumerate(waiting)))]
    return [(plan.order, plan.action) for plan in POLICIES[policy](step, found)]


def test_first_parked_is_first_resumed() -> None:
    assert orders("fifo", 9, parked(1, 3), parked(2, 1), parked(3)) == [(0, "resume"), (1, "resume"), (2, "resume")]


def test_freshness_goes_by_the_oldest_token_and_then_by_the_length() -> None:
    waiting = (parked(1), parked(2, 3, 4), parked(3, 4), parked(4, 2, 4), parked(5, 3), parked(6, 3, 4))
    assert [order for order, _ in orders("freshness_first", 4, *waiting)] == [3, 1, 5, 4, 2, 0]


def test_only_what_is_stale_to_its_last_token_starts_again() -> None:
    waiting = (parked(1, 2), parked(2, 2, 3), parked(3, 1, 2), parked(4), parked(5, 3))
    assert [action for _, action in orders("restart_stale", 4, *waiting)] == [
        "restart",
        "resume",
        "restart",
        "resume",
        "resume",
    ]


# -- the room ----------------------------------------------------------------------------------------------------------


async def listed(bus: Bus, *groups: int) -> None:
    opened = {f"g{g}": msgspec.msgpack.encode(OpenGroup(group_id=f"g{g}", prompt_id=f"p{g}", n_samples=1)) for g in groups}
    await bus.commit(Commit(open_groups=opened, guard=Guard("listed", "", "yes")))


async def moved(bus: Bus, n: int) -> list[Any]:
    """What lies on prefixes and tail once `n` samples are there."""

    async def there() -> bool:
        return await bus.length(PREFIXES) + await bus.length(TAIL) == n

    await until(there)
    assert await bus.length(PARKED) == 0
    return [*await messages(bus, PREFIXES), *await messages(bus, TAIL)]


@pytest.mark.parametrize("mask", [True, False])
async def test_a_parked_sample_resumes_with_its_tokens(redis_url: str, run_name: str, mask: bool) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await listed(bus, 1)
        async with running(bus, "partial", run, PartialSpec(mask_offpolicy=mask)):
            one = parked(1, 0, 1)
            await put(bus, PARKED, one)
            [resumed] = await moved(bus, 1)
        assert await bus.length(TAIL) == 0, "no slots are kept for long samples unless a setting says so"
        assert isinstance(resumed, PrefixResume) and (resumed.task, resumed.response.spans) == (
            one.task,
            one.response.spans,
        )
        assert bytes(resumed.response.loss_mask) == (bytes(4) if mask else b"\x01" * 4)
        assert (await read_accounts(bus)).tokens_dropped == {}


async def test_what_starts_again_has_its_tokens_booked_as_dropped(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await listed(bus, 1, 2)
        version = PolicyVersion(5, 4)
        await put(bus, POLICY, PolicyAnnounced(version=version, manifest=WeightManifest()))
        async with running(bus, "partial", run, PartialSpec(buffer_filter="restart_stale")) as context:
            # The version is heard by a task of its own: what comes before it is heard resumes.
            for attempt in range(100):
                await put(bus, PARKED, parked(1, 0))
                await moved(bus, attempt + 1)
                if context.counters.get("prefixes/restart"):
                    break
            found = await moved(bus, attempt + 1)
            assert found[-1].response.n_tokens == 0 and found[-1].response.spans == ()
            await put(bus, PARKED, parked(2, 4))
            assert (await moved(bus, attempt + 2))[-1].response.n_tokens == 2
            # Steps that are not published yet make nothing older: what started again would be as old at once, for ever.
            newer = PolicyVersion(8, 7)
            await put(bus, POLICY, StepDone(step=7, version=newer, trained_on=newer, groups=()))
            await put(bus, POLICY, PolicyAnnounced(version=PolicyVersion(6, 5), manifest=WeightManifest()))
            for more in range(100):
                await put(bus, PARKED, parked(1, 3))
                await moved(bus, attempt + 3 + more)
                if context.counters["prefixes/restart"] > 1:
                    break
            await put(bus, PARKED, parked(2, 4))
            assert (await moved(bus, attempt + 4 + more))[-1].response.n_tokens == 2
        assert (await read_accounts(bus)).tokens_dropped == {"restarted": 4}


def drop_first(step: int, waiting: Sequence[Waiting]) -> list[Plan]:
    """A policy of a user's that gives up one and leaves the rest out."""
    return [Plan(waiting[0].order, "drop")]


async def test_what_a_policy_leaves_out_resumes_and_what_it_gives_up_is_told(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await listed(bus, 1, 2, 3)
        await put(bus, PARKED, parked(1, 0), parked(2, 0), parked(3, 0))
        async with running(bus, "partial", run, PartialSpec(buffer_filter=f"{__name__}.drop_first", hooks_within_s=20.0)):
            dropped, *rest = await moved(bus, 3)
        assert isinstance(dropped, PrefixDropped) and (dropped.task.group_id, dropped.tokens_made) == ("g1", 2)
        assert [(m.task.group_id, m.response.n_tokens) for m in rest] == [("g2", 2), ("g3", 2)]
        assert (await read_accounts(bus)).tokens_dropped == {}, "who reports the sample books its tokens"


async def test_long_samples_go_on_in_the_lane_kept_for_them(redis_url: str, run_name: str) -> None:
    knobs = {"tail_after_tokens": 4, "tail_slots": 2}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus:
        await listed(bus, 1, 2, 3, 4)
        async with running(bus, "partial", run, PartialSpec()):
            await put(bus, PARKED, parked(1, 0), parked(2, 0, 1), parked(3, 0, reason="tail"), parked(4, reason="tail"))
            await moved(bus, 4)
        assert [m.task.group_id for m in await messages(bus, PREFIXES)] == ["g1", "g4"]
        assert [m.task.group_id for m in await messages(bus, TAIL)] == ["g2", "g3"]


async def test_a_parked_entry_that_is_none_is_buried_and_its_sample_reported(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await listed(bus, 1)
        fields = ("type", "any", "id", "g1/0", "group", "g1", "tokens", "7", "body", b"\xff\x00junk")
        await bus.link.run("XADD", bus.keys.stream(PARKED.name), "*", *fields)
        async with running(bus, "partial", run, PartialSpec()):
            [dropped] = await moved(bus, 1)
        assert isinstance(dropped, PrefixDropped) and (dropped.task.sample_id, dropped.tokens_made) == ("g1/0", 7)
        assert len(await messages(bus, DEAD)) == 1


@pytest.mark.parametrize(("partial", "reason", "kept"), [(True, "engine", 3), (False, "engine", 0), (False, "slice", 3)])
async def test_an_interrupted_sample_begins_again_where_partial_rollout_is_off(
    redis_url: str, run_name: str, partial: bool, reason: str, kept: int
) -> None:
    done = rollout(1, 0, n=2, tokens=3)
    stopped = msgspec.structs.replace(Parked(task=done.task, response=done.response, reason="engine"), reason=reason)
    async with open_bus(redis_url, run_name, knobs={"partial_rollout": partial}) as bus:
        async with running(bus, "partial", run, PartialSpec()):
            await put(bus, PARKED, stopped)
            [resumed] = await moved(bus, 1)
        assert resumed.response.n_tokens == kept
        assert (await read_accounts(bus)).tokens_dropped.get("restarted", 0) == 3 - kept


async def test_an_evaluation_sample_that_begins_again_is_in_no_account(redis_url: str, run_name: str) -> None:
    done = rollout(1, 0, n=2, tokens=3)
    task = msgspec.structs.replace(done.task, sample_id="e1/0", group_id="e1", eval_name="few")
    async with open_bus(redis_url, run_name, knobs={"partial_rollout": False}) as bus:
        async with running(bus, "partial", run, PartialSpec()):
            await put(bus, PARKED, Parked(task=task, response=done.response, reason="drain"))
            [resumed] = await moved(bus, 1)
        assert (resumed.task, resumed.response.n_tokens) == (task, 0)
        assert (await read_accounts(bus)).tokens_dropped == {}
