"""What one part of an answer says (pure): its expression, its value, whether it names what stands beside it, its base."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from actors.reward.mathexpr import KNOWN_COMMANDS, Node, NoExpression, TooLarge, Unknown, is_constant, nodes, parse
from actors.reward.mathnumber import Value
from actors.reward.mathtext import fold, is_text, scale_of, split_unit, words_of
from actors.reward.mathvalue import BELOW_ZERO, POINTS, evaluate, same

_NAME = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{[^{}]*\}))?'*(?:\([^()=]*\))?")
_POINT = re.compile(r"\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)")
_UNDER_A_NAME = re.compile(r"_\{[^{}]*\}|_\w|\^\{[^{}]*\}|\^\w|\([^()]*\)")
_BASED = re.compile(r"([0-9A-Z.]+)\s*(?:_\s*\{?\s*\(?([0-9A-Za-z]+)\)?\s*\}?|\(?\s*base\s*([0-9A-Za-z]+)\s*\)?)")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "twelve": "12"}
_CODE = re.compile(r"\d{1,9}([-/])\d{1,9}(?:\1\d{1,9}){0,6}")
_DATE = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[-/]\d{1,2}[-/]\d{4}")
PHONE_DIGITS = 10  # in four or more groups
_COMMAND = re.compile(r"\\[A-Za-z]+")


class Reading(NamedTuple):
    """What a text says. `tree` None: no expression; `unknown`: but it may be mathematics to others."""

    tree: Node | None
    unknown: bool = False


@lru_cache(maxsize=512)
def read(text: str) -> Reading:
    """The expression of a normalised text. Kept, as the members of lists are read many times."""
    if is_text(text):
        return Reading(None)
    try:
        return Reading(parse(words_of(text)))
    except TooLarge:
        return Reading(None)
    except NoExpression as error:
        return Reading(None, unknown=isinstance(error, Unknown) or not KNOWN_COMMANDS.issuperset(_COMMAND.findall(text)))


@lru_cache(maxsize=2048)
def value_of(text: str, point: int, log_base: int) -> Value | bool | None:
    """The value of a text that is an expression; None where there is none; False where it is too large."""
    tree = read(text).tree
    try:
        return None if tree is None else evaluate(tree, point, log_base)
    except TooLarge:
        return False
    except NoExpression:
        return None


def equal(left: str, right: str) -> bool | None:
    """Equal at every fixed point where both have a value, and at one at least. None where letters leave no such point."""
    trees = [tree for tree in (read(left).tree, read(right).tree) if tree is not None]
    if len(trees) < 2:
        return False
    kinds = {node.kind if len(node.args) == 1 else "" for tree in trees for node in nodes(tree)}
    constant = all(is_constant(tree) for tree in trees)
    points = [0] if constant else [*range(POINTS), *([BELOW_ZERO] if "abs" in kinds else [])]
    found: bool | None = False
    for log_base in (10, 0) if "log" in kinds else (10,):
        found = _equal_at(points, left, right, log_base, constant)
        if found:
            return True
    return found


def _equal_at(points: list[int], left: str, right: str, log_base: int, constant: bool) -> bool | None:
    compared = 0
    for point in points:
        a, b = value_of(left, point, log_base), value_of(right, point, log_base)
        if a is False or b is False:
            return False
        if isinstance(a, Value) and isinstance(b, Value):
            if not same(a, b, constant):
                return False
            compared += 1
    return True if compared else (False if constant else None)


def agree(left: str, right: str) -> bool:
    """Whether two sides of a chain have the same value, units aside."""
    a, b = (split_unit(side, bare_letter=True)[0] for side in (left, right))
    return fold(a) == fold(b) or equal(a, b) is True or equal(*as_numbers(left, right)) is True


def as_numbers(*texts: str) -> list[str]:
    """The texts without units, those that are factors multiplied: a percentage is the hundredth that it is."""
    split = [(bare, scale_of(unit)) for bare, unit in map(split_unit, texts)]
    return [f"({bare})*{found[1].numerator}/{found[1].denominator}" if found else bare for bare, found in split]


def code_of(text: str) -> tuple[int, ...] | None:
    """The numbers of a date, a telephone number and the like, whose signs say neither minus nor over; None of anything else."""
    text = words_of(text)
    if _CODE.fullmatch(text) is None:
        return None
    groups = re.split("[-/]", text)
    padded = any(len(group) > 1 and group[0] == "0" for group in groups)
    long = len(groups) > 3 and sum(map(len, groups)) >= PHONE_DIGITS
    return tuple(map(int, groups)) if padded or long or _DATE.fullmatch(text) else None


def is_rounded(exact: str, rounded: str) -> bool:
    """Whether a decimal is the rounding of a value, to the digits it has."""
    (exact, _), (rounded, _) = split_unit(exact), split_unit(rounded)
    value = value_of(exact, 0, 10)
    if re.fullmatch(r"-?\d*\.?\d+", rounded) is None or not isinstance(value, Value) or not value.real:
        return False
    digits = len(rounded.partition(".")[2])
    gap = abs(Fraction(value.re) - Fraction(Decimal(rounded)))
    return gap <= Fraction(51, 100) / 10**digits


def is_name(text: str) -> bool:
    """Whether the left side of an equation names what the right side gives: x, f(2), a_5, `\\text{Area}`, a+b; no constant."""
    bare = words_of(text)
    if _POINT.fullmatch(bare):
        return True
    if _NAME.fullmatch(bare):
        return bare not in ("i", "\\pi", "\\infty")
    if re.search(r"\b(?:not|or|and)\b|[<>,]", bare) or re.search(r"\d", _UNDER_A_NAME.sub("", bare)):
        return False
    tree = read(text).tree
    return re.search("[A-Za-z]", bare) is not None and (tree is None or not is_constant(tree))


def is_short_name(text: str) -> bool:
    """One letter, with subscript, primes or argument."""
    return _NAME.fullmatch(text) is not None


def has_letters(side: str) -> bool:
    """Whether a side is a formula in letters: it may have the value of the other side."""
    tree = read(side).tree
    return tree is not None and not is_constant(tree)


def is_asked(side: str, question: str) -> bool:
    """Whether the question asks for this side."""
    return has_letters(side) and "".join(side.split()) in "".join(question.split())


def based(text: str) -> tuple[str, str] | None:
    """Digits and base of `102_3`, `102_{\\text{three}}`, `102 (base 3)`."""
    text = words_of(text)
    if text.startswith("("):
        text = text[1:].replace(")", "", 1)
    found = _BASED.fullmatch(text.strip())
    if found is None:
        return None
    base = (found.group(2) or found.group(3)).casefold()
    base = _BASES.get(base, base)
    return (found.group(1), base) if base.isdecimal() else None
