"""A condition on rows, as text: `tokens > 2000 and reward == 0` (pure). It is read, never executed as Python.

Names are fields of a row; what a row has not is None, and a comparison with None is false. There are numbers, 'texts', lists,
True, False, None; + - * / %, comparisons (also `in` and chains), and, or, not; len(x) and abs(x). Nothing else, and nothing that
takes long.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from miles_async.settings.errors import SettingsError, nearest

LONGEST = 1000  # characters
Row = Mapping[str, Any]
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ASSIGNS = re.compile(r"(?<![=!<>])=(?!=)")
_CALLS: dict[str, Callable[[Any], Any]] = {"len": len, "abs": abs}
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare, ast.Constant),
    *(ast.Name, ast.Load, ast.List, ast.Tuple, ast.Call, *_ARITHMETIC, *_COMPARE),
)


class Where:
    """One condition. `names`: the fields that it reads."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        """Raises SettingsError, one line, for what is no condition or names what is not in `known`. A name that begins with one
        of `known` that ends in a dot is known too."""
        self._text = text
        try:
            if len(text) > LONGEST:
                raise ValueError(f"longer than {LONGEST} characters")
            self._root = ast.parse(text.strip(), mode="eval")
            self.names = self._check(known)
        except SettingsError:
            raise  # it is a ValueError too
        except SyntaxError as error:
            hint = "Write == to compare." if _ASSIGNS.search(text) else None
            where = f"cannot be read at character {error.offset}" if error.offset else "ends too early"
            raise self._refused(where, hint) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._refused(str(error) or "nested too deep") from None

    def holds(self, row: Row) -> bool:
        """Whether a row meets it. What cannot be computed (a text plus a number, 1/0) does not hold."""
        try:
            return bool(_value(self._root.body, row))
        except (TypeError, ValueError, ArithmeticError):
            return False

    def _check(self, known: Collection[str]) -> frozenset[str]:
        names: set[str] = set()
        called = {id(node.func) for node in ast.walk(self._root) if isinstance(node, ast.Call)}
        prefixes = tuple(name for name in known if name.endswith("."))
        for node in ast.walk(self._root):
            if isinstance(node, ast.Attribute):
                path = ast.unparse(node)
                if not path.startswith(prefixes or ("\0",)):
                    raise self._refused(f"has no field {path}")
                continue
            if not isinstance(node, _NODES):
                what = ast.unparse(node)[:40] or f"the operator {type(node).__name__}"
                raise self._refused(f"may not use {what}")
            if isinstance(node, ast.BinOp) and any(_is_text(side) for side in (node.left, node.right)):
                raise self._refused(f"{ast.unparse(node)[:40]}: arithmetic is for numbers")
            if isinstance(node, ast.Call) and (
                not isinstance(node.func, ast.Name) or node.func.id not in _CALLS or len(node.args) != 1 or node.keywords
            ):
                raise self._refused(f"may call {' and '.join(_CALLS)} alone, with one value")
            if isinstance(node, ast.Name) and id(node) not in called:
                if node.id not in known and node.id + "." not in known:
                    names_here = sorted({name.removesuffix(".") for name in known})
                    remedy = nearest(node.id, known) or f"Fields here: {', '.join(names_here)}."
                    raise self._refused(f"has no field {node.id}", remedy)
                names.add(node.id)
        return frozenset(names)

    def _refused(self, why: str, remedy: str | None = None) -> SettingsError:
        return SettingsError(
            why,
            field="--where",
            value=self._text[:100],
            remedy=remedy or 'For example: --where "tokens > 2000 and reward == 0".',
        )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _value(node: ast.expr, row: Row) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return row.get(name)
        case ast.Attribute():
            head, _, rest = ast.unparse(node).partition(".")
            inner = row.get(head)
            return inner.get(rest) if isinstance(inner, Mapping) else None
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, row) for item in items]
        case ast.UnaryOp(op=op, operand=operand):
            value = _value(operand, row)
            return (not value) if isinstance(op, ast.Not) else -value
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, row), _value(right, row)
            if not all(isinstance(x, int | float) for x in (a, b)):
                raise TypeError("arithmetic is for numbers")  # a text times a number could be of any length
            return _ARITHMETIC[type(op)](a, b)
        case ast.BoolOp(op=op, values=values):
            test = all if isinstance(op, ast.And) else any
            return test(bool(_value(value, row)) for value in values)
        case ast.Call(func=ast.Name(id=name), args=[one]):
            return _CALLS[name](_value(one, row))
        case ast.Compare(left=left, ops=ops, comparators=others):
            a = _value(left, row)
            for compare, other in zip(ops, others, strict=True):
                b = _value(other, row)
                asks_none = isinstance(compare, ast.Eq | ast.NotEq) and isinstance(other, ast.Constant) and other.value is None
                if (a is None or b is None) and not asks_none:
                    return False
                if not _COMPARE[type(compare)](a, b):
                    return False
                a = b
            return True
    raise TypeError(type(node).__name__)
