"""Is an answer the reference (pure)? Yes, no, or None where one side is mathematics that we do not read.

Texts are compared by spelling, numbers by value, formulas by identity, lists and sets by parts, equations by what they say; a unit
behind an answer changes nothing. A no is final. Repeating the question earns nothing: where the reference is a number, an
unreduced `8/2` is not it, nor is anything unevaluated that uses a number of the question.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from actors.reward import mathfind
from actors.reward.mathexpr import KNOWN_COMMANDS, NoExpression, Node, TooLarge, Unknown, is_constant, is_literal, is_reduced, nodes, parse
from actors.reward.mathfind import last_boxed, reference_answer
from actors.reward.mathtext import (
    GRID,
    GRID_END,
    MAX_ANSWER_CHARS,
    ROW,
    fold,
    is_text,
    normalize,
    plain_characters,
    same_unit,
    split_unit,
    strip_modulus,
    words_of,
)
from actors.reward.mathvalue import BELOW_ZERO, POINTS, Value, evaluate, ratio, same

__all__ = ["final_answer", "last_boxed", "readable_reference", "reference_answer", "same_answer", "undecided", "verdict"]

Verdict = bool | None

MAX_PARTS = 32
MAX_LABEL_WORDS = 8  # a reference in more words than this is a text, no answer
_RELATION = re.compile(r"(<=|>=|<|>)")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
_ORDER = re.compile("[<>≠]")
_LOOSE = re.compile(r"\\l?not(?![A-Za-z])|\\[bx]?cancel|\\(?:[lL]ong)?(?:[lL]eft)?[rR]ightarrow|\\(?:to|implies|iff|gets)(?![A-Za-z])|[→⇒⇔]")
_EQUALS = re.compile(r"(?<![<>=!])=(?!=)")
_NAME = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\w|\{[^{}]*\}))?'*(?:\([^()=]*\))?")
_POINT = re.compile(r"\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)")
_UNDER_A_NAME = re.compile(r"_\{[^{}]*\}|_\w|\^\{[^{}]*\}|\^\w|\([^()]*\)")
_BASED = re.compile(r"([0-9A-Z.]+)\s*(?:_\s*\{?\s*\(?([0-9A-Za-z]+)\)?\s*\}?|\(?\s*base\s*([0-9A-Za-z]+)\s*\)?)")
_CHOICE = re.compile(r"\(\s*([A-J])\s*\)\s*:?\s*(\S.*)|([A-J])[.):]\s+(\S.*)")
_NUMBER = re.compile(r"-?\d{1,400}(?:\.\d{1,400})?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_COMMAS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WIDE_DIGITS = {0xFF10 + n: str(n) for n in range(10)}
_BASES = {word: str(n) for n, word in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)}
_BRACKETS = (("\\{", "\\}"), ("{", "}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"))


class _Reading(NamedTuple):
    """What a text says. `tree` None: no expression; `unknown`: but it may be mathematics to others."""

    tree: Node | None
    unknown: bool = False


@lru_cache(maxsize=512)
def _read(text: str) -> _Reading:
    if is_text(text):
        return _Reading(None)
    try:
        return _Reading(parse(words_of(text)))
    except TooLarge:
        return _Reading(None)
    except NoExpression as error:
        return _Reading(None, unknown=isinstance(error, Unknown) or not KNOWN_COMMANDS.issuperset(_COMMAND.findall(text)))


@lru_cache(maxsize=2048)
def _value(text: str, point: int, log_base: int) -> Value | None | bool:
    """The value of a text that is an expression; None where there is none; False where it is too large."""
    tree = _read(text).tree
    try:
        return None if tree is None else evaluate(tree, point, log_base)
    except TooLarge:
        return False
    except NoExpression:
        return None


def final_answer(text: str) -> str | None:
    """What a response answers, see mathfind.final_answer."""
    return mathfind.final_answer(text, readable)


def readable(text: str) -> bool:
    """Whether a text is one number, formula, list, interval or equation as it stands, units aside."""
    if _NUMBER.fullmatch(text):
        return True
    return len(text) <= MAX_ANSWER_CHARS and len(text := plain_characters(text)) <= MAX_ANSWER_CHARS and _is_readable(normalize(text), 0)


def _is_readable(text: str, depth: int) -> bool:
    text = split_unit(text, bare_letter=True)[0]
    if not text:
        return False
    if _read(text).tree is not None or _based(text) is not None:
        return True
    if depth > 3:
        return False
    if len(sides := _sides(text)) > 1:
        return all(side and (_is_name(side) or _is_readable(side, depth + 1)) for side in sides)
    parts = _parts(_interval(text)[1])
    return parts is not None and all(_is_readable(part, depth + 1) for part in parts[1])


def readable_reference(label: str) -> bool:
    """Whether `verdict` can find an answer equal to this label: mathematics that we read, or a text of few plain words."""
    wanted = reference_answer(label)
    if readable(wanted):
        return True
    words = words_of(normalize(wanted)) if len(wanted) <= MAX_ANSWER_CHARS else ""
    if words.startswith(("b'", 'b"')):
        return False  # bytes that were told as text
    return bool(words) and len(words.split()) <= MAX_LABEL_WORDS and re.fullmatch(r"[\w\s.,'()-]+", words) is not None


def same_answer(given: str, wanted: str, question: str = "") -> bool:
    """Is `given` the reference `wanted`?"""
    return verdict(given, wanted, question) is True


def undecided(given: str, wanted: str, question: str = "") -> bool:
    """Whether `given` may be `wanted` to a reader that knows more mathematics."""
    return verdict(given, wanted, question) is None


def verdict(given: str, wanted: str, question: str = "") -> Verdict:
    """Is `given` the reference `wanted`? None where one side is mathematics that we do not read; a no is final."""
    if max(len(given), len(wanted)) <= MAX_ANSWER_CHARS:
        given, wanted = plain_characters(given), plain_characters(wanted)
    if max(len(given), len(wanted)) > MAX_ANSWER_CHARS:
        return given.strip() == wanted.strip()
    reference = normalize(wanted)
    ways = [normalize(way) for way in _OR.split(given)]
    if 1 < len(ways) < 4 and all(_judge(way, reference, question, 0) is True for way in ways):
        return True  # `3/4 or 0.75` says one thing
    return _judge(normalize(given), reference, question, 0)


def _judge(given: str, wanted: str, question: str, depth: int) -> Verdict:
    given, wanted = given.strip(), wanted.strip()
    if not given or not wanted:
        return False
    if fold(given) == fold(wanted):
        return True
    if depth > 4:
        return False
    for judged in (_chains(given, wanted, question, depth), _choices(given, wanted, question, depth), _bases(given, wanted)):
        if judged != "other":
            return judged  # type: ignore[return-value]
    found = _compare(given, wanted, question, depth)
    if found is True:
        return True
    return _without_units(given, wanted, question, depth, found)


def _without_units(given: str, wanted: str, question: str, depth: int, found: Verdict) -> Verdict:
    (mine, unit), (theirs, other) = split_unit(given, bare_letter=not re.search("[A-Za-z]", wanted)), split_unit(wanted)
    if ("mod" in given) != ("mod" in wanted):
        mine, theirs = strip_modulus(mine), strip_modulus(theirs)
    if (mine, theirs) == (given, wanted):
        return found
    if unit and other and not same_unit(unit, other):
        return False
    judged = _judge(mine, theirs, question, depth + 1)
    if judged is not True and ("%" in unit) != ("%" in other):  # 25% is 0.25, too
        left, right = _read(mine).tree, _read(theirs).tree
        return bool(left and right and is_literal(left) and is_literal(right) and _equal(*_as_numbers(given, wanted))) or judged
    return judged


def _as_numbers(*texts: str) -> list[str]:
    """The texts without units, a percentage as the hundredth that it is."""
    return [f"({bare})/100" if "%" in unit else bare for bare, unit in (split_unit(text) for text in texts)]


# -- equations, choices, bases ------------------------------------------------------------------------------------------


def _chains(given: str, wanted: str, question: str, depth: int) -> Verdict | str:
    """`x = 42` and `2+40 = 42` say 42, `43 = 42` says nothing; so does `\\sqrt{2} ≈ 1.5`. Equations are the same up to a factor."""
    if "≈" in given:
        *exact, rounded = [side.strip() for side in given.split("≈")]
        last = _sides(exact[-1])[-1] if exact else ""
        if len(exact) != 1 or not rounded or not (_is_name(exact[0]) or _is_rounded(last, rounded)):
            return False
        first = None if _is_name(exact[0]) else _judge(exact[0], wanted, question, depth + 1)
        return first or _judge(rounded, wanted, question, depth + 1)
    mine, theirs = _sides(given), _sides(wanted)
    if len(mine) == len(theirs) == 1:
        return "other"
    if not all(mine) or not all(theirs):
        return False
    if any("=" in text and len(_split(text)) > 1 for text in (given, wanted)) or _ORDER.search(given + wanted):
        return "other"
    target = wanted
    if len(theirs) > 1:
        named = next((n for n in (0, -1) if _is_name(theirs[n])), None)
        if len(mine) == len(theirs) == 2:
            return _two_equations(mine, theirs, question, depth)
        if named is None and not _agree(theirs[0], theirs[-1]):
            return False
        target = theirs[-1] if named != -1 else theirs[0]
    if len(mine) == 1:
        return _judge(given, target, question, depth + 1)
    if _is_name(mine[-1]) and not _is_name(mine[0]):
        mine.reverse()
    if not all(_agree(side, mine[-1]) or _has_letters(side) for side in mine[1:-1]):
        return False
    if not (_is_name(mine[0]) or _is_asked(mine[0], question) or _agree(mine[0], mine[-1])):
        return False
    return _judge(mine[-1], target, question, depth + 1)


def _sides(text: str) -> list[str]:
    """At equals signs outside of brackets: those of `\\sum_{k=1}` and P(X=2) are none."""
    if "=" not in text:
        return [text.strip()]
    sides, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "=" and depth <= 0 and _EQUALS.match(text, at):
            sides.append(text[start:at].strip())
            start = at + 1
    return [*sides, text[start:].strip()]


def _two_equations(mine: list[str], theirs: list[str], question: str, depth: int) -> Verdict:
    turned = [side[::-1] if _is_name(side[1]) and not _is_name(side[0]) else side for side in (mine, theirs)]
    (name, value), (other, wanted) = turned
    judged: Verdict = False
    if fold(name) == fold(other) or (_NAME.fullmatch(name) and _NAME.fullmatch(other)):
        axes = {name, other} <= set("xyz") or (depth and len(name) == len(other) == 1)
        if fold(name) == fold(other) or not axes:
            judged = _judge(value, wanted, question, depth + 1)
        if judged is not False:
            return judged
    texts = [f"({left})-({right})" for left, right in (mine, theirs)]
    left, right = map(_read, texts)
    if left.tree is None or right.tree is None:
        return None if left.unknown or right.unknown else False
    ratios = []
    for point in range(POINTS):
        a, b = (_value(text, point, 10) for text in texts)
        if isinstance(a, Value) and isinstance(b, Value) and (found := ratio(a, b)) is not None:
            ratios.append(found)
    zero = Value(Fraction(0))
    return len(ratios) > 1 and all(same(one, ratios[0], False) and not same(one, zero, False) for one in ratios)


def _is_name(text: str) -> bool:
    """Whether the left side of an equation names what the right side gives: x, f(2), a_5, `\\text{Area}`, a+b; no constant."""
    bare = words_of(text)
    if _POINT.fullmatch(bare):
        return True
    if _NAME.fullmatch(bare):
        return bare not in ("i", "\\pi", "\\infty")
    if re.search(r"\b(?:not|or|and)\b|[<>,]", bare) or re.search(r"\d", _UNDER_A_NAME.sub("", bare)):
        return False
    tree = _read(text).tree
    return re.search("[A-Za-z]", bare) is not None and (tree is None or not is_constant(tree))


def _has_letters(side: str) -> bool:
    """Whether a side is a formula in letters: it may have the value of the other side."""
    tree = _read(side).tree
    return tree is not None and not is_constant(tree)


def _is_asked(side: str, question: str) -> bool:
    """Whether the question asks for this side."""
    return _has_letters(side) and "".join(side.split()) in "".join(question.split())


def _agree(left: str, right: str) -> bool:
    """Whether two sides of a chain have the same value, units aside."""
    a, b = (split_unit(side, bare_letter=True)[0] for side in (left, right))
    return fold(a) == fold(b) or _equal(a, b) is True or _equal(*_as_numbers(left, right)) is True


def _is_rounded(exact: str, rounded: str) -> bool:
    """Whether a decimal is the rounding of a value, to the digits it has."""
    (exact, _), (rounded, _) = split_unit(exact), split_unit(rounded)
    value = _value(exact, 0, 10)
    if re.fullmatch(r"-?\d*\.?\d+", rounded) is None or not isinstance(value, Value) or not value.real:
        return False
    digits = len(rounded.partition(".")[2])
    gap = abs(Fraction(value.re) - Fraction(Decimal(rounded)))
    return gap <= Fraction(51, 100) / 10**digits


def _choices(given: str, wanted: str, question: str, depth: int) -> Verdict | str:
    """`(B) 42` is B as well as 42."""
    split = []
    for text in (given, wanted):
        found = _CHOICE.fullmatch(words_of(text))
        letter, rest = (found.group(1) or found.group(3), found.group(2) or found.group(4)) if found else ("", "")
        alone = len(text) == 1 and "A" <= text <= "J"
        split.append((text, "") if alone else (letter, rest) if found else ("", text))
    (mine, said), (theirs, asked) = split
    if not (said and mine) and not (asked and theirs):
        return "other"
    if mine and theirs:
        return mine == theirs and (not said or not asked or _judge(said, asked, question, depth + 1) is not False)
    return _judge(said, asked, question, depth + 1) if said and asked else False


def _based(text: str) -> tuple[str, str] | None:
    """Digits and base of `102_3`, `102_{\\text{three}}`, `102 (base 3)`."""
    found = _BASED.fullmatch(words_of(text).replace("(", " ", 1).replace(")", "", 1).strip()) if text.startswith("(") else _BASED.fullmatch(words_of(text))
    if found is None:
        return None
    base = (found.group(2) or found.group(3)).casefold()
    base = _BASES.get(base, base)
    return (found.group(1), base) if base.isdecimal() else None


def _bases(given: str, wanted: str) -> Verdict | str:
    """Digits of a base are those digits of that base; without a base, those of the other side's."""
    mine, theirs = _based(given), _based(wanted)
    if mine is None and theirs is None:
        return "other"
    digits = [found[0] if found else text for found, text in ((mine, given), (theirs, wanted))]
    return digits[0].lstrip("0") == digits[1].lstrip("0") and (mine is None or theirs is None or mine[1] == theirs[1])


