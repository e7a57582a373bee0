"""When the trainer's GPUs are lent: never for a wait that is shorter than what lending costs, never to and fro."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from actors.trainer.lending import Arrivals, Costs, expected_wait, should_be_lent

costs = st.fixed_dictionaries({"lend_s": st.floats(0.0, 100.0), "take_s": st.floats(0.0, 100.0), "floor_s": st.floats(0.1, 60.0)})


def least(cost: dict[str, float]) -> float:
    """The shortest wait for which lending can pay."""
    return max(cost["floor_s"], cost["lend_s"] + cost["take_s"])


@given(share=st.floats(0.0, 2.0), cost=costs, returns=st.integers(0, 3), unread=st.booleans())
def test_nothing_is_lent_for_a_wait_below_what_it_costs_or_without_work(
    share: float, cost: dict[str, float], returns: int, unread: bool
) -> None:
    wait_s = share * least(cost)
    lends = should_be_lent(lent=False, wait_s=wait_s, returns=returns, unread=unread, **cost)
    if not unread or share <= 1.0:
        assert not lends
    if lends:  # and what was lent just now stays lent
        assert should_be_lent(lent=True, wait_s=wait_s, returns=returns, unread=False, **cost)


@given(shares=st.lists(st.one_of(st.just(0.0), st.floats(1.0, 100.0)), max_size=200), cost=costs)
@example(shares=[100.0, 0.0] * 50, cost={"lend_s": 5.0, "take_s": 5.0, "floor_s": 1.0})
def test_an_estimate_that_jumps_does_not_send_the_gpus_to_and_fro(shares: list[float], cost: dict[str, float]) -> None:
    lent, lends, returns = False, 0, 0
    for share in shares:
        wanted = should_be_lent(lent=lent, wait_s=share * least(cost), returns=returns, unread=True, **cost)
        lends += wanted and not lent
        returns += lent and not wanted
        lent = wanted
    assert lends <= math.log2(max([1.0, *shares])) + 1


def test_the_wait_is_told_by_how_fast_samples_came() -> None:
    came = Arrivals()
    assert came.rate(5.0) == 0.0 and expected_wait(missing=8, rate=0.0, waited_s=7.0) == 7.0
    for second in range(20):
        came.add(float(second), 4 if second < 10 else 2, window=16)
    assert came.rate(19.0) == 2.0 and expected_wait(missing=10, rate=2.0, waited_s=0.0) == 5.0
    assert came.rate(27.0) < 1.1, "nothing has come for a while"
    assert expected_wait(missing=0, rate=2.0, waited_s=9.0) == 0.0


def test_a_boot_is_no_measure_of_the_next_time_and_the_slowest_return_is() -> None:
    found: Any = Costs()
    assert found.lend_s == found.take_s == 1.0
    for lend_s, take_s in ((60.0, 1.0), (2.0, 3.0), (2.0, 1.0)):
        found.lent(lend_s)
        found.taken(take_s)
    assert (found.lend_s, found.take_s) == (2.0, 3.0)
    for _ in range(100):  # steps in which its cost kept the GPUs from being lent
        found.fade()
    assert found.lend_s < 0.1
