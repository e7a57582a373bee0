"""What the documentation names exists: files, functions, links, commands; each term is defined once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import get_args

from bus.messages.events import EventKind
from miles_async.cli.app import COMMANDS
from miles_async.console.doctor.finding import Rule
from tests.floors.tree import PACKAGES, ROOT, each, parse, sources

PAGES = sorted(path.relative_to(ROOT) for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))
HABITS = (Path("CHANGELOG.md"), Path("SECURITY.md"))  # read by themselves, in words that anybody knows
NAMED = re.compile(r"`((?:actors|bus|miles_async|scripts|tests|configs|docker)/[\w./*-]+)(?::(?::)?([\w.]+))?")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
ROW = re.compile(r"^\| (?P<first>[^|]+) \|", re.MULTILINE)


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def defines(path: str, name: str) -> bool:
    """Whether a Python file defines `name` or `Class.name` at its top level."""
    body: list[ast.stmt] = parse(Path(path)).body
    for part in name.split("."):
        found = next((node for node in body if part in _names(node)), None)
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each(lambda: PAGES)
def test_every_file_and_function_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for path, name in NAMED.findall(text_of(page)):
        there = any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()
        if not there or (name and path.endswith(".py") and not path.startswith("tests/") and not defines(path, name)):
            missing.append(f"{path}:{name}")
    assert not missing


MADE = ("flags.md", "flags-of-miles.md")  # by scripts/docs_site.py, when the site is built


@each(lambda: PAGES)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(text_of(page)):
        to = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        if to.name in MADE:
            continue
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to.relative_to(ROOT))):
            broken.append(target + anchor)
    assert not broken


@each(lambda: [p for p in PAGES if p.name != "glossary.md" and p not in HABITS])
def test_every_page_leads_to_the_glossary(page: Path) -> None:
    assert "glossary.md" in text_of(page)


def test_each_term_is_defined_once() -> None:
    rows = [row for row in ROW.findall(text_of(Path("docs/glossary.md"))) if row.strip(" -") not in ("", "term", "reason")]
    terms = Counter(term.strip() for row in rows for term in re.sub(r"\([^)]*\)", "", row).split(","))
    assert len(terms) > 80
    assert {term: n for term, n in terms.items() if n > 1} == {}


def test_every_command_has_its_section() -> None:
    heads = re.findall(r"^## miles-async ([\w-]+)", text_of(Path("docs/command-line.md")), re.MULTILINE)
    assert sorted(heads) == sorted(command.name for command in COMMANDS)


def test_events_that_the_pages_name_are_declared() -> None:
    pages = "".join(text_of(page) for page in PAGES)
    named = {" ".join(kind.split()) for kind in re.findall(r"events? `([^`]+)`", pages)}
    stems = tuple(kind for kind in EventKind if kind.tail)
    assert len(named) > 5 and [kind for kind in sorted(named - set(EventKind)) if not kind.startswith(stems)] == []


def test_the_diagnosis_page_has_every_rule_and_no_other() -> None:
    told = re.findall(r"^\| `([^`]+)` \| (?:error|warning|info)", text_of(Path("docs/troubleshooting.md")), re.M)
    assert sorted(told) == sorted(get_args(Rule))


def test_the_results_fit_a_sitting_and_every_measurement_is_cited() -> None:
    """Older figures stand in the history, and what nobody cites with them."""
    assert len(text_of(Path("docs/results.md")).splitlines()) <= 300
    cited = "".join(text_of(path) for path in (*PAGES, *sources("tests", "scripts", *PACKAGES)))
    kept = {path.name for path in (ROOT / "docs" / "measurements").iterdir()}
    assert {name for name in kept if name not in cited} == set()