# -- lists, sets, intervals, matrices ------------------------------------------------------------------------------------


def _compare(given: str, wanted: str, question: str, depth: int) -> Verdict:
    (letter, mine), (other, theirs) = _interval(given), _interval(wanted)
    if letter and other and letter != other:
        return False
    left, right = _parts(mine), _parts(theirs)
    if left is None and right is None:
        return _leaf(mine, theirs, question)
    if left is not None and right is not None:
        return _same_parts(left, right, question, depth + 1)
    single = mine if left is None else theirs
    return None if _read(single).unknown and len(_sides(single)) == 1 and not _ORDER.search(single) else False


def _interval(text: str) -> tuple[str, str]:
    """Letter and interval: `1 <= x < 3` as x in [1,3) and `2 > x` as x in (-\\infty,2); other text as it is, with no letter."""
    terms = [term.strip() for term in _RELATION.split(text)]
    if len(terms) not in (3, 5) or len({term[0] for term in terms[1::2]}) > 1:
        return "", text
    if terms[1][0] == ">":
        terms = [term.replace(">", "<") for term in reversed(terms)]
    if len(terms) == 3:
        left_is_letter = len(terms[0]) == 1 and terms[0].isalpha()
        terms = ["-\\infty", "<", *terms] if left_is_letter else [*terms, "<", "\\infty"]
    low, below, letter, above, high = terms
    if len(letter) != 1 or not letter.isalpha() or not low or not high or "," in low + high:
        return "", text
    return letter, f"{'[' if below == '<=' else '('}{low},{high}{']' if above == '<=' else ')'}"


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Brackets and members of a tuple, interval, set, list, ratio or matrix; None for a single thing. A bare list is a set."""
    if text.startswith(GRID) and text.endswith(GRID_END) and text.count(GRID) == 1:
        rows = [row.split("&") for row in text[1:-1].split(ROW)]
        return f"{len(rows)}x{len(rows[0])}", [cell.strip() for row in rows for cell in row]
    if len(union := re.split(r"\\cup(?![A-Za-z])", text)) > 1:
        return ("{}", [part.strip() for part in union]) if len(union) <= MAX_PARTS else None
    inner, brackets = text, "{}"
    for opening, closing in _BRACKETS:
        if text.startswith(opening) and text.endswith(closing):
            candidate = text[len(opening) : len(text) - len(closing)]
            if _balanced(candidate):
                inner, brackets = candidate, (opening + closing).replace("\\", "")
                break
    members = [sign for member in _split(inner) for sign in _both_signs(member)]
    braced = text.startswith("\\{") and inner is not text
    if len(members) < 2 and not braced:
        ratio_of = [side.strip() for side in text.split(":")]
        return (":", ratio_of) if 1 < len(ratio_of) <= 4 and all(ratio_of) and not re.search("[A-Za-z]", text) else None
    return (brackets, members) if len(members) <= MAX_PARTS else None


def _both_signs(text: str) -> list[str]:
    if text.count("\\pm") != 1:
        return [text]
    plus = text.replace("\\pm", "+").strip().removeprefix("+")
    return [re.sub(r"=\s*\+", "=", plus), text.replace("\\pm", "-")]


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    members, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            members.append(text[start:at].strip())
            start = at + 1
    return [*members, text[start:].strip()]


def _same_parts(given: tuple[str, list[str]], wanted: tuple[str, list[str]], question: str, depth: int) -> Verdict:
    mine, theirs = given[1], wanted[1]
    kinds = {given[0], wanted[0]}
    column = kinds == {"()", f"{len(mine)}x1"}  # a vector
    point = kinds == {"()", "{}"} and any(all(_EQUALS.search(part) for part in parts) for parts in (mine, theirs))  # x=3, y=4
    if len(mine) != len(theirs) or not (given[0] == wanted[0] or column or point):
        return False
    if given[0] != "{}" or point:
        return _all(_judge(a, b, question, depth) for a, b in zip(mine, theirs, strict=True))
    open_parts, left_open = list(theirs), 0
    for part in mine:
        found = next((n for n, other in enumerate(open_parts) if fold(part) == fold(other)), None)
        if found is None:
            judged: list[Verdict] = []
            for n, other in enumerate(open_parts):
                judged.append(_judge(part, other, question, depth))
                if judged[-1] is True:
                    found = n
                    break
            if found is None and None not in judged:
                return False
        if found is None:
            left_open += 1
        else:
            del open_parts[found]
    return None if left_open else True


def _all(verdicts: object) -> Verdict:
    found = list(verdicts)  # type: ignore[call-overload]
    return False if False in found else None if None in found else True


# -- single things -------------------------------------------------------------------------------------------------------


def _leaf(given: str, wanted: str, question: str) -> Verdict:
    mine, theirs = _read(given), _read(wanted)
    literal = theirs.tree is not None and is_literal(theirs.tree)
    if mine.tree is None or theirs.tree is None:
        if not (mine.unknown or mine.tree) or not (theirs.unknown or theirs.tree):
            return False
        if (_ORDER.search(given) is None) != (_ORDER.search(wanted) is None) or (_LOOSE.search(given) and "\\lim" not in given):
            return False
        guess = any("." in text and one.tree is not None and is_literal(one.tree) for text, one in ((given, mine), (wanted, theirs)))
        return False if guess or (literal and _repeats(given, question)) else None
    if literal and not (is_reduced(mine.tree) if is_literal(mine.tree) else not _repeats(given, question)):
        return False
    return _equal(given, wanted)


def _repeats(text: str, question: str) -> bool:
    """Whether `text` takes a number from the question. `12+7` may not come back as `7+12`, `12+7+0` or `12+6+1`."""
    mine = set(_PLAIN_NUMBER.findall(text))
    return bool(mine) and not mine.isdisjoint(_PLAIN_NUMBER.findall(_COMMAS.sub("", question.translate(_WIDE_DIGITS))))


def _equal(left: str, right: str) -> Verdict:
    """Equal at every fixed point where both have a value, and at one at least. None where letters leave no such point."""
    trees = (_read(left).tree, _read(right).tree)
    if trees[0] is None or trees[1] is None:
        return False
    kinds = {node.kind if len(node.args) == 1 else "" for tree in trees for node in nodes(tree)}
    constant = all(is_constant(tree) for tree in trees)
    points = [0] if constant else [*range(POINTS), *([BELOW_ZERO] if "abs" in kinds else [])]
    found: Verdict = False
    for log_base in (10, 0) if "log" in kinds else (10,):
        found = _equal_at(points, left, right, log_base, constant)
        if found:
            return True
    return found


def _equal_at(points: list[int], left: str, right: str, log_base: int, constant: bool) -> Verdict:
    compared = 0
    for point in points:
        a, b = _value(left, point, log_base), _value(right, point, log_base)
        if a is False or b is False:
            return False
        if isinstance(a, Value) and isinstance(b, Value):
            if not same(a, b, constant):
                return False
            compared += 1
    return True if compared else (False if constant else None)
