"""Arithmetic that a model writes (pure): numbers, operators, brackets and a few functions; nothing is executed.

Always true: every operation is bounded before it is made. Numbers have at most MAX_BITS, so no single one takes a millisecond.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MAX_BITS = 4096  # of a number that is handled
MAX_EXPRESSION = 500  # characters
MAX_FACTORIAL = 300
MAX_DIGITS = 1000  # that `round` keeps or drops: 10 to this power is computed for it

_CONSTANTS = {"pi": math.pi, "e": math.e}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it."""
    if len(expression) > MAX_EXPRESSION:
        return f"error: the expression is longer than {MAX_EXPRESSION} characters"
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        return str(value)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        return f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError("the number is too large")
    return operator.pow(base, exponent)


def _factorial(n: Any) -> int:
    if n > MAX_FACTORIAL:
        raise OverflowError("the number is too large")
    return math.factorial(n)


def _round(number: Any, digits: Any = None) -> Any:
    if isinstance(digits, int) and abs(digits) > MAX_DIGITS:
        raise OverflowError(f"round keeps at most {MAX_DIGITS} digits")
    return round(number, digits)


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": _round, "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd, "factorial": _factorial,
}  # fmt: skip


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _small(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _small(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _small(_FUNCTIONS[name](*map(_value, args)))
    raise ValueError(f"cannot calculate {ast.unparse(node)[:40]!r}")


def _small(value: Any) -> Any:
    if isinstance(value, complex) or value != value:
        raise ValueError("the result is not a real number")
    if (isinstance(value, int) and value.bit_length() > MAX_BITS) or value in (math.inf, -math.inf):
        raise OverflowError("the number is too large")
    return value
