"""Values of expressions (pure): exact Gaussian rationals, and complex decimals of 60 digits with a bound on their error where a
root, a logarithm or a sine is not rational.

Letters have fixed values (Schwartz-Zippel: an identity of polynomials that is false survives one point with probability <
degree / 1000). Two values are told apart exactly, or as far as their error bounds reach: `1.41421356237309` is not the root of two.
Work is bounded: see mathnumber.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from decimal import Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext
from fractions import Fraction

from actors.reward import mathnumber as numbers
from actors.reward.mathexpr import Node, NoExpression, TooLarge
from actors.reward.mathnumber import (
    CONTEXT,
    IMAGINARY,
    ONE,
    PI,
    ROUNDING,
    TWO,
    ZERO,
    Value,
    bounded,
    minus,
    neg,
    over,
    real_part,
    root,
    times,
)

POINTS = 3
BELOW_ZERO = POINTS  # one more point, whose letters are negative, for |x|
APPROXIMATION_BITS = 128  # a constant rational that takes more digits is nobody's exact value of a root


def evaluate(node: Node, point: int, log_base: int = 10) -> Value:
    """The value where every letter has its fixed value number `point`. `log_base` is that of a bare \\log, 0 = e. Raises
    NoExpression where there is none, TooLarge where it takes too much work."""
    with localcontext(CONTEXT):
        try:
            return _evaluate(node, point, log_base)
        except (ZeroDivisionError, DivisionByZero, InvalidOperation) as error:
            raise NoExpression("no value") from error
        except (OverflowError, Overflow) as error:
            raise TooLarge("too large") from error


def same(left: Value, right: Value, constant: bool) -> bool:
    """Whether two values are equal as far as they are known. `constant`: no letter is in them."""
    if left.exact and right.exact:
        return left[:2] == right[:2]
    with localcontext(CONTEXT):
        for one in (left, right) if constant else ():
            if one.exact and numbers.bits(one) > APPROXIMATION_BITS:
                return False
        re, im, error = numbers.decimals(minus(left, right))
        return max(abs(re), abs(im)) <= 4 * error


def ratio(left: Value, right: Value) -> Value | None:
    """left / right; None where right is zero."""
    with localcontext(CONTEXT):
        try:
            return over(left, right)
        except (ZeroDivisionError, DivisionByZero, InvalidOperation, NoExpression):
            return None


def _evaluate(node: Node, point: int, log_base: int) -> Value:
    """Long sums and products hang to the left: those are walked in a loop, only brackets are recursion."""
    spine: list[Node] = []
    while node.kind in ("+", "*", "/", "frac"):
        spine.append(node)
        node = node.args[0]
    value = _operand(node, point, log_base)
    for above in reversed(spine):
        value = bounded(_OPERATIONS[above.kind](value, _evaluate(above.args[1], point, log_base)))
    return value


def _operand(node: Node, point: int, log_base: int) -> Value:
    match node.kind:
        case "number":
            return Value(node.number)
        case "symbol":
            return _symbol(node.name, point)
        case "log" if len(node.args) == 1:
            base = Value(Fraction(10)) if log_base else _symbol("e", 0)
            return numbers.log(base, _evaluate(node.args[0], point, log_base))
    args = [_evaluate(arg, point, log_base) for arg in node.args]
    return bounded(_FUNCTIONS[node.name](*args) if node.kind == "function" else _OPERATIONS[node.kind](*args))


def _symbol(name: str, point: int) -> Value:
    if name == "i":
        return IMAGINARY
    if name in ("\\pi", "e"):
        constant = +PI if name == "\\pi" else Decimal(1).exp()
        return Value(constant, Decimal(0), constant * ROUNDING)
    mixed = zlib.crc32(f"{point}/{name}".encode())
    value = Fraction(mixed % 1009 + 2, (mixed >> 16) % 31 + 3)
    return Value(-value if point == BELOW_ZERO else value)


def _arctan(value: Value) -> Value:
    x, error = real_part(value)
    doubled = 0
    while abs(x) > Decimal("0.05"):
        x = x / (1 + (1 + x * x).sqrt())
        doubled += 1
    found, term, n = Decimal(0), x, 1
    while abs(term) > ROUNDING * abs(x):
        found += term / n if n % 4 == 1 else -term / n
        term = term * x * x
        n += 2
    return numbers.rounded(found * 2**doubled, Decimal(0), error + 60 * ROUNDING)


def _arcsin(value: Value) -> Value:
    quarter = over(_symbol("\\pi", 0), TWO)
    rest = minus(ONE, times(value, value))
    x, _ = real_part(value)
    y, error = real_part(rest)
    if abs(y) <= 4 * error or y == 0:
        return quarter if x > 0 else neg(quarter)
    if y < 0:
        raise NoExpression("of a sine only")
    return _arctan(over(value, root(TWO, rest)))


def _circle(value: Value) -> tuple[Value, Value]:
    """Cosine and sine."""
    if value == ZERO:
        return ONE, ZERO
    cosine, sine, error = numbers.circle(*real_part(value))
    return numbers.rounded(cosine, Decimal(0), error), numbers.rounded(sine, Decimal(0), error)


_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "ln": numbers.ln,
    "exp": numbers.exp,
    "arctan": _arctan,
    "arcsin": _arcsin,
    "arccos": lambda value: minus(over(_symbol("\\pi", 0), TWO), _arcsin(value)),
    "cos": lambda value: _circle(value)[0],
    "sin": lambda value: _circle(value)[1],
    "tan": lambda value: over(*reversed(_circle(value))),
    "cot": lambda value: over(*_circle(value)),
    "sec": lambda value: over(ONE, _circle(value)[0]),
    "csc": lambda value: over(ONE, _circle(value)[1]),
}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "neg": neg,
    "abs": numbers.size,
    "!": numbers.factorial,
    "+": numbers.plus,
    "mixed": numbers.plus,
    "*": times,
    "/": over,
    "frac": over,
    "^": numbers.power,
    "root": root,
    "binom": numbers.binom,
    "log": numbers.log,
}
