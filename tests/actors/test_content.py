"""Token ids and log-probabilities are checked as one large number each: with the same verdict as one after the other."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from actors.runtime.arrays import INT32, LOGPROB_HIGH, MOST_LANES, floats_fit, ints_fit, logprobs_fault, tokens_fault
from bus.messages.base import pack_floats, pack_ints

ids = st.integers(-INT32, INT32 - 1) | st.integers(-2, 70)
values = st.floats(width=32, allow_nan=True) | st.floats(-30, 2**-7, width=32)


@given(st.lists(ids, max_size=40), st.integers(1, 64) | st.sampled_from([0, INT32 - 1]))
@example([63, 63], 64)
@example([0, 64], 64)
@example([-1], 0)
@example([0, -INT32], 64)
@example([INT32 - 1, 0], 64)
def test_token_ids_fit_together_as_each_does_alone(tokens: list[int], vocabulary: int) -> None:
    assert ints_fit(pack_ints(tokens), vocabulary) == (tokens_fault(tokens, vocabulary) == "")


@given(st.lists(values, max_size=40))
@example([-0.0, 0.0, -99.0])
@example([LOGPROB_HIGH, -1.0])
@example([0.0100001])
@example([-1.1e30])
@example([-1e30])  # the nearest float32 is lower
@example([-0.9e30, 0.009])
@example([math.nan])
@example([-math.inf, -1.0])
@example([-1.0, math.inf])
def test_log_probs_fit_together_as_each_does_alone(logprobs: list[float]) -> None:
    packed = pack_floats(logprobs)
    assert floats_fit(packed) == (logprobs_fault(packed.cast("f").tolist()) == "")


def test_what_is_longer_than_one_number_is_looked_at_in_pieces() -> None:
    n = MOST_LANES // 4 + 3
    assert ints_fit(pack_ints([7] * n), 8) and not ints_fit(pack_ints([7] * (n - 1) + [8]), 8)
    assert floats_fit(pack_floats([-1.0] * n)) and not floats_fit(pack_floats([-1.0] * (n - 1) + [float("nan")]))
