"""The task of long answers: a column of digits added line by line, the number of lines with a long tail. Pure.

    prompt    a4b7c1=                    lines a, b, c hold 4, 7 and 1
    response  a4=4b7=11c1=12####12       each line, its digit, the total so far; then the answer

The answer alone is rewarded; a slip in any line makes it wrong, so a long column is harder than a short one.
"""

from __future__ import annotations

import math
import random
import string

from miles_async.quickstart.task import SPECIAL, Problem, Shape, Task, WarmStart

LINES = string.ascii_lowercase + string.ascii_uppercase
"""Name of each line, in order."""

LEAST_LINES, MOST_LINES = 2, 50
MEDIAN_LINES, SPREAD = 6.0, 0.85
"""Lines of a column: log-normal with this median and standard deviation of the logarithm, rounded and clipped."""
LESSON_SPREAD = 1.2
"""Lesson 1 has more long columns than the task, or the names of the last lines would hardly be seen ..."""
LESSON_FIRST_LINES, LESSON_GROWN = 8, 0.6
"""... but it begins with at most this many lines and has the longest after this share: short ones teach adding faster."""

MARK = "####"
"""Before the answer, as the rule `math` reads it; one token."""

SLIP_SHARE = 0.6
"""Lesson 2: share of the lines with a slip; more than half, so that greedy answers are wrong too ..."""
SKIP_SHARE = 0.25
"""... and the share of the slips that leave the line out; the others make the total one too high."""


def draw(rng: random.Random, spread: float = SPREAD, median: float = MEDIAN_LINES) -> Problem:
    """One column. `kind` is its number of lines, in decimal."""
    lines = round(median * math.exp(rng.gauss(0.0, spread)))
    lines = min(max(lines, LEAST_LINES), MOST_LINES)
    digits = [rng.randint(0, 9) for _ in range(lines)]
    prompt = "".join(f"{line}{digit}" for line, digit in zip(LINES, digits, strict=False))
    return Problem(prompt=f"{prompt}=", label=str(sum(digits)), written=write(digits), kind=str(lines))


def draw_lesson(rng: random.Random, share: float) -> Problem:
    """One column of lesson 1, of which `share` is done; longer ones than it allows are drawn again."""
    most = LESSON_FIRST_LINES + (MOST_LINES - LESSON_FIRST_LINES) * share / LESSON_GROWN
    while True:
        problem = draw(rng, LESSON_SPREAD)
        if int(problem.kind) <= most:
            return problem


def write(digits: list[int], slips: dict[int, str] | None = None) -> str:
    """The response that adds `digits` line by line. `slips`: index of a line -> "skip" or "one more"."""
    total, text = 0, []
    for index, digit in enumerate(digits):
        slip = (slips or {}).get(index)
        if slip != "skip":
            total += digit + (slip == "one more")
            text.append(f"{LINES[index]}{digit}={total}")
    return f"{''.join(text)}{MARK}{total}"


def careless(rng: random.Random, problem: Problem) -> str:
    """The column added with slips in some of its lines."""
    digits = [int(character) for character in problem.prompt if character.isdigit()]
    slips = {}
    for index in range(len(digits)):
        if rng.random() < SLIP_SHARE:
            slips[index] = "skip" if rng.random() < SKIP_SHARE else "one more"
    return write(digits, slips)


COLUMNS = Task(
    name="columns",
    draw=draw,
    draw_lesson=draw_lesson,
    careless=careless,
    vocabulary=(*SPECIAL, *string.digits, "=", MARK, *LINES),
    max_tokens=448,
    data_seed=20261122,
    most=20_000,
    shape=Shape(layers=3, heads=2, kv_heads=1),
    lessons=WarmStart(learn_steps=700, careless_steps=60, batch_size=24, parts=4),
)
