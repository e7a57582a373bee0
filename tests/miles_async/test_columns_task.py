"""The task of long answers: every line adds up, the reward finds the answer, slips are wrong, lengths have a long tail."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from actors.reward.rules import RULES
from actors.reward.sample import Sample
from miles_async.quickstart.columns import COLUMNS, LINES, MARK, MOST_LINES, careless, draw, write

DIGITS = st.lists(st.integers(0, 9), min_size=2, max_size=MOST_LINES)
LINE = re.compile(r"([A-Za-z])(\d)=(\d+)")


def reward(response: str, label: str) -> float:
    """What the shipped rule of configs/long.toml gives."""
    value = RULES["math"](Sample(sample_id="g0/0", prompt="", response=response, label=label))
    assert isinstance(value, float)
    return value


def lines_of(response: str) -> tuple[list[tuple[str, int, int]], str]:
    """Name, digit and total of each line, and the answer; fails when there is anything else."""
    work, mark, answer = response.partition(MARK)
    assert mark and LINE.sub("", work) == ""
    return [(name, int(digit), int(total)) for name, digit, total in LINE.findall(work)], answer


@given(st.integers(0, 2**32))
def test_a_right_response_adds_every_line_of_its_prompt(seed: int) -> None:
    problem = draw(random.Random(seed))
    lines, answer = lines_of(problem.written)
    assert "".join(f"{name}{digit}" for name, digit, _ in lines) + "=" == problem.prompt
    assert "".join(name for name, _, _ in lines) == LINES[: int(problem.kind)]
    totals = [0, *(total for _, _, total in lines)]
    assert all(after - before == digit for before, after, (_, digit, _) in zip(totals, totals[1:], lines, strict=False))
    assert answer == problem.label == str(totals[-1])
    assert len(COLUMNS.encode(problem.prompt + problem.written)) < COLUMNS.max_tokens
    assert reward(problem.written, problem.label) == 1.0


@given(DIGITS, st.data())
def test_the_reward_tells_a_right_total_from_any_slip(digits: list[int], data: st.DataObject) -> None:
    label = str(sum(digits))
    at = data.draw(st.integers(0, len(digits) - 1))
    assert reward(write(digits), label) == 1.0
    assert reward(write(digits, {at: "one more"}), label) == 0.0
    assert reward(write(digits, {at: "skip"}), label) == float(digits[at] == 0)


@given(DIGITS, st.data())
def test_a_response_that_was_cut_off_earns_no_more_than_its_last_number(digits: list[int], data: st.DataObject) -> None:
    whole = write(digits)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    numbers = re.findall(r"\d+", cut)
    assert reward(cut, str(sum(digits))) <= float(bool(numbers) and numbers[-1] == str(sum(digits)))


@given(DIGITS, st.data())
def test_a_skipped_line_makes_a_response_shorter_and_one_more_hardly(digits: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(digits) - 1))
    assert len(write(digits, {at: "skip"})) < len(write(digits))
    assert 0 <= len(write(digits, {at: "one more"})) - len(write(digits)) <= len(digits) + 1


def test_careless_answers_are_mostly_wrong_but_hold_right_lines() -> None:
    rng, wrong, steps, seen = random.Random(3), 0, 0, 0
    for _ in range(400):
        problem = draw(rng)
        lines, answer = lines_of(careless(rng, problem))
        wrong += answer != problem.label
        totals = [0, *(total for _, _, total in lines)]
        steps += sum(b - a == digit for a, b, (_, digit, _) in zip(totals, totals[1:], lines, strict=False))
        seen += int(problem.kind)
    assert 0.7 < wrong / 400 < 1.0 and 0.3 < steps / seen < 0.5


def test_shipped_answers_have_a_long_tail() -> None:
    for problems in COLUMNS.shipped():
        lengths = sorted(len(COLUMNS.encode(problem.written)) + 1 for problem in problems)
        n = len(lengths)
        mean = sum(lengths) / n
        assert 10 <= lengths[0] <= 13 and 250 <= lengths[-1] <= 300
        assert lengths[n // 2] < 0.85 * mean and lengths[99 * n // 100] > 4 * mean
