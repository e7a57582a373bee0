"""Is an answer the reference (pure)? Yes, no, or None where one side is mathematics that we do not read.

Texts are compared by spelling, numbers by value, formulas by identity, lists and sets by parts, equations by what they say; a unit
behind an answer changes nothing. A no is final. Repeating the question earns nothing: where the reference is a number, an
unreduced `8/2` is not it, nor is anything unevaluated that uses a number of the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from actors.reward import mathfind
from actors.reward.mathexpr import is_literal, is_reduced
from actors.reward.mathfind import last_boxed, reference_answer
from actors.reward.mathnumber import Value
from actors.reward.mathparts import interval_of, is_equation, members_of, parts_of, sides_of
from actors.reward.mathread import (
    agree,
    as_numbers,
    based,
    code_of,
    equal,
    has_letters,
    is_asked,
    is_name,
    is_rounded,
    is_short_name,
    read,
    value_of,
)
from actors.reward.mathtext import (
    MAX_ANSWER_CHARS,
    asks_for,
    fold,
    normalize,
    plain_characters,
    same_unit,
    scale_of,
    split_unit,
    strip_modulus,
    words_of,
)
from actors.reward.mathvalue import POINTS, ratio, same

__all__ = ["final_answer", "last_boxed", "readable_reference", "reference_answer", "verdict"]

Verdict = bool | None
Other = Literal["other"]  # another kind of answer: no verdict yet

MAX_LABEL_WORDS = 8  # a reference in more words than this is a text, no answer
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
_ORDER = re.compile("[<>≠]")
_LOOSE = re.compile(
    r"\\l?not(?![A-Za-z])|\\[bx]?cancel|\\(?:[lL]ong)?(?:[lL]eft)?[rR]ightarrow|\\(?:to|implies|iff|gets)(?![A-Za-z])|[→⇒⇔]"
)
_FURTHER = re.compile(r"(?:and|or|not|,|;|&|/|\s)*\(\s*[A-J]\s*\)", re.IGNORECASE)  # behind a choice: another one
_CHOICE = re.compile(r"\(\s*([A-J])\s*\)\s*:?\s*(\S.*)|([A-J])[.):]\s+(\S.*)")
_NUMBER = re.compile(r"-?\d{1,400}(?:\.\d{1,400})?")
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_COMMAS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WIDE_DIGITS = {0xFF10 + n: str(n) for n in range(10)}


def final_answer(text: str) -> str | None:
    """What a response answers, see mathfind.final_answer."""
    return mathfind.final_answer(text, readable)


def readable(text: str) -> bool:
    """Whether a text is one number, formula, list, interval or equation as it stands, units aside."""
    if _NUMBER.fullmatch(text):
        return True
    text = plain_characters(text) if len(text) <= MAX_ANSWER_CHARS else text
    return len(text) <= MAX_ANSWER_CHARS and _is_readable(normalize(text), 0)


def _is_readable(text: str, depth: int) -> bool:
    text = split_unit(text, bare_letter=True)[0]
    if not text:
        return False
    if read(text).tree is not None or based(text) is not None:
        return True
    if depth > 3:
        return False
    if len(sides := sides_of(text)) > 1:
        return all(side and (is_name(side) or _is_readable(side, depth + 1)) for side in sides)
    parts = parts_of(interval_of(text)[1])
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
    for judged in (
        *(_codes(given, wanted), _chains(given, wanted, question, depth)),
        *(_choices(given, wanted, question, depth), _bases(given, wanted)),
    ):
        if judged != "other":
            return judged
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
    scale, asked = scale_of(unit), scale_of(other)
    if scale == asked:
        return judged
    if judged and scale and not asks_for(scale[0], question):
        judged = False  # 25% is no 25 where nobody asked for percent; a label may leave it to the answer to say so
    left, right = read(mine).tree, read(theirs).tree
    return bool(left and right and is_literal(left) and is_literal(right) and equal(*as_numbers(given, wanted))) or judged


# -- equations, choices, bases ------------------------------------------------------------------------------------------


def _chains(given: str, wanted: str, question: str, depth: int) -> Verdict | Other:
    """`x = 42` and `2+40 = 42` say 42, `43 = 42` says nothing; so does `\\sqrt{2} ≈ 1.5`. Equations are the same up to a factor."""
    if "≈" in wanted:
        ways = [_judge(given, way, question, depth + 1) for way in wanted.split("≈")]
        return True if True in ways else ways[0]
    if "≈" in given:
        *exact, rounded = [side.strip() for side in given.split("≈")]
        last = sides_of(exact[-1])[-1] if exact else ""
        if len(exact) != 1 or not rounded or not (is_name(exact[0]) or is_rounded(last, rounded)):
            return False
        first = None if is_name(exact[0]) else _judge(exact[0], wanted, question, depth + 1)
        return first or _judge(rounded, wanted, question, depth + 1)
    mine, theirs = sides_of(given), sides_of(wanted)
    if len(mine) == len(theirs) == 1:
        return "other"
    if not all(mine) or not all(theirs):
        return False
    if any("=" in text and len(members_of(text)) > 1 for text in (given, wanted)) or _ORDER.search(given + wanted):
        return "other"
    target = wanted
    if len(theirs) > 1:
        named = next((n for n in (0, -1) if is_name(theirs[n])), None)
        if len(mine) == len(theirs) == 2:
            return _two_equations(mine, theirs, question, depth)
        if named is None and not agree(theirs[0], theirs[-1]):
            return False
        target = theirs[-1] if named != -1 else theirs[0]
    if len(mine) == 1:
        return _judge(given, target, question, depth + 1)
    if is_name(mine[-1]) and not is_name(mine[0]):
        mine.reverse()
    if not all(agree(side, mine[-1]) or has_letters(side) for side in mine[1:-1]):
        return False
    if not (is_name(mine[0]) or is_asked(mine[0], question) or agree(mine[0], mine[-1])):
        return False
    return _judge(mine[-1], target, question, depth + 1)


def _two_equations(mine: list[str], theirs: list[str], question: str, depth: int) -> Verdict:
    turned = [side[::-1] if is_name(side[1]) and not is_name(side[0]) else side for side in (mine, theirs)]
    (name, value), (other, wanted) = turned
    judged: Verdict = False
    if fold(name) == fold(other) or (is_short_name(name) and is_short_name(other)):
        axes = {name, other} <= set("xyz") or (depth and len(name) == len(other) == 1)
        if fold(name) == fold(other) or not axes:
            judged = _judge(value, wanted, question, depth + 1)
        if judged is not False:
            return judged
    texts = [f"({left})-({right})" for left, right in (mine, theirs)]
    left, right = map(read, texts)
    if left.tree is None or right.tree is None:
        return None if left.unknown or right.unknown else False
    ratios = []
    for point in range(POINTS):
        a, b = (value_of(text, point, 10) for text in texts)
        if isinstance(a, Value) and isinstance(b, Value) and (found := ratio(a, b)) is not None:
            ratios.append(found)
    zero = Value(Fraction(0))
    return len(ratios) > 1 and all(same(one, ratios[0], False) and not same(one, zero, False) for one in ratios)


def _choices(given: str, wanted: str, question: str, depth: int) -> Verdict | Other:
    """`(B) 42` is B as well as 42."""
    split = []
    for text in (given, wanted):
        found = _CHOICE.fullmatch(words_of(text))
        letter, rest = (found.group(1) or found.group(3), found.group(2) or found.group(4)) if found else ("", "")
        alone = len(text) == 1 and "A" <= text <= "J"
        split.append((text, "") if alone else (letter, rest) if found else ("", text))
    (mine, said), (theirs, asked) = split
    if (mine and _FURTHER.match(said)) or (theirs and _FURTHER.match(asked)):
        return fold(given) == fold(wanted)  # `(A) and (B)` is no one of them
    if not (said and mine) and not (asked and theirs):
        return "other"
    if mine and theirs:
        return mine == theirs and (not said or not asked or _judge(said, asked, question, depth + 1) is not False)
    return _judge(said, asked, question, depth + 1) if said and asked else False


def _codes(given: str, wanted: str) -> Verdict | Other:
    """A date is no difference and no quotient: it is equal to the same numbers in this order, however they are parted."""
    mine, theirs = code_of(given), code_of(wanted)
    return "other" if mine is None and theirs is None else mine == theirs


def _bases(given: str, wanted: str) -> Verdict | Other:
    """Digits of a base are those digits of that base; without a base, those of the other side's."""
    mine, theirs = based(given), based(wanted)
    if mine is None and theirs is None:
        return "other"
    digits = [found[0] if found else text for found, text in ((mine, given), (theirs, wanted))]
    return digits[0].lstrip("0") == digits[1].lstrip("0") and (mine is None or theirs is None or mine[1] == theirs[1])


