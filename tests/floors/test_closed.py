"""Drop reasons, kinds of events and waits are closed lists: each that is used is declared, each that is declared is used, and the
tables of the documentation are made from the declarations."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from bus.messages.events import EventKind
from bus.messages.reasons import DropReason, declared, meaning
from bus.messages.samples import LostReason
from bus.messages.waits import Wait
from miles_async.console.doctor.finding import Rule
from miles_async.governor.standing import NoteKind
from tests.floors.tree import PACKAGES, ROOT, each, parse, sources

LISTS = {"reasons": DropReason, "events": EventKind, "waits": Wait}
CLOSED: dict[type[StrEnum], str] = {kind: f"bus/messages/{name}.py" for name, kind in LISTS.items()}
PLAIN = {"dead letter", "tried again", "issued again"}  # said of other things too
WORDS = "|".join(sorted(re.escape(one) for one in EventKind if " " in one and one not in PLAIN))
SPELLED = re.compile(rf'"((?:tokens/)?dropped/\w+|{WORDS})"')


def names_used(kind: type[StrEnum]) -> set[str]:
    """Members that the product names outside their declaration."""
    member = re.compile(rf"\b{kind.__name__}\.([A-Z_]+)")
    paths = (path for path in sources(*PACKAGES) if path.as_posix() != CLOSED[kind])
    return {name for path in paths for name in member.findall((ROOT / path).read_text(encoding="utf-8"))}


@each(lambda: CLOSED)
def test_what_is_declared_is_used(kind: type[StrEnum]) -> None:
    by_name = {f"LOST_{reason.upper()}" for reason in get_args(LostReason)}
    by_name |= {"ADOPTED", "REPLACED", *(f"GOVERNOR_{note.upper()}" for note in get_args(NoteKind))}
    assert sorted({one.name for one in kind} - names_used(kind) - by_name) == []


@each(lambda: [path for path in sources(*PACKAGES) if path.as_posix() not in CLOSED.values()])
def test_no_file_spells_an_account_of_drops_or_an_event_by_itself(path: Path) -> None:
    spelled = SPELLED.findall((ROOT / path).read_text(encoding="utf-8"))
    if path.parent.as_posix() == "miles_async/console/doctor":  # whose rules have names of their own, some of them those of events
        spelled = [word for word in spelled if word not in get_args(Rule)]
    assert not spelled, f"{spelled}: name the member of DropReason or EventKind"


@each(lambda: sources(*PACKAGES))
def test_an_event_has_a_level_that_its_kind_may_have(path: Path) -> None:
    if "level=" not in (ROOT / path).read_text(encoding="utf-8"):
        return
    for node in ast.walk(parse(path)):
        if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]).startswith("EventKind.")):
            continue
        kind = EventKind[ast.unparse(node.args[0]).removeprefix("EventKind.")]
        given = [keyword.value for keyword in node.keywords if keyword.arg == "level"]
        said = {c.value for value in given for c in ast.walk(value) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
        assert said <= set(kind.levels), f"line {node.lineno}: {said} of {kind.levels}"


def test_a_reason_is_read_back_as_what_it_was_made_from() -> None:
    for reason in DropReason:
        said = reason.of(0.5) if reason.tail else reason.value
        assert declared(said) is reason and (reason.tail or meaning(said) == reason.meaning)
    assert declared("zero_std_-0.5") is DropReason.ZERO_STD and "are equal (0.5, rounded" in meaning("zero_std_0.5")
    assert declared("too hard") is declared("stale_") is declared("") is None and "own filter" in meaning("too hard")
    with pytest.raises(ValueError, match="stands alone"):
        DropReason.STALE.of(1)


def test_the_text_of_a_wait_is_read_back_as_its_kind_alone() -> None:
    values = {"streams": "rollouts, eval.rollouts", "stream": "ma:x:prompts", "folder": "/x", "path": "a b.jsonl", "version": 7,
              "step": 3, "missing": "2 of 8 samples", "workers": "generation-0, generation-1", "why": "disk full"}  # fmt: skip
    for wait in Wait:
        assert Wait.of(wait.text(**values)) is wait
    assert Wait.of("") is Wait.of("what only a later release knows") is None
    assert Wait.of("requests that a later release knows") is None, "a text that only begins like one"


# -- the tables of the documentation ----------------------------------------------------------------------------------


def sentence(text: str) -> str:
    """A part of a sentence as one, for a cell."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def reasons_table() -> str:
    rows = [f"| `{one.shown}` | {sentence(one.meaning)} | {sentence(one.remedy)} |" for one in DropReason]
    return "\n".join(["| reason | meaning | remedy |", "|---|---|---|", *rows])


