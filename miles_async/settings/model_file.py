"""What a model file of Miles, `scripts/models/NAME.py`, says: read as an expression, and not run.

Reads  the file, and the file of the model that it varies    Writes  nothing
Such a file defines `model_args()`, which returns one text put together from literals, constants of the module, variables of the
environment, and two helpers. Always true: no code of the file runs; what is more than that is told as not read.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DEEPEST = 60
MOST_FILES = 8
LONGEST = 1 << 20
_TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

_PLAIN: dict[str, Callable[[Any], Any]] = {"int": int, "str": str, "float": float, "len": len}


class _NotRead(Exception):
    """Why a model file is not read."""


def find_above(path: Path) -> list[Path]:
    """The folders `scripts/models` and `models` of each folder above `path`, nearest first."""
    return [parent / name for parent in path.resolve().parents for name in ("models", "scripts/models")]


def model_words(name: str, folders: list[Path], environ: Mapping[str, str | None]) -> tuple[str, str]:
    """The words of the model `name`, in one line, from the first of `folders` that has its file; or, second, why not."""
    if "/" in name or not name:
        return "", f"{name!r} is no name of a model"
    path = next((folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").is_file()), None)
    if path is None:
        return "", f"there is no scripts/models/{name}.py in the folders above"
    try:
        text = _File(path, environ, 1).call("model_args", {})
    except _NotRead as why:
        return "", f"{path} is more than is read without running it: {why}"
    except (RecursionError, ValueError, TypeError, ArithmeticError, LookupError, MemoryError) as error:
        return "", f"{path} cannot be read: {type(error).__name__}"
    return (" ".join(text.split()), "") if isinstance(text, str) else ("", f"{path} gives no text")


def moe_layer_freq(*, nlayers: int, first_k_dense_replace: int) -> str:
    """Megatron's pattern of layers: 0 is dense, 1 has experts."""
    if not 0 <= nlayers <= 4096:
        raise _NotRead("the number of layers")
    dense = min(first_k_dense_replace, nlayers)
    return f"[{','.join(['0'] * dense + ['1'] * (nlayers - dense))}]"


