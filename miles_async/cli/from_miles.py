"""`miles-async train --from-miles run.sh`: the flags that a launch script of Miles gives to train.py, and what became of each.

Reads  the script (`settings/script.py`; it is not run)    Writes  nothing
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from actors.generation.engines.records import DEFAULT, ENGINES, OF_MILES
from miles_async.cli.flags import Parsed, parse_flags
from miles_async.cli.on_torch import instead
from miles_async.settings.bash_words import ARCHITECTURE
from miles_async.settings.catalog import PREFIXES, names, passed_on
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.load import FlagValue
from miles_async.settings.meant import Said, meant
from miles_async.settings.miles import NOT_COMPARED, OTHERWISE, fate, needless
from miles_async.settings.script import ScriptCommands, Word, read_script

FLAG = "--from-miles"
SHOWN = 44  # characters of a flag with its values
NOT_TAKEN = {
    "PYTHONPATH": "packages of this Python and of the current folder are found",
    "MASTER_ADDR": "the launcher chooses it",
    "MASTER_PORT": "the launcher chooses it",
}
"""Variables that a script of Miles sets for its job -> why they are not set here."""


class Taken(NamedTuple):
    """A command line without its script, the script's settings flags, and what to tell the user."""

    words: list[str]
    values: tuple[FlagValue, ...] = ()
    told: tuple[str, ...] = ()


class _Flag(NamedTuple):
    """A flag in the script with its values."""

    word: Word
    values: list[Word]

    @property
    def unread(self) -> str:
        return next((f"{word.unread} ({word.where})" for word in (self.word, *self.values) if word.unread), "")

    @property
    def name(self) -> str:
        return self.word.text.partition("=")[0]

    @property
    def shown(self) -> str:
        spec = names().get(self.name.removeprefix("--").replace("-", "_"))
        if spec is not None and spec.secret:
            return f"{self.name} ***"
        return textwrap.shorten(" ".join(word.text for word in (self.word, *self.values)), SHOWN, placeholder=" ...")


