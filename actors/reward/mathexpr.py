"""Normalised mathematical text to a tree (pure): a small parser of its own over numbers, fractions, roots, powers, elementary
functions and letters; nothing is evaluated as code.

Work is linear and bounded: long or deep input is TooLarge, what the grammar does not know is Unknown, what is no formula at all
is NoExpression; never an error and never slow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARS = 400
MAX_DEPTH = 40

Kind = Literal["number", "symbol", "neg", "+", "*", "/", "^", "root", "frac", "mixed", "binom", "!", "abs", "function", "log"]


class NoExpression(Exception):
    """The text is no expression, or has no value."""


class TooLarge(NoExpression):
    """An expression that takes more work than is done."""


class Unknown(NoExpression):
    """It may be mathematics that this parser does not know, or that has more than one reading."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `frac` is a written fraction, `/` a division of anything else; `mixed` is a whole number and a fraction; `log` has
    base and argument, or its argument alone for a bare \\log."""

    kind: Kind
    args: tuple[Node, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""


_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d{1,3}(?![\d.]))?|\.\d+)|(\\[A-Za-z]+)|([A-Za-z])|([-+*/^!(){}\[\]|_'°]))")
_GREEK = frozenset(
    f"\\{name}"
    for name in (
        *("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "varphi", "omega", "sigma", "tau"),
        *("pi", "infty", "epsilon", "rho", "eta", "Delta", "Omega", "Theta", "psi", "xi", "nu", "kappa", "ell", "varepsilon"),
    )
)
_TRIG = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = (*_TRIG, "ln", "log", "lg", "exp", "arcsin", "arccos", "arctan")
_FUNCTION = frozenset(f"\\{name}" for name in FUNCTIONS)
KNOWN_COMMANDS = _GREEK | _FUNCTION | {"\\frac", "\\sqrt", "\\binom"}
_DIGITS = "0123456789."
_KNOWN_TO_NOBODY = frozenset('"#&,;?@`~:$%.')  # no formula has such a character, to whomever it is shown
_OPEN = {"(": ")", "{": "}", "[": "]"}


def parse(text: str) -> Node:
    """Normalised text to a tree; NoExpression when it is none."""
    if len(text) > MAX_CHARS:
        raise TooLarge("too long")
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
            rest = text[at:].lstrip()
            raise (NoExpression if rest[0] in _KNOWN_TO_NOBODY else Unknown)(f"unreadable at {rest[:10]!r}")
        found.append(match.group(0).strip())
        at = match.end()
    return found


class _Parser:
    """Recursive descent: sum > product > unary > power > atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._bars = 0  # absolute values that are open
        self._angle = False  # within the argument of a sine: degrees are no mere unit there

    def peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self.peek()
        self._at += 1
        return token

    def sum(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise TooLarge("too deep")
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
            elif token and (token[0].isalnum() or token[0] in "\\.({[" or (token == "|" and not self._bars)):
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
        if self.peek() == "!":
            self._next()
            base = Node("!", (base,))
            if self.peek() == "!":
                raise Unknown("a double factorial")
        if self.peek() == "°":
            self._next()
            base = Node("*", (base, _DEGREE)) if self._angle else base
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
            raise TooLarge("too deep")
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
            self._bars += 1
            node = Node("abs", (self.sum(depth + 1),))
            self._bars -= 1
            if self._next() != "|":
                raise NoExpression("| is not closed")
            return node
        if token in _FUNCTION:
            return self._function(token[1:], depth)
        if token == "\\sqrt":
            index = Node("number", number=Fraction(2))
            if self.peek() == "[":
                index = self._atom(depth + 1)
            return Node("root", (index, self._argument(depth)))
        if (len(token) == 1 and token.isalpha()) or token in _GREEK:
            return Node("symbol", name=token + self._mark())
        raise (Unknown if token[0] == "\\" else NoExpression)(f"unexpected {token!r}")

    def _mark(self) -> str:
        """Subscript and primes of a letter: they belong to its name."""
        mark = ""
        while self.peek() in ("_", "'"):
            if self._next() == "_":
                first = self._next()
                mark += "_"
                while first == "{" and self.peek() not in ("}", ""):
                    mark += self._next()
                if first == "{":
                    self._next()
                elif first[:1].isdigit() and len(first) > 1:
                    mark += first[0]
                    self._tokens.insert(self._at, first[1:])
                else:
                    mark += first
            else:
                mark += "'"
        return mark

    def _function(self, name: str, depth: int) -> Node:
        """\\sin^2 x, \\log_2 8, \\ln(x+1): without brackets, the argument is what stands beside it up to a sign or a function."""
        base = Node("number", number=Fraction(10)) if name == "lg" else None
        if name == "log" and self.peek() == "_":
            self._next()
            base = self._argument(depth + 1)
        power = None
        if self.peek() == "^":
            self._next()
            sign = self.peek() == "-"
            if sign:
                self._next()
            power = self._argument(depth + 1)
            if sign or power == _MINUS_ONE:
                if name not in ("sin", "cos", "tan") or (sign and power != _MINUS_ONE.args[0]):
                    raise Unknown("a negative power of a function")
                name, power = f"arc{name}", None
        outer, self._angle = self._angle, name in _TRIG
        argument = self._operand(depth + 1)
        self._angle = outer
        if name in ("log", "lg"):
            node = Node("log", (argument,) if base is None else (base, argument))
        else:
            node = Node("function", (argument,), name=name)
        return node if power is None else Node("^", (node, power))

    def _operand(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise TooLarge("too deep")
        token = self.peek()
        if token in _OPEN or token == "|":
            node = self._atom(depth)
            if self.peek() in ("^", "!"):
                raise Unknown("a power of the argument or of the function")
            return node
        node = self._unary(depth)
        while (token := self.peek()) and (token[0].isalnum() or (token[0] == "\\" and token not in _FUNCTION)):
            node = self._beside(node, depth)
        if token == "/" and self.peek(1) not in _FUNCTION:
            raise Unknown("a quotient of the argument or of the function")
        return node

    def _argument(self, depth: int) -> Node:
        """`{...}`, or one digit or letter as TeX takes it: \\frac12 is one half."""
        token = self.peek()
        if token and token[0].isdigit() and len(token) > 1:
            if not token.isdigit():
                raise NoExpression("a decimal needs braces here")
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._atom(depth + 1)


_DEGREE = Node("/", (Node("symbol", name="\\pi"), Node("number", number=Fraction(180))))
_MINUS_ONE = Node("neg", (Node("number", number=Fraction(1)),))


def nodes(tree: Node) -> Iterator[Node]:
    """All nodes of a tree."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left.extend(node.args)


def is_constant(tree: Node) -> bool:
    """Whether a tree has no letter but i, e and \\pi."""
    return all(node.kind != "symbol" or node.name in ("i", "e", "\\pi", "\\infty") for node in nodes(tree))


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
