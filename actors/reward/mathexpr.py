"""Are two mathematical answers the same (pure)? A small parser of its own over numbers, fractions, roots, powers and single
letters; nothing is evaluated as code.

Expressions are compared exactly, as rational numbers at fixed points of their letters (Schwartz-Zippel), in floats only where
a root is not rational. Work is bounded: long, deep or huge input is "no expression", never an error and never slow.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARS = 400
MAX_DEPTH = 40
MAX_BITS = 4096  # of an exact numerator or denominator
POINTS = 3  # a polynomial identity that is false survives one point with probability < degree / 1000

Number = Fraction | float
Kind = Literal["number", "symbol", "neg", "+", "*", "/", "^", "root", "frac", "mixed", "binom", "!", "abs"]


class NoExpression(Exception):
    """The text is not an expression that this module reads."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `frac` is a written fraction, `/` a division of anything else; `mixed` is a whole number and a fraction."""

    kind: Kind
    args: tuple[Node, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""


_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d{1,3}(?![\d.]))?|\.\d+)|(\\[A-Za-z]+)|([A-Za-z])|([-+*/^!(){}\[\]|]))"
)
_GREEK = frozenset(
    f"\\{name}"
    for name in (
        *("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "varphi", "omega", "sigma", "tau"),
        *("pi", "infty"),  # kept as letters: 2\pi is 2\pi, and no decimal is
    )
)
_DIGITS = "0123456789."
_OPEN = {"(": ")", "{": "}", "[": "]"}


def parse(text: str) -> Node:
    """Normalised text to a tree; NoExpression when it is none."""
    if not text or len(text) > MAX_CHARS:
        raise NoExpression("empty or too long")
    parser = _Parser(_tokens(text))
    node = parser.sum(0)
    if parser.peek():
        raise NoExpression(f"unexpected {parser.peek()!r}")
    return node


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NoExpression(f"unreadable at {text[at : at + 10]!r}")
        found.append(match.group(0).strip())
        at = match.end()
    return found


class _Parser:
    """Recursive descent: sum > product > unary > power > atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self.peek()
        self._at += 1
        return token

    def sum(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise NoExpression("too deep")
        node = self._product(depth)
        while self.peek() in ("+", "-"):
            sign = self._next()
            term = self._product(depth)
            node = Node("+", (node, term if sign == "+" else Node("neg", (term,))))
        return node

    def _product(self, depth: int) -> Node:
        node = self._unary(depth)
        while True:
            token = self.peek()
            if token == "*":
                self._next()
                node = Node("*", (node, self._unary(depth)))
            elif token == "/":
                self._next()
                below = self._unary(depth)
                plain = _is_count(node) and below.kind == "number"
                node = Node("frac" if plain else "/", (node, below))
            elif token and (token[0].isalnum() or token[0] in "\\.({["):
                node = self._beside(node, depth)
            else:
                return node

    def _beside(self, left: Node, depth: int) -> Node:
        """`2 1/2` and `2\\frac12` are mixed numbers, other numbers side by side are nothing, all else is a product."""
        digits_meet = self.peek(-1)[0] in _DIGITS and self.peek()[0] in _DIGITS
        right = self._power(depth)
        if digits_meet:
            if self.peek() != "/":
                raise NoExpression("two numbers side by side")
            self._next()
            right = Node("frac", (right, self._power(depth)))
        whole = left.args[0] if left.kind == "neg" else left
        if right.kind == "frac" and all(map(_is_count, right.args)) and _is_count(whole):
            mixed = Node("mixed", (whole, right))
            return Node("neg", (mixed,)) if left.kind == "neg" else mixed
        if digits_meet:
            raise NoExpression("two numbers side by side")
        return Node("*", (left, right))

    def _unary(self, depth: int) -> Node:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self._next() == "-" else sign
        node = self._power(depth)
        return Node("neg", (node,)) if sign < 0 else node

    def _power(self, depth: int) -> Node:
        base = self._atom(depth + 1)
        while self.peek() == "!":
            self._next()
            base = Node("!", (base,))
        if self.peek() != "^":
            return base
        self._next()
        sign = self.peek() == "-"
        if sign:
            self._next()
        top = self._atom(depth + 1)
        return Node("^", (base, Node("neg", (top,)) if sign else top))

    def _atom(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise NoExpression("too deep")
        token = self._next()
        if not token:
            raise NoExpression("ends too early")
        if token[0] in _DIGITS:
            return Node("number", number=Fraction(token))  # an exponent below 1000: a bounded size
        if token in _OPEN:
            node = self.sum(depth + 1)
            if self._next() != _OPEN[token]:
                raise NoExpression(f"{token} is not closed")
            return node
        if token in ("\\frac", "\\binom"):
            return Node("frac" if token == "\\frac" else "binom", (self._argument(depth), self._argument(depth)))
        if token == "|":
            node = Node("abs", (self.sum(depth + 1),))
            if self._next() != "|":
                raise NoExpression("| is not closed")
            return node
        if token == "\\sqrt":
            index = Node("number", number=Fraction(2))
            if self.peek() == "[":
                index = self._atom(depth + 1)
            return Node("root", (index, self._argument(depth)))
        if (len(token) == 1 and token.isalpha()) or token in _GREEK:
            return Node("symbol", name=token)
        raise NoExpression(f"unexpected {token!r}")

    def _argument(self, depth: int) -> Node:
        """`{...}`, or one digit or letter as TeX takes it: \\frac12 is one half."""
        token = self.peek()
        if token and token[0].isdigit() and len(token) > 1:
            if not token.isdigit():
                raise NoExpression("a decimal needs braces here")
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._atom(depth + 1)


def _is_count(node: Node) -> bool:
    """A whole number as written."""
    return node.kind == "number" and node.number.denominator == 1


def is_literal(node: Node) -> bool:
    """A number written out: whole, decimal, fraction, mixed, or a power of ten with its factor. `3+4` and `2*5` are not."""
    if node.kind == "neg":
        return is_literal(node.args[0]) and node.args[0].kind != "neg"
    if node.kind == "frac":
        top = node.args[0].args[0] if node.args[0].kind == "neg" else node.args[0]
        return _is_count(top) and _is_count(node.args[1])
    if node.kind == "*":
        return node.args[0].kind == "number" and node.args[1].kind == "^" and is_literal(node.args[1])
    if node.kind == "^":
        top = node.args[1].args[0] if node.args[1].kind == "neg" else node.args[1]
        return node.args[0] == Node("number", number=Fraction(10)) and _is_count(top)
    return node.kind in ("number", "mixed")


def is_reduced(node: Node) -> bool:
    """A literal in lowest terms: 3/4 and 0.75, not 6/8 and not 8/2."""
    if node.kind == "neg" or node.kind == "mixed":
        return is_reduced(node.args[-1])
    if node.kind != "frac":
        return True
    top = node.args[0].args[0] if node.args[0].kind == "neg" else node.args[0]
    low = node.args[1].number
    return low != 1 and math.gcd(top.number.numerator, low.numerator) == 1


def evaluate(node: Node, point: int) -> Number:
    """The value where every letter has its fixed value number `point`; NoExpression where there is none."""
    try:
        return _evaluate(node, point)
    except (ZeroDivisionError, OverflowError) as error:
        raise NoExpression(str(error)) from error


def _evaluate(node: Node, point: int) -> Number:
    match node.kind:
        case "number":
            return node.number
        case "symbol":
            mixed = zlib.crc32(f"{point}/{node.name}".encode())
            return Fraction(mixed % 1009 + 2, (mixed >> 16) % 31 + 3)
        case "neg":
            return -_evaluate(node.args[0], point)
        case "abs":
            value = _evaluate(node.args[0], point)
            return value if value >= 0 else -value
        case "!":
            return Fraction(math.factorial(_count(_evaluate(node.args[0], point))))
    left, right = (_evaluate(arg, point) for arg in node.args)
    match node.kind:
        case "+" | "mixed":
            return _bounded(left + right)
        case "*":
            return _bounded(left * right)
        case "/" | "frac":
            return _bounded(left / right)
        case "^":
            return _power(left, right)
        case "binom":
            return Fraction(math.comb(_count(left), _count(right)))
        case _:
            return _root(left, right)


def _count(value: Number) -> int:
    """For factorials and binomials: a whole number whose factorial stays within MAX_BITS."""
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_BITS // 8:
        raise NoExpression("not a small count")
    return value.numerator


def _bounded(value: Number) -> Number:
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NoExpression("too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * bits > MAX_BITS:
                raise NoExpression("too large")
            return base**exponent.numerator
        if exponent.denominator <= 8 and base >= 0:
            return _power(_root(Fraction(exponent.denominator), base), Fraction(exponent.numerator))
    if base < 0:
        raise NoExpression("power of a negative number")
    return float(base) ** float(exponent)


def _root(index: Number, value: Number) -> Number:
    if not isinstance(index, Fraction) or index.denominator != 1 or not 2 <= index <= 16:
        raise NoExpression("such a root is not read")
    n = index.numerator
    if value < 0:
        if n % 2 == 0:
            raise NoExpression("even root of a negative number")
        return -_root(index, -value)
    if isinstance(value, Fraction):
        top, low = _whole_root(value.numerator, n), _whole_root(value.denominator, n)
        if top is not None and low is not None:
            return Fraction(top, low)
    return float(value) ** (1.0 / n)


def _whole_root(value: int, n: int) -> int | None:
    """The n-th root when it is whole (Newton's iteration on integers)."""
    if value < 2:
        return value
    guess = 1 << -(-value.bit_length() // n)
    while True:
        better = ((n - 1) * guess + value // guess ** (n - 1)) // n
        if better >= guess:
            return guess if guess**n == value else None
        guess = better


def same_value(left: Node, right: Node) -> bool:
    """Equal at every fixed point where both have a value, and at one at least."""
    compared = 0
    for point in range(POINTS):
        try:
            a, b = evaluate(left, point), evaluate(right, point)
        except NoExpression:
            continue
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            equal = a == b
        else:
            equal = math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        if not equal:
            return False
        compared += 1
    return compared > 0
