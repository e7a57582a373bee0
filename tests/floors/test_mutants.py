"""The list of mutants cannot rot: each entry still names a text that is there once, and tests that exist."""

from __future__ import annotations

import ast
import shlex
from functools import cache
from pathlib import Path

import pytest

from scripts.mutants import REPO, Mutant, load
from tests.floors.tree import each


@cache
def tree_of(file: str) -> str:
    """What a file says, comments and layout apart."""
    return ast.dump(ast.parse((REPO / file).read_text()))


@each(load)
def test_a_mutant_can_be_applied_and_its_tests_exist(mutant: Mutant) -> None:
    before = (REPO / mutant.file).read_text()
    after = mutant.applied(before)
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(after)) != tree_of(mutant.file), "the fault changes nothing"
    files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert files and all((REPO / name).is_file() for name in files), mutant.tests


def test_every_kind_of_file_that_decides_has_mutants() -> None:
    folders = {Path(m.file).parent.as_posix() for m in load()}
    rooms = ("sampler", "generation", "filter", "partial", "trainer", "publisher", "evaluator")
    assert folders >= {"bus/streams", *(f"actors/{room}" for room in rooms)} and len(load()) >= 60


def test_an_entry_that_is_not_there_once_is_stale() -> None:
    mutant = Mutant("id", "file", old="a + b", new="a - b", tests="tests/x.py")
    assert mutant.applied("c = a + b") == "c = a - b"
    for text in ("c = a", "a + b, a + b"):
        with pytest.raises(ValueError, match="not once; write the entry anew"):
            mutant.applied(text)
