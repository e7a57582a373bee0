"""How an answer is put together (pure): sides of an equation, members of a list, set, tuple, interval, ratio or matrix."""

from __future__ import annotations

import re

from actors.reward.mathtext import GRID, GRID_END, ROW

_RELATION = re.compile(r"(<=|>=|<|>)")
_EQUALS = re.compile(r"(?<![<>=!])=(?!=)")
_BRACKETS = (("\\{", "\\}"), ("{", "}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"))


MAX_PARTS = 32


def is_equation(text: str) -> bool:
    """Whether there is an equals sign in it."""
    return _EQUALS.search(text) is not None


def sides_of(text: str) -> list[str]:
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


def interval_of(text: str) -> tuple[str, str]:
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


def parts_of(text: str) -> tuple[str, list[str]] | None:
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
    members = [sign for member in members_of(inner) for sign in _both_signs(member)]
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


def members_of(text: str) -> list[str]:
    """At commas outside of brackets."""
    members, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            members.append(text[start:at].strip())
            start = at + 1
    return [*members, text[start:].strip()]