def events_table() -> str:
    rows = [f"| `{e.shown}` | {', '.join(e.levels)} | {sentence(e.meaning)} | {sentence(e.remedy)} |" for e in EventKind]
    return "\n".join(["| event | level | meaning | remedy |", "|---|---|---|---|", *rows])


def waits_table() -> str:
    lengths = {"idle": "any time", "turn": "a step or longer", "short": "under a minute"}
    shown = {wait: re.sub(r"{(\w+)}", lambda name: name[1].upper(), wait.value) for wait in Wait}
    rows = [f"| `{shown[wait]}` | {lengths[wait.length]} | {sentence(wait.ends)} |" for wait in Wait]
    return "\n".join(["| waits for | usual | ends when |", "|---|---|---|", *rows])


TABLES = {
    "drop reasons": ("docs/glossary.md", reasons_table),
    "events": ("docs/metrics.md", events_table),
    "waits": ("docs/metrics.md", waits_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_documentation_is_what_is_declared(name: str) -> None:
    """After a change of it: UPDATE_DOCS=1 writes the table anew."""
    page, made = TABLES[name]
    text = (ROOT / page).read_text(encoding="utf-8")
    before, rest = text.split(mark := f"<!-- {name} -->\n")
    written, after = rest.split(end := f"\n<!-- /{name} -->")
    if os.environ.get("UPDATE_DOCS"):
        (ROOT / page).write_text(f"{before}{mark}{made()}{end}{after}", encoding="utf-8")
        return
    assert written == made(), f"run UPDATE_DOCS=1 python -m pytest {Path(__file__).relative_to(ROOT)}"


# -- a new reason, done for real --------------------------------------------------------------------------------------

DECLARED = """    TRUNCATED = (
"""
NEW = """    TOO_SHORT = "too_short", "a response has fewer than three tokens", "a longer minimum"
    TRUNCATED = (
"""
JUDGED = """def keep_all("""
NEW_JUDGE = '''def no_short(samples: Sequence[Scored]) -> str | None:
    """Only groups in which every response has some tokens."""
    return None if all(s.rollout.n_made > 2 for s in samples) else DropReason.TOO_SHORT


def keep_all('''
TRIED = """
from types import SimpleNamespace as S
from actors.filter.judges import kept_reason, no_short
from bus.ledger import accounts_of, dropped
from bus.messages.reasons import meaning
reason = kept_reason(no_short([S(rollout=S(n_made=1))]), set())
table = accounts_of(dropped(reason, 2, 2)).rows("reason")
print(table[1], meaning(reason))
"""

WRITTEN = "from tests.floors.test_closed import *; test_a_table_of_the_documentation_is_what_is_declared('drop reasons')"


def test_a_new_drop_reason_takes_a_declaration_a_line_that_gives_it_and_a_made_row(tmp_path: Path) -> None:
    """Two places by hand, the third by UPDATE_DOCS=1: in a copy of the tree, whose ledger, meaning and glossary then have it."""
    skip = shutil.ignore_patterns("__pycache__", "*.png", "*.svg", "measurements")
    for folder in ("bus", "actors", "docs", "tests/floors"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skip)
    for file, old, new in (("bus/messages/reasons.py", DECLARED, NEW), ("actors/filter/judges.py", JUDGED, NEW_JUDGE)):
        text = (tmp_path / file).read_text()
        assert text.count(old) == 1
        (tmp_path / file).write_text(text.replace(old, new))

    def python(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", **more}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    tried = python("-c", TRIED)
    assert tried.stdout == "('dropped: too_short', {'samples': 2, 'tokens': 2}) a response has fewer than three tokens\n", (
        tried.stderr
    )
    rows = python("-c", WRITTEN, UPDATE_DOCS="1")
    assert rows.returncode == 0, rows.stderr
    glossary = (tmp_path / "docs" / "glossary.md").read_text()
    assert "| `too_short` | A response has fewer than three tokens. | A longer minimum. |" in glossary