class _File:
    """One model file; its constants and functions by name."""

    def __init__(self, path: Path, environ: Mapping[str, str | None], files: int) -> None:
        self._path, self._environ, self._files, self._depth = path, environ, files, 0
        if files > MOST_FILES:
            raise _NotRead("it varies a model that varies a model, and so on")
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (OSError, SyntaxError, ValueError) as error:
            raise _NotRead(f"{type(error).__name__}") from None
        self._functions: dict[str, ast.FunctionDef] = {}
        self._globals: dict[str, Any] = {"__file__": str(path)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self._functions[node.name] = node
            elif not isinstance(node, ast.Import | ast.ImportFrom) and not self._is_text(node):
                self._set(node, self._globals)

    @staticmethod
    def _is_text(node: ast.stmt) -> bool:
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    def call(self, name: str, given: dict[str, Any]) -> Any:
        """What the function `name` returns, given keywords."""
        function = self._functions.get(name)
        if function is None:
            raise _NotRead(f"no function {name}")
        said = function.args
        positional, keyword = [*said.posonlyargs, *said.args], said.kwonlyargs
        defaults = [*[None] * (len(positional) - len(said.defaults)), *said.defaults, *said.kw_defaults]
        local: dict[str, Any] = {}
        for argument, default in zip([*positional, *keyword], defaults, strict=True):
            if argument.arg in given:
                local[argument.arg] = given[argument.arg]
            elif default is not None:
                local[argument.arg] = self._value(default, {})
            else:
                raise _NotRead(f"{name}() needs {argument.arg}")
        if set(given) - set(local):
            raise _NotRead(f"{name}() does not take {', '.join(set(given) - set(local))}")
        found = self._run(function.body, local)
        return found[0] if found else None

    def _run(self, body: list[ast.stmt], local: dict[str, Any]) -> list[Any]:
        """What is returned, in a list; [] where the body ends without."""
        for node in body:
            if isinstance(node, ast.Return):
                return [self._value(node.value, local) if node.value else None]
            if isinstance(node, ast.If):
                if found := self._run(node.body if self._value(node.test, local) else node.orelse, local):
                    return found
            elif not self._is_text(node) and not isinstance(node, ast.Pass):
                self._set(node, local)
        return []

    def _set(self, node: ast.stmt, space: dict[str, Any]) -> None:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                space[name] = self._value(value, space)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                space[name] = self._two(op, self._name(name, space), self._value(value, space))
            case _:
                raise _NotRead(f"line {node.lineno}")

    def _name(self, name: str, local: dict[str, Any]) -> Any:
        if name in local:
            return local[name]
        if name in self._globals:
            return self._globals[name]
        raise _NotRead(f"the name {name}")

    def _two(self, op: ast.operator, a: Any, b: Any) -> Any:
        if type(op) not in _TWO or (isinstance(op, ast.Mod) and isinstance(a, str)):
            raise _NotRead(type(op).__name__)
        if isinstance(op, ast.Mult):
            whole, text = (a, b) if isinstance(a, int) else (b, a)
            if isinstance(text, str | list | tuple) and isinstance(whole, int) and len(text) * whole > LONGEST:
                raise _NotRead("a text that long")
        found = _TWO[type(op)](a, b)
        if isinstance(found, int) and abs(found) >= 2**63:
            raise _NotRead("a number that large")
        return found

    def _value(self, node: ast.expr, local: dict[str, Any]) -> Any:
        self._depth += 1
        try:
            if self._depth > DEEPEST:
                raise _NotRead("it is nested too deeply")
            return self._expression(node, local)
        finally:
            self._depth -= 1

    def _expression(self, node: ast.expr, local: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._name(name, local)
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part, local)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return str(self._value(value, local))
            case ast.BinOp(left=left, op=op, right=right):
                return self._two(op, self._value(left, local), self._value(right, local))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, local)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, local)
            case ast.BoolOp(op=op, values=values):
                found: Any = None
                for value in values:
                    found = self._value(value, local)
                    if bool(found) == isinstance(op, ast.Or):
                        return found
                return found
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test, local) else orelse, local)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(op, self._value(left, local), self._value(right, local))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self._value(one, local) for one in elements]
            case ast.Call(func=func, args=arguments, keywords=keywords) if all(one.arg for one in keywords):
                given = [self._value(one, local) for one in arguments]
                return self._called(func, given, {str(one.arg): self._value(one.value, local) for one in keywords}, local)
        raise _NotRead(f"line {node.lineno}")

    @staticmethod
    def _compared(op: ast.cmpop, a: Any, b: Any) -> bool:
        tests: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
            ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
            ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda x, y: x in y,
        }  # fmt: skip
        if type(op) not in tests:
            raise _NotRead(type(op).__name__)
        return bool(tests[type(op)](a, b))

    def _called(self, func: ast.expr, given: list[Any], keywords: dict[str, Any], local: dict[str, Any]) -> Any:
        match func:
            case ast.Name(id="moe_layer_freq"):
                return moe_layer_freq(**keywords)
            case ast.Name(id="load_sibling_model_args" | "load_model_args") if (
                given and isinstance(given[-1], str) and "/" not in given[-1]
            ):
                return " ".join(
                    str(
                        _File(self._path.with_name(f"{given[-1]}.py"), self._environ, self._files + 1).call("model_args", keywords)
                    ).split()
                )
            case ast.Name(id="int" | "str" | "float" | "len" as name) if len(given) == 1 and not keywords:
                return _PLAIN[name](given[0])
            case ast.Name(id=name) if name in self._functions and not given:
                return self.call(name, keywords)
            case (
                ast.Attribute(value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), attr="get")
                | ast.Attribute(value=ast.Name(id="os"), attr="getenv")
            ) if given and not keywords:
                return self._environ.get(str(given[0]), *given[1:2])
            case ast.Attribute(value=value, attr="join") if len(given) == 1:
                return str(self._value(value, local)).join(map(str, given[0]))
        raise _NotRead(f"the call at line {func.lineno}")
