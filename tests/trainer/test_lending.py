"""When the trainer's GPUs are lent: never for a wait that is shorter than what lending costs, never to and fro."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.lending import Arrivals, Costs, expected_wait, should_be_lent

seconds = st.floats(0.0, 1000.0)
costs = st.fixed_dictionaries({"lend_s": st.floats(0.0, 100.0), "take_s": st.floats(0.0, 100.0), "floor_s": st.floats(0.1, 60.0)})


@given(wait_s=seconds, cost=costs, returns=st.integers(0, 8), unread=st.booleans())
def test_nothing_is_lent_for_a_wait_below_what_it_costs_or_without_work(
    wait_s: float, cost: dict[str, float], returns: int, unread: bool
) -> None:
    lends = should_be_lent(lent=False, wait_s=wait_s, returns=returns, unread=unread, **cost)
    if not unread or wait_s <= cost["floor_s"] or wait_s <= cost["lend_s"] + cost["take_s"]:
        assert not lends
    if lends:  # and what was lent just now stays lent
        assert should_be_lent(lent=True, wait_s=wait_s, returns=returns, unread=False, **cost)


@given(estimates=st.lists(seconds, max_size=200), cost=costs)
def test_an_estimate_that_jumps_does_not_send_the_gpus_to_and_fro(estimates: list[float], cost: dict[str, float]) -> None:
    lent, lends, returns, longest = False, 0, 0, max(estimates, default=0.0)
    for wait_s in estimates:
        wanted = should_be_lent(lent=lent, wait_s=wait_s, returns=returns, unread=True, **cost)
        lends += wanted and not lent
        returns += lent and not wanted
        lent = wanted
    least = max(cost["floor_s"], cost["lend_s"] + cost["take_s"])
    assert lends <= max(0.0, math.log2(max(1.0, longest / least))) + 1


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
