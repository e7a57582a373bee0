"""Word problems of one sentence or two, made from a seed, for a real pretrained model: things are got, given away or lie in boxes.
Pure; owns nothing. Always true: equal seeds give equal problems, no prompt is drawn twice, and the label is the number asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from miles_async.quickstart.task import Problem

NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Kim", "Lea", "Max", "Nora", "Otto",
         "Paula")  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "nuts", "pens", "shells", "stamps")
PLACES = (("bags", "bag"), ("boxes", "box"), ("jars", "jar"), ("rows", "row"))
SHOWN = (
    {"role": "system", "content": "Solve."},
    {"role": "user", "content": "Rosa has 6 plums and gets 3 more. How many plums does Rosa have now?"},
    {"role": "assistant", "content": "6 + 3 = 9"},
)
"""What stands before every problem: one that is solved, in the form wanted of the others, in words that none of them has."""
TRAIN, HELD_OUT, SEED = 2000, 200, 20261128


def _got(rng: random.Random, name: str, thing: str) -> tuple[str, int]:
    a, b = rng.randint(2, 12), rng.randint(2, 8)
    verb = rng.choice(("gets", "finds", "buys"))
    return f"{name} has {a} {thing} and {verb} {b} more. How many {thing} does {name} have now?", a + b


def _gave(rng: random.Random, name: str, thing: str) -> tuple[str, int]:
    b = rng.randint(2, 8)
    a = b + rng.randint(1, 10)
    verb = rng.choice(("gives away", "loses", "sells"))
    return f"{name} has {a} {thing} and {verb} {b}. How many {thing} does {name} have left?", a - b


def _boxes(rng: random.Random, name: str, thing: str) -> tuple[str, int]:
    a, b = rng.randint(2, 5), rng.randint(2, 6)
    places, place = rng.choice(PLACES)
    return f"{name} has {a} {places} with {b} {thing} in each {place}. How many {thing} does {name} have?", a * b


KINDS: dict[str, tuple[float, Callable[[random.Random, str, str], tuple[str, int]]]] = {
    "got": (0.4, _got),
    "gave": (0.4, _gave),
    "boxes": (0.2, _boxes),
}
"""Kind -> its share and how one is made."""


def draw(rng: random.Random) -> Problem:
    """One problem. Two draws may give the same text."""
    kind = rng.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
    text, answer = KINDS[kind][1](rng, rng.choice(NAMES), rng.choice(THINGS))
    return Problem(prompt=text, label=str(answer), written=str(answer), kind=kind)


def make_words(seed: int = SEED, *, train: int = TRAIN, held_out: int = HELD_OUT) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems with different prompts, those of the shipped files by default."""
    rng, unique = random.Random(seed), dict[str, Problem]()
    while len(unique) < train + held_out:
        problem = draw(rng)
        unique.setdefault(problem.prompt, problem)
    made = list(unique.values())
    return made[held_out:], made[:held_out]


def row_of(problem: Problem) -> dict[str, object]:
    """A row of the shipped files: `prompt` is a dialogue that ends with the problem."""
    return {"prompt": [*SHOWN, {"role": "user", "content": problem.prompt}], "label": problem.label}
