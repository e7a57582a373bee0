"""(pure) Arithmetic of bash, `$((2 * N))` and `((i < N))`: whole numbers of 64 bits, as a shell counts.

Always true: what is not known, or not read, raises Unknown; no other exception leaves this file.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|\+\+|--|<<=?|>>=?|&&|\|\||[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:(),])")
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
"""Operators from the loosest to the tightest."""
DEEPEST = 100


class UnknownNumber(Exception):
    """A number that only a shell knows, or something that is not read."""


def _quotient(a: int, b: int) -> int:
    """Cut towards zero, as in a shell."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_TWO: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _quotient, "%": lambda a, b: a - b * _quotient(a, b),
    "|": operator.or_, "^": operator.xor, "&": operator.and_, "<<": lambda a, b: a << b % 64, ">>": lambda a, b: a >> b % 64,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _whole(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise UnknownNumber("more than 64 bits")
    return int(number)


class _Sum:
    """One expression. `get` gives the text of a variable, or raises Unknown; `put` sets one."""

    def __init__(self, text: str, get: Callable[[str], str], put: Callable[[str, int], None], depth: int) -> None:
        self._words, self._at, self._get, self._put, self._depth = list[str](), 0, get, put, depth
        at = 0
        text = text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or len(self._words) > 400:
                raise UnknownNumber(text)
            self._words.append(found[1])
            at = found.end()

    def all(self) -> int:
        """The value of the last of the expressions that commas divide; 0 of none."""
        value = self._given() if self._words else 0
        while self._take(","):
            value = self._given()
        if self._at < len(self._words):
            raise UnknownNumber(self._words[self._at])
        return value

    def _next(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self, word: str) -> bool:
        found = self._next() == word
        self._at += found
        return found

    def _given(self) -> int:
        """An assignment, or a choice by `?`."""
        name, then = self._next(), self._words[self._at + 1 : self._at + 2]
        if name[:1].isidentifier() and then and then[0].endswith("=") and then[0][:-1] in ("", *_TWO) and then[0] not in _TWO:
            self._at += 2
            value = self._given()
            if then[0] != "=":
                value = self._two(then[0][:-1], self._number(name), value)
            self._put(name, value)
            return value
        value = self._level(0)
        if not self._take("?"):
            return value
        first = self._given()
        if not self._take(":"):
            raise UnknownNumber("?")
        second = self._given()
        return first if value else second

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        value = self._level(level + 1)
        while (sign := self._next()) in _LEVELS[level]:
            self._at += 1
            other = self._level(level + 1)
            value = self._two(sign, value, other)
        return value

    def _two(self, sign: str, a: int, b: int) -> int:
        if sign in ("||", "&&"):
            return int(bool(a or b) if sign == "||" else bool(a and b))
        if sign in "/%" and b == 0:
            raise UnknownNumber("a division by 0")
        return _whole(_TWO[sign](a, b))

    def _power(self) -> int:
        value = self._one()
        if not self._take("**"):
            return value
        exponent = self._power()
        if not 0 <= exponent < 64:
            raise UnknownNumber("**")
        return _whole(value**exponent)

    def _one(self) -> int:
        word = self._next()
        self._at += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise UnknownNumber(word)
        try:
            if word in ("-", "+", "!", "~"):
                value = self._one()
                return _whole({"-": -value, "+": value, "!": int(not value), "~": ~value}[word])
            if word in ("++", "--"):
                name = self._next()
                self._at += 1
                self._put(name, value := _whole(self._number(name) + (1 if word == "++" else -1)))
                return value
            if word == "(":
                value = self._given()
                if not self._take(")"):
                    raise UnknownNumber("(")
                return value
            if word[:1].isdigit():
                return self._literal(word)
            value = self._number(word)
            if self._next() in ("++", "--"):
                self._put(word, _whole(value + (1 if self._next() == "++" else -1)))
                self._at += 1
            return value
        finally:
            self._depth -= 1

    @staticmethod
    def _literal(word: str) -> int:
        octal = word[:1] == "0" and word.isdigit()
        try:
            return _whole(int(word, 8 if octal else 0))
        except ValueError:
            raise UnknownNumber(word) from None

    def _number(self, name: str) -> int:
        if not name.isidentifier():
            raise UnknownNumber(name)
        if self._depth >= DEEPEST:  # a variable that names itself
            raise UnknownNumber(name)
        return _Sum(self._get(name), self._get, self._put, self._depth + 1).all()


def arithmetic(text: str, get: Callable[[str], str], put: Callable[[str, int], None]) -> int:
    """The value of the expression `text`, in which `$NAME` is replaced already."""
    try:
        return _Sum(text, get, put, 0).all()
    except RecursionError:
        raise UnknownNumber(text) from None
