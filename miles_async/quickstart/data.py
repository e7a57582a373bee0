"""Arithmetic problems for the quickstart, from a seed.

Writes the two JSONL files in `configs/data/` (`python -m miles_async.quickstart.data`); owns nothing at run time.
Always true: no text of a held-out problem occurs among the training problems, and equal seeds give equal files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DATA_SEED", "KINDS", "MIX", "Problem", "draw", "make_problems", "stream", "write_jsonl"]

DATA_SEED = 20261121
"""Seed of the files shipped in `configs/data/`."""

TRAIN_PROBLEMS = 2400
HELD_OUT_PROBLEMS = 240

KINDS: tuple[str, ...] = ("sum", "difference", "chain", "bracket", "mixed", "product")

MIX: Mapping[str, float] = {
    "sum": 0.26,
    "difference": 0.26,
    "chain": 0.20,
    "bracket": 0.12,
    "mixed": 0.12,
    "product": 0.04,
}
"""Share of each kind in the shipped files (products fall short of theirs: there are only 100)."""

_CHARACTERS = frozenset("0123456789+-*()=")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `prompt` ends with "="; `label` is the decimal answer, with "-" when negative."""

    prompt: str
    label: str
    kind: str
    operators: int


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


def stream(seed: int, *, mix: Mapping[str, float] = MIX, without: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Endless problems from `seed`, none of whose prompts is in `without`."""
    rng = random.Random(seed)
    while True:
        problem = draw(rng, mix)
        if problem.prompt not in without:
            yield problem


def make_problems(seed: int, *, train: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """`train` and `held_out` problems, all with different prompts, in random order.

    Raises ValueError when that many different problems do not exist (about 7,000 do).
    """
    if train < 0 or held_out < 0 or train + held_out > 5000:
        raise ValueError(f"train={train} + held_out={held_out} refused: must be >= 0 and at most 5000 together.")
    unique: dict[str, Problem] = {}
    for problem in stream(seed):
        unique.setdefault(problem.prompt, problem)
        if len(unique) >= train + held_out:
            break
    problems = list(unique.values())[: train + held_out]
    random.Random(seed + 1).shuffle(problems)  # late draws are poor in the small kinds: mix before cutting
    return problems[held_out:], problems[:held_out]


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """One object per line with the string columns `prompt` and `label`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for problem in problems:
            out.write(json.dumps({"prompt": problem.prompt, "label": problem.label}) + "\n")


def _problem(kind: str, text: str, answer: int) -> Problem:
    assert set(text) <= _CHARACTERS
    return Problem(prompt=f"{text}=", label=str(answer), kind=kind, operators=sum(ch in "+-*" for ch in text))


def main() -> None:
    """Rewrite the shipped files under `configs/data/` of the current directory."""
    train, held_out = make_problems(DATA_SEED, train=TRAIN_PROBLEMS, held_out=HELD_OUT_PROBLEMS)
    write_jsonl(Path("configs/data/arithmetic_train.jsonl"), train)
    write_jsonl(Path("configs/data/arithmetic_held_out.jsonl"), held_out)


if __name__ == "__main__":
    main()
