"""Pure parts of the console: text, history, figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.recorder.history import FIRST, NEWEST, History, history_of
from bus.inspect import ReadersFacts, StreamFacts
from miles_async.console.figures import Lying, eta_s, lying, shares, throughput, time_split
from miles_async.console.text import compress, duration, human_bytes, human_count, plural, shorten, sparkline, table
from miles_async.console.web.curves import Curves


def step(number, wall, **metrics):
    return {"kind": "step", "wall": wall, "step": number, "groups": [f"g{number}"], "metrics": metrics}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (3729, "1:02:09"),
        (273600, "3 d 04:00"),
    ],
)
def test_durations_read_at_a_glance(seconds, text):
    assert duration(seconds) == text


def test_sizes_and_counts_keep_three_digits():
    assert [human_bytes(n) for n in (0, 999, 12345, 3_400_000)] == ["0 B", "999 B", "12.3 kB", "3.4 MB"]
    assert [human_count(n) for n in (0.5, 912, 3210, 1_450_000, -1500)] == ["0.5", "912", "3.21k", "1.45M", "-1.5k"]
    assert [plural(n, "entry") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 80))
def test_a_sparkline_fits_its_width_and_shows_the_extremes(values, width):
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    points = compress(values, width)
    if points and max(points) > min(points):
        assert line[points.index(max(points))] == "█"
        assert line[points.index(min(points))] == "▁"


def test_columns_are_aligned_and_texts_cut_to_one_line():
    assert table(["a", "n"], [["x", "1"], ["long", "22"]], right=("n",)) == "a      n\nx      1\nlong  22"
    assert shorten("two\nlines  here", 8) == "two lin…"


def test_time_that_the_trainer_does_not_name_is_publishing_but_not_its_absence():
    records = [
        step(1, 100.0, **{"perf/wait_s": 1.0, "perf/train_s": 2.0}),
        step(2, 104.0, **{"perf/wait_s": 1.0, "perf/train_s": 2.0}),
        {"kind": "restored", "wall": 150.0, "step": 2},
        step(3, 160.0, **{"perf/wait_s": 1.0, "perf/train_s": 2.0}),
    ]
    history = history_of(records)
    assert [time_split(s)[2] for s in history.steps] == [0.0, 1.0, 0.0]
    assert shares(history.steps) == pytest.approx((0.3, 0.6, 0.1))
    assert [s.resumed for s in history.steps] == [False, False, True]


def test_pace_is_the_median_so_that_one_restart_does_not_move_the_end():
    records = [step(n, 100.0 + n, **{"rollout/tokens": 50.0}) for n in range(1, 10)] + [step(10, 300.0, **{"rollout/tokens": 50.0})]
    history = history_of(records)
    assert eta_s(history, 20) == pytest.approx(10.0)
    assert eta_s(history, 0) is None
    assert throughput(history.steps[:5]) == pytest.approx(50.0)


def test_a_history_that_follows_a_run_does_not_grow_with_it():
    history, curves = History(bounded=True), Curves()
    for n in range(1, 10_001):
        for record in (step(n, float(n)), {"kind": "fault", "wall": n, "actor": "a", "event": "e", "text": "", "level": "error"}):
            history.fold(record)
        if n % 100 == 0:
            curves.follow(history.steps)
    numbers = [s.step for s in history.steps]
    assert len(numbers) <= FIRST + 2 * NEWEST and numbers == sorted(set(numbers))
    assert numbers[:FIRST] == list(range(1, FIRST + 1)) and numbers[-NEWEST:] == list(range(10_001 - NEWEST, 10_001))
    assert len(history.faults) == len(numbers) and history.counts["fault"] == 10_000
    assert curves.since(0)["step"][-1] == 10_000 and curves.edition == 4, "it halved four times and never began anew"
    history.fold({"kind": "restored", "wall": 10_001.0, "step": 9_990})
    assert history.lost_steps == 10 and history.steps[-1].step == 9_990
    curves.follow(history.steps)
    assert curves.since(0)["step"][-1] == 9_990 and curves.edition > 4


def test_steps_of_a_lost_future_leave_the_history_and_are_counted():
    records = [step(n, 100.0 + n) for n in (1, 2, 3, 4)]
    records += [{"kind": "eval", "wall": 105.0, "step": 4, "name": "x", "metrics": {"eval/x": 0.5}}]
    records += [{"kind": "restored", "wall": 110.0, "step": 2}, step(3, 111.0), step(3, 112.0)]
    history = history_of(records)
    assert [s.step for s in history.steps] == [1, 2, 3]
    assert history.steps[-1].wall == 111.0  # a repeated line is not a step
    assert (history.lost_steps, history.evals) == (2, [])
    assert history.unsaved_groups() == 3


def test_trained_groups_that_wait_for_a_checkpoint_give_no_age_to_those_that_wait_for_the_trainer():
    readers = (ReadersFacts("trainer", 1, 5, 0, oldest_id="1-0", oldest_age_s=300.0),)
    facts = StreamFacts("groups", "filter", True, 6, 0, readers=readers)
    assert lying(facts, history_of([])) == Lying(6, 5, 300.0, 0)
    trained = history_of([step(1, 100.0), step(2, 101.0)])
    assert lying(facts, trained) == Lying(4, 3, None, 2)
