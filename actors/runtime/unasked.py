"""What the text of tests defines for a test runner to call, and what it takes from the module of the program: read from its syntax.

Tests come as assertions, but as well as functions for pytest, as classes for unittest or as one `check` that somebody is to call.
Such a text comes to its end whatever the program does. Always true: what a runner would call is named here and then called
(`zygote.py`), or the text is refused (Unasked); none that asks nothing of a program is passed. Standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_PER_TEST = ("setup_method", "teardown_method")
_ASKS_NOTHING = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Assign, ast.AnnAssign, ast.Pass, ast.Global),
)


class Unasked(ValueError):
    """The text asks nothing of a program, or what it asks cannot be asked here; one line that says what."""


def without_solution(tests: str) -> str:
    """The text with as many lines, in which `from solution import f` is no import where no module of that name is installed: its
    names are the program's own. Raises SyntaxError, ValueError."""
    lines = tests.split("\n")
    for node in ast.parse(tests).body:
        if not isinstance(node, ast.ImportFrom) or node.level or _installed(node.module or ""):
            continue
        called = [f"{one.asname} = {one.name}" for one in node.names if one.asname and one.asname != one.name]
        lines[node.lineno - 1 : node.end_lineno] = ["; ".join(called) or "pass"] + [""] * (
            (node.end_lineno or node.lineno) - node.lineno
        )
    return "\n".join(lines)


def _installed(module: str) -> bool:
    top = module.partition(".")[0]
    try:
        return top in sys.stdlib_module_names or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def left_to_call(tests: str, space: Mapping[str, Any]) -> list[Callable[[], Any]]:
    """What a runner would call, in the order of the text; `space`: the names when the text has come to its end. Without what the
    text calls itself. Raises Unasked."""
    tree = ast.parse(tests)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    ran = any(
        isinstance(n, ast.Attribute) and n.attr in ("main", "TextTestRunner") and _is_unittest(n.value) for n in ast.walk(tree)
    )
    found: list[Callable[[], Any]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test") and node.name not in used:
            found.append(_function(node, space[node.name]))
        elif isinstance(node, ast.ClassDef) and node.name not in used and not ran:
            found += _class(node, space[node.name])
    if not found and all(isinstance(node, _ASKS_NOTHING) or _says_only(node) for node in tree.body) and not _calls(tree):
        raise Unasked("these tests define names and call nothing, so that every program would pass")
    return found


def _is_unittest(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "unittest"


def _says_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Compare)


def _calls(tree: ast.Module) -> bool:
    """Whether a value that the text assigns is one that it has to ask for."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None]
    return any(isinstance(node, ast.Call) for value in values for node in ast.walk(value))


def _needs(arguments: ast.arguments, own: int) -> bool:
    """Whether a runner would have to give it more than `own` arguments: fixtures, parameters."""
    places = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return places > own or any(one is None for one in arguments.kw_defaults)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, function: Any) -> Callable[[], Any]:
    if _needs(node.args, 0) or isinstance(node, ast.AsyncFunctionDef):
        raise Unasked(
            f"{node.name} of these tests is asynchronous or takes arguments (fixtures, parameters), which nobody gives here"
        )
    return lambda: function()


def _class(node: ast.ClassDef, kind: Any) -> Iterator[Callable[[], Any]]:
    if not isinstance(kind, type):
        return
    if issubclass(kind, unittest.TestCase):
        yield from (_case(kind, name) for name in unittest.defaultTestLoader.getTestCaseNames(kind))
    elif node.name.startswith("Test") and "__init__" not in vars(kind):
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test"):
                if _needs(one.args, 1) or isinstance(one, ast.AsyncFunctionDef):
                    raise Unasked(f"{node.name}.{one.name} of these tests takes arguments, which nobody gives here")
                yield _method(kind, one.name)


def _case(kind: type[unittest.TestCase], name: str) -> Callable[[], None]:
    def run() -> None:
        result = unittest.TestResult()
        unittest.TestSuite([kind(name)]).run(result)
        wrong = [*result.failures, *result.errors]
        if wrong or result.unexpectedSuccesses:
            raise AssertionError(wrong[0][1] if wrong else f"{name} was to fail")

    return run


def _method(kind: type, name: str) -> Callable[[], None]:
    def run() -> None:
        one = kind()
        before, after = (getattr(one, part, None) for part in _PER_TEST)
        if before is not None:
            before(*[None] * (before.__code__.co_argcount - 1) if hasattr(before, "__code__") else ())
        getattr(one, name)()
        if after is not None:
            after()

    return run
