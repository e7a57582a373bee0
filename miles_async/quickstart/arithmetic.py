"""The quickstart's task: short arithmetic problems whose answer is written at once. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping

from miles_async.quickstart.task import SPECIAL, Problem, Task

KINDS: tuple[str, ...] = ("sum", "difference", "chain", "bracket", "mixed", "product")

MIX: Mapping[str, float] = {
    "sum": 0.26,
    "difference": 0.26,
    "chain": 0.20,
    "bracket": 0.12,
    "mixed": 0.12,
    "product": 0.04,
}
"""Share of each kind in the shipped files (fewer products: only 100 exist)."""

LESSON_MIX = {"sum": 0.13, "difference": 0.15, "chain": 0.26, "bracket": 0.13, "mixed": 0.30, "product": 0.05}
"""Kinds in lesson 1: the hard ones more often than in the task."""

SLIPS: dict[int, float] = {0: 0.20, 1: 0.80}
"""Lesson 2 adds this to the right answer, with this probability. 0 is no slip."""


def draw(rng: random.Random, mix: Mapping[str, float] = MIX) -> Problem:
    """One problem of a kind drawn from `mix` (kind -> weight, > 0). Not unique: two calls may give the same text."""
    kind = rng.choices(list(mix), weights=list(mix.values()))[0]
    a, b, c = (rng.randint(0, 9) for _ in range(3))
    wide, small = rng.randint(10, 99), rng.randint(2, 3)
    p, q = rng.choice("+-"), rng.choice("+-")
    ps, qs = (1 if sign == "+" else -1 for sign in (p, q))
    match kind:
        case "sum":
            return _problem(kind, f"{wide}+{a}", wide + a)
        case "difference":
            return _problem(kind, f"{wide}-{a}", wide - a)
        case "chain":
            return _problem(kind, f"{a}{p}{b}{q}{c}", a + ps * b + qs * c)
        case "bracket":
            return _problem(kind, f"{a}-({b}{q}{c})", a - (b + qs * c))
        case "mixed" if rng.random() < 0.5:
            return _problem(kind, f"{small}*{a}{p}{b}", small * a + ps * b)
        case "mixed":
            return _problem(kind, f"{a}{p}{small}*{b}", a + ps * small * b)
        case "product":
            return _problem(kind, f"{a}*{b}", a * b)
    raise ValueError(f"kind {kind!r} in the mix is unknown. Use one of {', '.join(KINDS)}.")


def draw_lesson(rng: random.Random, _share: float) -> Problem:
    """One problem of lesson 1, whose kinds stay the same throughout."""
    return draw(rng, LESSON_MIX)


def careless(rng: random.Random, problem: Problem) -> str:
    """The label, or more often one too many."""
    return str(int(problem.label) + rng.choices(list(SLIPS), list(SLIPS.values()))[0])


def _problem(kind: str, text: str, answer: int) -> Problem:
    return Problem(prompt=f"{text}=", label=str(answer), written=str(answer), kind=kind)


ARITHMETIC = Task(
    name="arithmetic",
    draw=draw,
    draw_lesson=draw_lesson,
    careless=careless,
    vocabulary=(*SPECIAL, *"0123456789+-*()= "),
    max_tokens=128,
    data_seed=20261121,
    most=5000,  # about 7,000 different ones exist
)
