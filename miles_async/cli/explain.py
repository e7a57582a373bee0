"""`miles-async train --explain FLAG`: all that its one declaration, the rules and the table of Miles' flags say of a flag."""

from __future__ import annotations

import re
import textwrap
from types import CodeType, FunctionType
from typing import Any

from miles_async.cli.flags import WIDTH, default_text, usage
from miles_async.settings.catalog import FieldSpec, catalog, names, passed_on
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.flat import Flat
from miles_async.settings.meant import MEANT, UNLIKE
from miles_async.settings.miles import NOT_HERE, fate

MARGIN = 14


def explain(word: str) -> str:
    """One line or several. SettingsError for what is no flag, ours or Miles'."""
    name = word.strip().removeprefix("--").replace("-", "_").lower()
    flag = "--" + name.replace("_", "-")
    spec = names().get(name) or names().get(name.removeprefix("no_"))
    if spec is None and (passed_on(flag) or fate(flag) != f"refused: {NOT_HERE}"):
        return f"{flag}: {fate(flag)}"
    if spec is None:
        why = f"{word} is no flag"
        raise SettingsError(why, remedy=nearest(name, names()) or "train --help WORD looks in meanings too.")
    rows = [
        ("", spec.text),
        ("value", spec.expected + (f", in {spec.unit}" if spec.unit else "") + ("; or none" if spec.optional else "")),
        ("default", default_text(spec)),
        ("in a file", f"[{spec.group}] {spec.name}"),
        ("while it runs", _live(spec)),
        ("others follow", ", ".join(other.name for other in catalog().values() if mentions(other.derived, spec.name))),
        ("rules", "; ".join(rules_on(spec.name))),
        ("in Miles", _in_miles(spec)),
    ]
    return "\n".join([usage(spec), *(_row(*row) for row in rows if row[1])])


def mentions(text: str, name: str) -> bool:
    """Whether a name stands in a text as a word."""
    return re.search(rf"\b{name}\b", text) is not None


def _row(head: str, text: str) -> str:
    indent = " " * (MARGIN + 2)
    first = f"  {head:<{MARGIN}}" if head else "  "
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=indent if head else "  ", break_on_hyphens=False)


def _live(spec: FieldSpec) -> str:
    if spec.follows:
        return f"follows from others ({spec.derived})"
    how = f"miles-async tune {spec.name}=VALUE, from the {spec.live} on" if spec.live else "fixed"
    return how + ("; it stays off the bus" if spec.secret else "")


def _in_miles(spec: FieldSpec) -> str:
    aliases = ", ".join("--" + alias.replace("_", "-") for alias in spec.aliases)
    also = f"; also {aliases}" if aliases else ""
    if spec.ours or spec.kind == "table":
        return f"no such flag{also}"
    said = next((f"--from-miles sets {one.text}" for one in MEANT if one.field == spec.name and one.words), "")
    said = said or (f"left out, {UNLIKE[spec.name]}" if spec.name in UNLIKE else "")
    return fate(spec.flag).replace("`", "").replace("the same", "the same flag") + also + (f"; {said}" if said else "")


def rules_on(name: str) -> list[str]:
    """Rules between settings that look at a setting, in words: their functions' names, and where they stand."""
    from miles_async.settings.rules import RULES

    found = [rule for rule in RULES if isinstance(rule, FunctionType) and name in _looked_at(rule, set())]
    return [f"{rule.__name__.replace('_', ' ')} ({rule.__module__.rpartition('.')[2]}.py)" for rule in found]


def _looked_at(function: FunctionType, seen: set[Any]) -> set[str]:
    """Names and texts in a function, in what it calls of its own package, and in the properties of `Flat` that it asks."""
    if function in seen:
        return set()
    seen.add(function)
    words = _words(function.__code__)
    for word in list(words):
        called = function.__globals__.get(word)
        asked = getattr(Flat.__dict__.get(word), "fget", None)
        for inner in (called, asked):
            if isinstance(inner, FunctionType) and inner.__module__.startswith("miles_async.settings"):
                words |= _looked_at(inner, seen)
    return words


def _words(code: CodeType) -> set[str]:
    found, constants = set(code.co_names), list(code.co_consts)
    for constant in constants:
        if isinstance(constant, CodeType):
            found |= _words(constant)
        elif isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            constants += constant
    return found
