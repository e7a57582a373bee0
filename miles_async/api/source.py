"""A Python function as a file that other processes can load: its source, and what of its module it uses."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bus.private import private_directory
from miles_async.settings.errors import SettingsError

REMEDY = "Give it what it needs as imports, constants and other functions beside it, or save it in a file and write FILE.py:NAME."


def as_file(function: Any, folder: Path, field: str = "reward") -> str:
    """`FILE.py:NAME` of a file in `folder` with this function, the functions of its module that it calls, and their imports and
    constants. SettingsError for what has no source, or uses what cannot be written down."""
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        kind = "a lambda" if getattr(function, "__name__", "") == "<lambda>" else type(function).__name__
        raise _refused(field, f"it is {kind}, where a function made by def is expected", "Write def reward(...): ...")
    heads, bodies = dict[str, str](), dict[str, str]()
    _collect(function, field, heads, bodies)
    text = "\n".join(["from __future__ import annotations", "", *heads.values(), "", "", *bodies.values()])
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    try:
        file = private_directory(folder) / f"reward_{digest}.py"
        file.write_text(text, "utf-8")
    except OSError as error:
        why = f"cannot write to {folder}: {(error.strerror or str(error)).lower()}"
        raise SettingsError(why, field="runs_dir", remedy="Choose another runs_dir.") from None
    return f"{file.absolute()}:{function.__name__}"


def _collect(function: FunctionType, field: str, heads: dict[str, str], bodies: dict[str, str]) -> None:
    """Adds to `heads` (imports, constants) and `bodies` (functions), by name."""
    name = function.__name__
    if name in bodies:
        return
    if function.__closure__:
        inner = ", ".join(function.__code__.co_freevars)
        raise _refused(field, f"{name} uses {inner} of the function around it", REMEDY)
    bodies[name] = ""  # one that calls itself
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in defaults:
        if not _is_literal(value):
            raise _refused(field, f"{name} has the default {value!r}", REMEDY)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise _refused(field, f"the source of {name} is not known", "Save it in a file and write FILE.py:NAME.") from None
    for used in dict.fromkeys(_names(function.__code__)):
        if used in function.__globals__ and used != name:
            _add(used, function.__globals__[used], name, function.__module__, field, heads, bodies)
    bodies[name] = f"{_plain(source)}\n"


def _plain(source: str) -> str:
    """Without decorators, which are applied in `function` already, and would need their own module."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
    return ast.unparse(tree)


def _add(used: str, value: Any, by: str, module: str, field: str, heads: dict[str, str], bodies: dict[str, str]) -> None:
    if isinstance(value, ModuleType):
        heads[used] = f"import {value.__name__} as {used}" if value.__name__ != used else f"import {used}"
    elif isinstance(value, FunctionType) and value.__module__ == module and value.__name__ == used:
        _collect(value, field, heads, bodies)
    elif isinstance(value, re.Pattern):
        heads["re"] = "import re"
        heads[used] = f"{used} = re.compile({value.pattern!r}, {int(value.flags)})"
    elif _is_literal(value):
        heads[used] = f"{used} = {value!r}"
    elif (home := getattr(value, "__module__", None)) not in (None, module, "__main__") and hasattr(value, "__qualname__"):
        own = value.__qualname__
        if "." in own:
            raise _refused(field, f"{by} uses {used}, which is {own} of {home}", REMEDY)
        heads[used] = f"from {home} import {own}" + (f" as {used}" if own != used else "")
    else:
        raise _refused(
            field, f"{by} uses {used}, a {type(value).__name__} of this Python, which other processes do not have", REMEDY
        )


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and what is defined in it look up in its module."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False


def _refused(field: str, why: str, remedy: str) -> SettingsError:
    return SettingsError(why, field=field, remedy=remedy)