def take_script(words: list[str], refused: Refusals, switches: frozenset[str]) -> Taken:
    """The flags of the script that a command line names; what cannot be taken is left in `refused`. What the command line itself
    gives counts instead of what the script gives. SettingsError for a script that cannot be read at all."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == FLAG), None)
    if at is None:
        return Taken(words)
    _, equals, path = words[at].partition("=")
    path = path if equals else words[at + 1] if at + 1 < len(words) else ""
    rest = words[:at] + words[at + 1 + (not equals) :]
    if not path or path.startswith("--"):
        raise SettingsError(f"{FLAG} needs a value", remedy="It takes the path of a launch script.")
    path, *arguments = _with_arguments(path)
    if path.endswith(".py"):
        from miles_async.cli.recipe import read_recipe

        script = read_recipe(Path(path), arguments=tuple(arguments))
    else:
        script = read_script(Path(path), arguments=tuple(arguments))
    own = parse_flags(rest, switches, Refusals())
    flags = list(_flags(script, refused))
    known, rows = list[str](), list[tuple[str, str, str]]()
    for flag in flags:
        became, use = _outcome(flag, own, refused)
        rows.append((flag.shown, became, flag.word.where))
        known += [flag.word.text, *(word.text for word in flag.values)] if use else []
    parsed = parse_flags(known, frozenset(), refused)
    said = Said.of(script.program, (*parsed.values, *own.values), [flag.name for flag in flags] + rest)
    ours, left = instead(said, meant(said), parsed.values)
    rows = [(shown, left.get(re.split("[ =]", shown, maxsplit=1)[0], became), where) for shown, became, where in rows]
    hint = "Quote a value that holds a space; give each flag one value."
    refused.found += [SettingsError(f"{path}: {word!r} belongs to no flag", remedy=hint) for word in parsed.positional]
    rows += [("", one.text, "") for one in ours]
    head = f"{path}: {len(flags)} flags of {script.program}, at {script.where}"
    values = (*(one.value for one in ours if one.words), *(value for value in parsed.values if value.typed not in left))
    return Taken(rest, values, (head, *_table(rows), *_beside(script)))


def _with_arguments(said: str) -> list[str]:
    """A script and the arguments that it is given: `run.sh` or, quoted as one word, `run.sh p2p 0`."""
    if " " not in said or Path(said).is_file():
        return [said]
    try:
        return shlex.split(said)
    except ValueError as error:
        raise SettingsError(f"{FLAG} {said!r}: {error}", remedy="Quote its arguments as a shell would have them.") from None


def _flags(script: ScriptCommands, refused: Refusals) -> Iterator[_Flag]:
    now: _Flag | None = None
    for word in script.words:
        if word.text.startswith("--"):
            if now is not None:
                yield now
            now = _Flag(word, [])
        elif word.text == f"${ARCHITECTURE}":
            if not any(ARCHITECTURE in note for note in script.notes):
                said = f"what {ARCHITECTURE} holds is left out: {word.unread}; config.json says the same"
                script.notes.append(f"{word.where}: {said}")
        elif now is not None and (not word.unread or _takes_one_more(now)):
            now.values.append(word)
        elif word.unread.endswith("is set nowhere") and word.text == word.unread.split()[0]:
            script.notes.append(f"{word.where}: {word.unread}, and stands for nothing")
        else:
            why = f"may hold flags: {word.unread}" if word.unread else "stands before the first flag"
            remedy = "Take it out of the script, and give what it holds behind it."
            refused.found.append(SettingsError(f"{word.where}: {word.text} {why}", remedy=remedy))
    if now is not None:
        yield now


def _takes_one_more(flag: _Flag) -> bool:
    spec = names().get(flag.name.removeprefix("--").replace("-", "_"))
    if spec is None or spec.kind in ("list", "table"):
        return not (flag.values and flag.values[-1].unread)
    return spec.kind != "bool" and not flag.values and "=" not in flag.word.text


def _outcome(flag: _Flag, own: Parsed, refused: Refusals) -> tuple[str, bool]:
    """What became of a flag, and whether its words are used."""
    name, spec = flag.name, names().get(flag.name.removeprefix("--").replace("-", "_"))
    alone = spec is not None and spec.kind != "table"
    if any(name == value.typed or (alone and value.spec is spec) for value in own.values):
        return "given on this command line, which counts", False
    engine = next((value.words[0] for value in reversed(own.values) if value.spec.name == "engine"), OF_MILES.name)
    if not ENGINES.get(engine, DEFAULT).takes_flags and not alone and (passed_on(name) or ("",))[0] in PREFIXES:
        return f"left out: this command line says --engine {engine}", False
    said = fate(name).replace("`", "")
    compared = spec is not None and spec.group == "architecture" and spec.name not in NOT_COMPARED
    if flag.unread and (compared or needless(name)):
        return f"left out: {flag.unread}", False
    if flag.unread and spec is not None and spec.secret and flag.values and flag.values[0].known == "":
        return f"left out, as an empty secret says nothing: {flag.unread}", False
    if flag.unread and said.startswith("refused"):
        return f"left out: {flag.unread}; and {said}", False
    if flag.unread:
        remedy = f"Give {name} {'VALUE' if flag.values else f'or --no-{name[2:]}'} behind the script."
        problem = f"{name} cannot be read without running the script: {flag.unread}"
        refused.found.append(SettingsError(problem, remedy=remedy))
        return f"refused: {flag.unread}", False
    if spec is not None and spec.name in OTHERWISE and name == spec.flag:
        said = f"taken; here: {said}"
    return "taken" if said == "the same" else said, True


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    width = max(len(shown) for shown, _, _ in rows)
    for shown, said, where in rows:
        yield f"  {shown:<{width}}  {said}{f'  [{where}]' if where else ''}"


def _beside(script: ScriptCommands) -> Iterator[str]:
    """The environment of the run, which is set here as the script would, and what was not run."""
    for name, word in script.environment.items():
        if name in NOT_TAKEN or word.unread:
            yield f"  {name} is not set: {word.unread or NOT_TAKEN[name]}"
        else:
            os.environ[name] = word.text
            yield f"  {name}={word.text} in the environment of the run"
    yield from (f"note: {note}" for note in script.notes)
