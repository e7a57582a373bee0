"""What a member is compared with does not depend on how long it takes itself, so that the gradient has no bias by length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.filter.groups import GroupTable, leaves_now, tips
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import OpenGroup
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import VersionSpan
from bus.streams.entry import Entry
from bus.topology import SCORED

BOUND = 2


def arrival(index: int, n: int) -> tuple[Entry, Scored]:
    """A member with one token of step 0, whose reward tells it apart from all others."""
    task = SampleTask(sample_id=f"g/{index}", group_id="g", index=index, n_samples=n, prompt_id="p", prompt_tokens=memoryview(b""))
    response = Response(
        tokens=pack_ints([0]), logprobs=pack_floats([0.0]), loss_mask=memoryview(b"\x01"), spans=(VersionSpan(1, 0, 1),)
    )
    scored = Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=float(index))
    return Entry(id=f"{index + 1}-0", stream=SCORED, readers="filter", fields={}, body=b"", size=0), scored


def compared_with(*, n: int, policy: str, own_place: int, turn_after: int) -> set[float]:
    """Rewards of siblings that member 0 is compared with. Siblings end in order of their index; member 0 ends after
    `own_place` of them, and the group's last turn comes after `turn_after` of them."""
    table, step, known = GroupTable(), 0, {}
    table.begin("g", OpenGroup(group_id="g", prompt_id="p", n_samples=n))

    def release(came: int | None) -> None:
        if not table.knows("g") or not leaves_now(half := table.get("g"), policy=policy, step=step, bound=BOUND):
            return
        if 0 in half.members:
            known.update(half.known)
        tipped = came if tips(half, policy=policy, step=step, bound=BOUND) else None
        table.release(half, list(half.members), half.basis(tipped))

    for place in range(n):
        if place == own_place:
            table.add(*arrival(0, n))
            release(0)
        if place == turn_after:
            step = BOUND
            release(None)
        if place < n - 1:
            table.add(*arrival(place + 1, n))
            release(place + 1)
    assert not table.knows("g"), "all members have left"
    return {reward for index, reward in known.items() if index}


@given(n=st.integers(2, 8), policy=st.sampled_from(["split", "member"]), turn_after=st.integers(0, 8))
def test_a_member_is_compared_with_the_same_siblings_whenever_it_ends(n: int, policy: str, turn_after: int) -> None:
    sets = [compared_with(n=n, policy=policy, own_place=place, turn_after=turn_after) for place in range(n)]
    assert all(found == sets[0] for found in sets), sets
    assert sets[0]


def test_the_last_turn_takes_all_that_are_here_and_later_ones_never_count() -> None:
    for place in range(6):
        assert compared_with(n=6, policy="split", own_place=place, turn_after=3) == {1.0, 2.0, 3.0}


def test_under_member_the_one_that_makes_the_half_is_no_basis_for_late_ones() -> None:
    assert compared_with(n=8, policy="member", own_place=0, turn_after=8) == {1.0, 2.0, 3.0}
    assert compared_with(n=8, policy="member", own_place=7, turn_after=8) == {1.0, 2.0, 3.0}
