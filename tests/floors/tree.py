"""The source tree as the floor tests see it: files, what they import, and where in the file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bus.topology import ROLES

ROOT = Path(__file__).parents[2]
PACKAGES = ("bus", "actors", "miles_async")
FLOOR = {"bus": 0, "actors": 1, "miles_async": 2}
ROOMS = ROLES


def each(items: Callable[[], Iterable[Any]]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes one test of a check of many items, which names all that fail: a test for each of a thousand files costs a thousand
    reports. `items` are asked for when the test runs, so that nobody parses the tree to collect tests."""

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            failed, n = [], 0
            for n, item in enumerate(items(), 1):  # noqa: B007 - their number
                try:
                    check(item)
                except (AssertionError, ValueError) as error:
                    failed.append(f"{getattr(item, 'id', item)}: {error}")
            assert n, "nothing to check"
            assert not failed, "\n".join([f"{len(failed)} of {n}:", *failed])

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return decorate


class Import(NamedTuple):
    """One imported module. `top`: at module level, not inside a function or under TYPE_CHECKING. `checking`: under it."""

    target: str
    line: int
    top: bool
    relative: bool
    checking: bool = False


def sources(*folders: str) -> list[Path]:
    """Python files below folders of the repository, relative to its root."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse((ROOT / path).read_text(), str(path))


def is_pure(path: Path) -> bool:
    """Whether the module's docstring says (pure)."""
    return "(pure)" in (ast.get_docstring(parse(path)) or "")


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """All imports of a whole file: those inside functions count too."""
    return tuple(_walk(parse(path), top=True))


def _walk(node: ast.AST, top: bool, checking: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, top, False, checking)
        elif isinstance(child, ast.ImportFrom):
            relative = child.level > 0
            yield Import(child.module or "", child.lineno, top, relative, checking)
            # `from actors import filter` names a module, `from actors.filter import Filter` does not.
            for alias in child.names:
                target = f"{child.module}.{alias.name}"
                if (ROOT / target.replace(".", "/")).is_dir() or (ROOT / f"{target.replace('.', '/')}.py").is_file():
                    yield Import(target, child.lineno, top, relative, checking)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = checking or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            yield from _walk(child, top and not function and not typing, typing)


def package(target: str) -> str:
    """First part of a module name."""
    return target.partition(".")[0]
