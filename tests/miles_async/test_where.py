"""Conditions on rows: what they mean, and that nothing in them is executed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.topology import EVENTS, GROUPS, SCORED, STREAMS
from miles_async.console.rows import known
from miles_async.console.where import Where
from miles_async.settings.errors import SettingsError

WORDS = ["tokens", "reward", "1", "0.5", "'a'", "(", ")", "and", "or", "not", "in", "<", "==", "+", "/", "len", "[", "]", ",", "."]
ROW = {
    "tokens": 2100,
    "reward": 0.0,
    "finish": "length",
    "versions": [3, 4],
    "rewards": {"format": 1.0},
    "label": "",
    "worker": None,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("tokens > 2000 and reward == 0", True),
        ("tokens > 2000 and not reward == 0", False),
        ("1000 < tokens <= 2100", True),
        ("finish == 'length' or nothing", True),
        ("finish in ['stop', 'length'] and 4 in versions", True),
        ("rewards.format == 1 and len(versions) == 2", True),
        ("tokens / 100 % 2 == 1 and abs(reward - 1) == 1", True),
        ("nothing > 3", False),
        ("nothing < 3", False),
        ("not nothing > 3", True),
        ("worker == None", True),
        ("tokens / reward > 1", False),
        ("finish * 1000000000 == ''", False),
        ("'a' < tokens", False),
    ],
)
def test_what_a_condition_means(text, holds):
    names = {name for name in ROW if name != "rewards"} | {"rewards.", "nothing"}
    assert Where(text, names).holds(ROW) is holds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tokens >", "ends too early"),
        ("tokens > > 3", "cannot be read at character 10"),
        ("finish='stop'", "Write == to compare."),
        ("tokns > 1", "Did you mean tokens?"),
        ("foo > 1", "has no field foo. Fields here: bytes, "),
        ("__import__('os').system('true')", "may"),
        ("().__class__", "has no field"),
        ("rewards.__class__ == 1 and [x for x in versions]", "may not use"),
        ("(lambda: 1)()", "may"),
        ("2 ** 99999999", "may not use the operator Pow"),
        ("tokens * 'a' * 9999 == 0", "arithmetic is for numbers"),
        ("len(tokens, 2)", "may call len and abs alone"),
        ("f'{tokens}'", "may not use"),
        ("(" * 300 + "1" + ")" * 300, ""),
        ("1 and " * 400 + "1", "longer than"),
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(text, why):
    with pytest.raises(SettingsError) as refused:
        Where(text, known(SCORED))
    assert why in str(refused.value) and "\n" not in str(refused.value) and str(refused.value).count("--where = ") == 1


@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_no_text_does_more_than_hold_or_not(text):
    try:
        where = Where(text, known(SCORED))
    except SettingsError as error:
        assert "\n" not in str(error)
        return
    assert where.holds(ROW) in (True, False)


def test_each_stream_has_its_own_names():
    assert {"reward", "tokens"} <= known(GROUPS) and "reward" not in known(EVENTS) and "level" in known(EVENTS)
    assert all({"id", "type", "bytes"} <= known(stream) for stream in STREAMS)
