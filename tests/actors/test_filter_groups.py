"""When members of a group leave, and whether they are worth training (pure)."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from actors.filter.groups import GroupTable, Half, leaves_now, tips
from actors.filter.judges import JUDGES, MOST_REASONS, judge, kept_reason
from bus.messages.groups import OpenGroup
from bus.messages.reasons import DropReason
from bus.messages.samples import Episode, Response, RolloutLost, Scored, Strand
from bus.messages.versions import VersionSpan
from bus.streams.entry import Entry
from bus.topology import SCORED
from tests.actors.house import scored

N, BOUND = 5, 2


def member(index: int, reward: float = 0.0, *, steps: tuple[int, ...] = (0,), **fields: Any) -> Scored:
    """A sample with two tokens of each step."""
    plain = scored(1, index, reward, n=N, tokens=2 * len(steps))
    response = msgspec.structs.replace(plain.rollout.response, spans=tuple(VersionSpan(step + 1, step, 2) for step in steps))
    return msgspec.structs.replace(plain, rollout=msgspec.structs.replace(plain.rollout, response=response, **fields))


def lost(index: int) -> RolloutLost:
    return RolloutLost(sample_id=f"g1/{index}", group_id="g1", n_samples=N, reason="poison", tokens_made=3)


class Table(GroupTable):
    """A table in which group g1 has begun."""

    def __init__(self, *members: Scored | RolloutLost, n: int = N, **opened: Any) -> None:
        super().__init__()
        self.begin("g1", OpenGroup(group_id="g1", prompt_id="p1", n_samples=n, **opened))
        for one in members:
            assert self.put(one) == "held"

    def put(self, one: Scored | RolloutLost, entry_id: str = "") -> str:
        task = one.rollout.task if isinstance(one, Scored) else one
        entry = Entry(id=entry_id or f"{task.sample_id[3:]}-1", stream=SCORED, readers="filter", fields={}, body=b"", size=0)
        return self.add(entry, one)

    @property
    def half(self) -> Half:
        return self.get("g1")


def leaves(table: Table, policy: str, step: int) -> bool:
    return leaves_now(table.half, policy=policy, step=step, bound=BOUND)


def test_under_split_two_leave_together_in_the_step_in_which_the_oldest_token_reaches_the_bound() -> None:
    table = Table(member(0, steps=(3, 4, 5)), member(1, steps=(5,)))
    assert [step for step in range(4, 9) if leaves(table, "split", step)] == [5, 6, 7, 8]
    assert not leaves(Table(member(0)), "split", 9), "one alone has nobody to be compared with"
    assert not leaves(table, "whole", 9)


def test_a_token_of_a_lost_future_is_old_on_its_other_side() -> None:
    assert [step for step in range(6) if leaves(Table(member(0, steps=(4,)), member(1, steps=(4,))), "split", step)] == [0, 1, 2]


def test_under_member_more_than_half_leave_at_once() -> None:
    two = Table(member(0), member(1))
    assert not leaves(two, "member", 0) and leaves(two, "member", BOUND), "unless it is their last turn"
    three = Table(member(0), member(1), member(2))
    assert leaves(three, "member", 0) and not leaves(three, "split", 0)
    assert tips(three.half, policy="member", step=0, bound=BOUND)
    assert not tips(three.half, policy="member", step=BOUND, bound=BOUND), "two had been enough"


def test_a_group_with_a_lost_member_stays_until_it_is_whole() -> None:
    table = Table(member(0), member(1), lost(2), member(3))
    assert not leaves(table, "split", 9) and not leaves(table, "member", 9)
    table.put(member(4))
    assert leaves(table, "split", 0) and leaves(table, "whole", 0)


def test_late_members_of_a_split_group_leave_at_once_and_the_last_one_ends_it() -> None:
    table = Table(member(0, 1.0), member(1, 0.0))
    table.release(table.half, (0, 1), table.half.basis())
    assert not leaves(table, "split", 0), "nobody is here"
    assert table.put(member(0), "9-1") == "duplicate", "it has left"
    assert table.put(lost(3)) == "held" and leaves(table, "split", 0)
    table.release(table.half, (3,), table.half.basis())
    for index in (2, 4):
        table.put(member(index, 0.5))
    assert table.half.complete and table.half.known == {0: 1.0, 1: 0.0, 2: 0.5, 4: 0.5}
    table.release(table.half, (2, 4), table.half.basis())
    assert not table.knows("g1")


def test_a_filter_that_starts_again_waits_only_for_those_that_have_not_left() -> None:
    table = Table(n=4, members=(1, 3), rewards={0: 1.0, 2: 0.5, 3: 9.0})
    assert (table.half.left, table.half.split) == ({0: 1.0, 2: 0.5}, True)
    assert table.put(member(2), "9-1") == "duplicate"
    assert table.put(member(1)) == "held" and not table.half.complete
    assert table.put(member(1)) == "held", "the same entry once more"
    assert table.put(member(1), "9-1") == "duplicate"
    assert table.put(member(3)) == "held" and table.half.complete


def test_a_reward_that_is_none_is_no_basis_for_anybody() -> None:
    table = Table(member(0, math.nan), member(1, 1.0), member(2, 1e300), member(3, 0.0))
    assert table.half.known == {1: 1.0, 3: 0.0}
    assert table.half.basis(tipped_by=3) == {1: 1.0}
    table.release(table.half, (0, 1, 2, 3), {0: math.inf, 1: 1.0})
    table.put(member(4, 0.25))
    assert table.half.known == {1: 1.0, 4: 0.25} and table.half.basis() == {1: 1.0}


def test_a_first_part_with_one_usable_reward_is_split_all_the_same() -> None:
    table = Table(member(0, math.nan), member(1, 1.0))
    basis = table.half.basis(tipped_by=1)
    assert basis == {1: 1.0}, "its own, where no other is left"
    table.release(table.half, (0, 1), basis)
    assert table.half.split
    table.put(member(2, 0.5))
    assert leaves(table, "split", 0), "it is late"


def test_tokens_of_a_lost_future_age_a_group_that_has_others_too() -> None:
    table = Table(member(0, steps=(1, 6)), member(1, steps=(2,)))
    assert [table.half.age(step) for step in range(1, 8)] == [5, 4, 3, 3, 4, 5, 6]
    assert leaves(table, "split", 2)


def test_groups_leave_in_the_order_of_their_ids() -> None:
    table = Table()
    for name in ("g3", "g0"):
        table.begin(name, OpenGroup(group_id=name, prompt_id="p", n_samples=1))
    assert [half.group_id for half in table.halves()] == ["g0", "g1", "g3"]


# -- judges ------------------------------------------------------------------------------------------------------------


def masked(one: Scored) -> Scored:
    response = msgspec.structs.replace(one.rollout.response, loss_mask=memoryview(bytes(one.rollout.response.n_tokens)))
    return msgspec.structs.replace(one, rollout=msgspec.structs.replace(one.rollout, response=response))


def rewritten(one: Scored, earlier: Scored) -> Scored:
    """One whose history was rewritten when nothing was left to say: all of it is in the trajectory before."""
    before = Strand(one.rollout.task.prompt_tokens, earlier.rollout.response)
    rollout = msgspec.structs.replace(one.rollout, response=Response(), episode=Episode(earlier=(before,)))
    return msgspec.structs.replace(one, rollout=rollout)


@pytest.mark.parametrize(
    ("name", "members", "reason"),
    [
        ("nonzero_std", [member(0, 1.0), member(1, 1.0)], "zero_std_1"),
        ("nonzero_std", [member(0, 1.0), member(1, 1.001)], None),
        ("nonzero_std", [member(0, 1e308), member(1, 1.0)], "reward_not_finite"),
        ("nonzero_std", [member(0, 3e38), member(1, -3e38)], None),
        ("nonzero_std", [member(0, 1.0), lost(1)], "lost_poison"),
        ("none", [member(0, math.nan), lost(1)], "lost_poison"),
        ("none", [member(0, 1.0), member(1, math.nan)], "reward_not_finite"),
        ("none", [masked(member(0)), masked(member(1))], "nothing_to_train"),
        ("none", [masked(member(0)), member(1)], None),
        ("none", [rewritten(member(0), member(0)), rewritten(member(1), masked(member(1)))], None),
        ("none", [rewritten(member(0), masked(member(0)))], "nothing_to_train"),
        ("no_truncation", [member(0), member(1, finish="length")], "truncated"),
        ("no_truncation", [member(0), member(1)], None),
    ],
)
def test_the_first_reason_is_told(name: str, members: list[Scored | RolloutLost], reason: str | None) -> None:
    assert judge(members, JUDGES[name]) == reason


def test_a_part_is_compared_with_its_whole_group() -> None:
    part = [member(3, 1.0)]
    assert judge(part, JUDGES["nonzero_std"], (0.0, 1.0, 1.0)) is None
    assert judge([member(0, 0.5), member(1, 1.0)], JUDGES["nonzero_std"], (1.0, 1.0)) == "zero_std_1"
    assert judge(part, JUDGES["no_truncation"], (0.0, 1.0)) is None


def test_so_many_reasons_are_told_apart_and_no_more() -> None:
    known = {str(n) for n in range(MOST_REASONS - 1)}
    assert kept_reason("one  more", known) == "one more" and len(known) == MOST_REASONS
    assert kept_reason("too many", known) == DropReason.OTHER_REASON and len(known) == MOST_REASONS
    assert kept_reason("one more", known) == "one more"
