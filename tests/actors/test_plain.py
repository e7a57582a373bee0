"""Values that a program and its examiner exchange: plain ones arrive as they were, and no other kind can be made of any word."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.plain import decode, encode

PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions()
    | st.decimals(allow_nan=False) | st.dates() | st.datetimes() | st.timedeltas() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.builds(deque, st.lists(inner)),
)  # fmt: skip


def _no_other(*_: Any) -> Any:
    raise ValueError("no plain value")


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    word = json.loads(json.dumps(encode(value, _no_other)))
    again = decode(word, _no_other)
    assert again == value and type(again) is type(value)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=20))
def test_what_is_no_word_is_an_error_and_of_no_other_type(word: Any) -> None:
    plain = (int, bool, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, complex, deque, range, fractions.Fraction)
    plain = (*plain, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, type(None), type(iter([])))
    try:
        value = decode(word, _no_other)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, OverflowError):
        return
    assert type(value) in plain or isinstance(value, tuple)