# -- lists, sets, intervals, matrices ------------------------------------------------------------------------------------


def _compare(given: str, wanted: str, question: str, depth: int) -> Verdict:
    (letter, mine), (other, theirs) = interval_of(given), interval_of(wanted)
    if letter and other and letter != other:
        return False
    left, right = parts_of(mine), parts_of(theirs)
    if left is None and right is None:
        return _leaf(mine, theirs, question)
    if left is not None and right is not None:
        return _same_parts(left, right, question, depth + 1)
    single = mine if left is None else theirs
    return None if read(single).unknown and len(sides_of(single)) == 1 and not _ORDER.search(single) else False


def _same_parts(given: tuple[str, list[str]], wanted: tuple[str, list[str]], question: str, depth: int) -> Verdict:
    mine, theirs = given[1], wanted[1]
    kinds = {given[0], wanted[0]}
    column = kinds == {"()", f"{len(mine)}x1"}  # a vector
    point = kinds == {"()", "{}"} and any(all(map(is_equation, parts)) for parts in (mine, theirs))  # x=3, y=4
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


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    found = list(verdicts)
    return False if False in found else None if None in found else True


# -- single things -------------------------------------------------------------------------------------------------------


def _leaf(given: str, wanted: str, question: str) -> Verdict:
    mine, theirs = read(given), read(wanted)
    literal = theirs.tree is not None and is_literal(theirs.tree)
    if mine.tree is None or theirs.tree is None:
        if not (mine.unknown or mine.tree) or not (theirs.unknown or theirs.tree):
            return False
        if (_ORDER.search(given) is None) != (_ORDER.search(wanted) is None) or (_LOOSE.search(given) and "\\lim" not in given):
            return False
        decimal = any("." in text and one.tree and is_literal(one.tree) for text, one in ((given, mine), (wanted, theirs)))
        return False if decimal or (literal and _repeats(given, question)) else None
    if literal and not (is_reduced(mine.tree) if is_literal(mine.tree) else not _repeats(given, question)):
        return False
    return equal(given, wanted)


def _repeats(text: str, question: str) -> bool:
    """Whether `text` takes a number from the question. `12+7` may not come back as `7+12`, `12+7+0` or `12+6+1`."""
    mine = set(_PLAIN_NUMBER.findall(text))
    return bool(mine) and not mine.isdisjoint(_PLAIN_NUMBER.findall(_COMMAS.sub("", question.translate(_WIDE_DIGITS))))
