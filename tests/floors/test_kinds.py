"""Nobody outside a kind's folder knows its name: everything asks the record (actors/kinds.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.floors.tree import PACKAGES, parse, sources


class Names(NamedTuple):
    """A sort of kinds: names of those that ship, words of what is compared with them, and where their folders and records are."""

    names: frozenset[str]
    about: tuple[str, ...]
    homes: tuple[str, ...]


SORTS = {
    "engine": Names(frozenset({"embedded", "sglang", "external", "none"}), ("engine",), ("actors/generation/engines/",)),
    "transport": Names(
        frozenset({"disk", "ipc", "nccl", "network"}),
        ("transport", "way"),
        ("actors/runtime/transports/", "actors/trainer/transports/"),
    ),
    "training backend": Names(
        frozenset({"torch", "fsdp", "megatron"}),
        ("backend", "library"),
        ("actors/trainer/torch_backend/", "actors/trainer/megatron_backend/"),
    ),
    "launcher": Names(frozenset({"local", "ray"}), ("launcher",), ()),
}
# How often names are still compared. A number may fall and never rise; a sort that is done stands at 0.
LEFT = {"engine": 0, "transport": 0, "training backend": 13, "launcher": 0}


def texts(node: ast.expr) -> list[str]:
    """Of a text, or of a literal collection of texts."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def compared(tree: ast.AST, sort: Names) -> Iterator[tuple[int, str]]:
    """(line, name) of each comparison, case and key of a table."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                about = " ".join(ast.unparse(side) for side in sides if not texts(side))
                found = [text for side in sides for text in texts(side)] if any(w in about for w in sort.about) else []
            case ast.Match(subject=subject, cases=cases):
                values = [p.value for case in cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)]
                found = [t for v in values for t in texts(v)] if any(w in ast.unparse(subject) for w in sort.about) else []
            case ast.Dict(keys=keys):
                found = [text for key in keys if key is not None for text in texts(key)]
                found = found if len(sort.names & set(found)) > 1 else []
            case _:
                continue
        yield from ((node.lineno, text) for text in found if text in sort.names)


def found_in(sort: Names) -> list[str]:
    return [
        f"{path}:{line} {name}"
        for path in sources(*PACKAGES)
        if not path.as_posix().startswith(sort.homes)
        for line, name in compared(parse(path), sort)
    ]


def test_nobody_but_its_folder_compares_the_name_of_a_kind() -> None:
    for name, sort in SORTS.items():
        found = found_in(sort)
        assert len(found) <= LEFT[name], f"{name}: ask its record instead\n" + "\n".join(found)
        assert len(found) >= LEFT[name], f"{name}: {len(found)} are left; write that number into LEFT"


def test_what_compares_a_name_is_found() -> None:
    """Guards the test above: it would pass, too, if it found nothing."""
    text = """
if s.engine == "sglang" or engine in ("embedded", "external") or color == "none": pass
match spec.engine:
    case "sglang" | "embedded": pass
KINDS = {"sglang": 1, "embedded": 2, 3: 4}
ONE = {"none": 1}
"""
    found = [name for _, name in compared(ast.parse(text), SORTS["engine"])]
    assert sorted(found) == sorted(["sglang", "embedded", "external", "sglang", "embedded", "sglang", "embedded"])
    assert all((Path(home)).is_dir() for sort in SORTS.values() for home in sort.homes)
