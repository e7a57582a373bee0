"""Private APIs of other libraries: each use stands in docs/private-apis.md, and each name there is in the installed library."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.floors.tree import PACKAGES, ROOT, each, package, parse, sources

PAGE = Path("docs/private-apis.md")
ROW = re.compile(r"^\| (?P<names>`[^|]+) \| (?P<files>`[^|]+) \| [^|]+ \| ?(?P<tests>[^|]*) ?\|$", re.M)
CODE = re.compile(r"`([^`]+)`")
DOCUMENTED = {"_replace", "_asdict", "_fields", "_exit", "_getframe"}  # of named tuples, os and sys: names of documented functions


class Row(NamedTuple):
    """What is rested on, in which files, and what would notice that it changed."""

    names: tuple[str, ...]
    files: tuple[str, ...]
    tests: tuple[str, ...]


@cache
def rows() -> tuple[Row, ...]:
    """Of the page."""
    found = ROW.finditer((ROOT / PAGE).read_text(encoding="utf-8"))
    return tuple(Row(*(tuple(CODE.findall(row[part])) for part in ("names", "files", "tests"))) for row in found)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def uses(path: Path) -> Iterator[str]:
    """Private names of others that a file uses, and names of others that it replaces."""
    defined, foreign = set(), {}
    for node in ast.walk(parse(path)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                defined.add(node.name)
            case ast.Name(ctx=ast.Store()):
                defined.add(node.id)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                defined.add(node.attr)
            case ast.Import(names=names):
                foreign |= {a.asname or package(a.name): a.name for a in names if package(a.name) not in PACKAGES}
            case ast.ImportFrom(module=str(module), names=names) if package(module) not in PACKAGES:
                foreign |= {a.asname or a.name: f"{module}.{a.name}" for a in names}
    for name in foreign.values():
        yield from filter(is_private, name.split("."))
    for node in ast.walk(parse(path)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name) and name not in defined:
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) if package(_origin(node, foreign)) not in sys.stdlib_module_names | {""}:
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if is_private(name) and name not in defined:
                    yield name


def _origin(node: ast.expr, foreign: dict[str, str]) -> str:
    """Module of others that an expression like `a.b.c` begins in, empty for none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return foreign.get(node.id, "") if isinstance(node, ast.Name) else ""


@each(lambda: sources(*PACKAGES))
def test_every_private_name_of_others_stands_on_the_page(path: Path) -> None:
    listed = {part for row in rows() if str(path) in row.files for name in row.names for part in name.split(".")}
    missing = sorted(set(uses(path)) - listed)
    assert not missing, f"{missing}: a row in {PAGE}, with the test that would notice"


@each(rows)
def test_what_the_page_lists_is_used_where_it_says_and_its_tests_exist(row: Row) -> None:
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in row.files]
    for name in row.names:
        assert any(name.rpartition(".")[2] in text for text in texts), f"{name} is not used there any more"
    for test in row.tests:
        assert (ROOT / test).is_file(), test


@each(lambda: sorted({name for row in rows() for name in row.names if "." in name and find_spec(package(name))}))
def test_the_installed_library_has_each_name(name: str) -> None:
    """Its files are read and not imported, which would take half a minute."""
    module, *parts = name.split(".")
    spec = find_spec(module)
    assert spec is not None
    if module in sys.stdlib_module_names:
        assert hasattr(importlib.import_module(module), parts[0])
        return
    assert spec.submodule_search_locations
    at = Path(next(iter(spec.submodule_search_locations)))
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    files = [at / f"{parts[0]}.py"] if parts and (at / f"{parts[0]}.py").is_file() else [*at.glob("*.py"), *at.glob("*.pyi")]
    wanted = parts[1:] if len(files) == 1 else parts
    text = text_of(tuple(files))
    assert files and all(re.search(rf"\b{part}\b", text) for part in wanted[-2:]), f"{name} is not in {at}"


@cache
def text_of(files: tuple[Path, ...]) -> str:
    """Of some hundred files in one folder, for each of its names."""
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def test_the_uses_that_are_known_are_found() -> None:
    """Guards the first test, which would pass if it found nothing."""
    assert {"_writer"} == set(uses(Path("bus/streams/wire.py")))
    assert {"_inductor", "_functorch", "_dynamo", "_logging"} <= set(uses(Path("actors/trainer/torch_backend/compiled.py")))
    assert "synchronize" in set(uses(Path("actors/trainer/megatron_backend/host.py")))
    assert "_server_ray_version" in set(uses(Path("miles_async/cli/ray.py")))
