"""A recipe of Miles in Python, run in the sandbox for code of others: the words that it would have given to train.py.

Reads  the recipe, the modules beside it and above that it imports, and the model file that it names    Writes  nothing
In the sandbox stand `recipe_child.py` and its stand-ins for Miles' launch helpers. Always true: outside the sandbox nothing of a
recipe runs; without a sandbox it is refused.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from actors.runtime.confine import OURS
from actors.runtime.sandbox import Ran, Sandbox, SandboxUnavailable
from miles_async.cli import recipe_absent, recipe_child, recipe_typer
from miles_async.settings.bash_words import ARCHITECTURE
from miles_async.settings.errors import SettingsError
from miles_async.settings.model_file import find_above, model_words
from miles_async.settings.script import ScriptCommands, Word, read_text

MOST_SOURCES, MOST_CHARACTERS = 64, 1 << 21
DEADLINE_S = 20.0
OUTPUT_BYTES = 1 << 21
MEMORY_BYTES = 1 << 30
MOST_ROUNDS = 5
BOOT = """
import json, sys, types
order = json.loads(sys.stdin.read())
for name, text in order["ours"].items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main(order)
"""
"""Makes modules of our own texts in the sandbox, which has no way to our files, and runs the last one."""
OF_HELPERS = (
    "WANDB_API_KEY", "GITHUB_COMMIT_NAME", "SLURM_JOB_NUM_NODES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG",
    "MILES_TEST_ENABLE_INFINITE_RUN",
)  # fmt: skip
"""Variables that Miles' helpers read; besides these a recipe is given those that its sources name."""
STAND_INS = (
    "typer",
    "miles.utils.external_utils.command_utils",
    "miles.utils.external_utils.exec_command",
    "miles.utils.typer_utils",
)


class Train(TypedDict):
    """One launch."""

    line: int
    words: str
    program: str
    set: dict[str, str]
    model: str | None
    environment: dict[str, str]


class RecipeAnswer(TypedDict):
    """What comes out of the sandbox: the recipe may have written it itself, so it is checked."""

    trains: list[Train]
    said: str
    asked: list[str]
    not_run: list[tuple[str, int]]


_ABSENT = re.compile("\ue000([^\ue001]*)\ue001")


def read_recipe(path: Path, environ: Mapping[str, str] | None = None, arguments: tuple[str, ...] = ()) -> ScriptCommands:
    """What the recipe at `path`, given `arguments`, would give to train.py. SettingsError when it cannot be run here, or launches
    none or several."""
    environ = os.environ if environ is None else environ
    text = _text(path)
    sources = _sources(path, text)
    names = set(OF_HELPERS) | {
        word for _, source in [("", text), *sources.values()] for word in re.findall(r"[A-Za-z_]\w+", source)
    }
    root = next((parent for parent in path.resolve().parents if (parent / "train.py").is_file()), path.resolve().parent)
    order: dict[str, Any] = {
        "path": str(path.resolve()), "root": str(root), "text": text, "sources": sources, "arguments": arguments,
        "environ": {name: value for name, value in environ.items()
                    if (name in names or name.startswith("MILES_SCRIPT_")) and not name.startswith(OURS)},
        "files": {}, "folder": os.getcwd(),
        "ours": {module.__name__: _text(Path(str(module.__file__))) for module in (recipe_absent, recipe_typer, recipe_child)},
    }  # fmt: skip
    try:
        answer = asyncio.run(_asked(path, order))
    except SandboxUnavailable as error:
        raise SettingsError(
            f"{path} is Python, which is run in a sandbox alone: {error}",
            remedy="Give its flags behind `miles-async train`.",
        ) from None
    return _script(path, answer, environ)


async def _asked(path: Path, order: dict[str, Any]) -> RecipeAnswer:
    """The recipe's answer, when it knows of each file that it asks for whether it is there."""
    async with Sandbox(width=1, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES, deadline_s=DEADLINE_S) as sandbox:
        for _ in range(MOST_ROUNDS):
            answer = _answer(path, await sandbox.run(BOOT, stdin=json.dumps(order)))
            there = {name: "file" if os.path.isfile(name) else "folder" for name in answer["asked"] if os.path.exists(name)}
            if not there:
                return answer
            order["files"] |= {name: there.get(name, "") for name in answer["asked"]}
    raise SettingsError(f"{path} asks for ever more files", remedy="Give its flags behind `miles-async train`.")


def _answer(path: Path, ran: Ran) -> RecipeAnswer:
    _, mark, said = ran.stdout.rpartition(recipe_child.MARK)
    if ran.cause != "ok" or not mark:
        last = (ran.stderr.strip().splitlines() or [""])[-1][:200]
        said = f"{ran.cause} after {ran.seconds:.0f} s{f', {last}' if last else ''}"
        raise SettingsError(
            f"{path} did not come to its end in the sandbox: {said}",
            remedy="Give its flags behind `miles-async train`.",
        )
    try:
        plain = json.dumps(json.loads(said), ensure_ascii=False).encode(errors="replace")  # halves of surrogate pairs go
        answer = msgspec.json.decode(plain, type=RecipeAnswer)
        for train in answer["trains"]:
            for name, value in (train["environment"] | train["set"]).items():
                if "\0" in name + value or "=" in name or not name:
                    raise ValueError(f"no process can have the variable {name[:40]!r} that it gives")
            if "\0" in train["words"] + train["program"]:
                raise ValueError("no process can have a word with a NUL in it")
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path} does not say what it launches: {error}", remedy="Give its flags behind `miles-async train`."
        ) from None
    return answer


def _script(path: Path, answer: RecipeAnswer, environ: Mapping[str, str]) -> ScriptCommands:
    """The words of the one train that a recipe would launch."""
    trains, said = answer["trains"], _ABSENT.sub(r"\1", answer["said"])
    if len(trains) != 1:
        what = f"{path} launches no train"
        remedy = "Give what it needs: arguments as --from-miles 'RECIPE ARGUMENT ...', variables in the environment."
        if trains:
            lines = dict.fromkeys(str(train["line"]) for train in trains)
            what = f"{path} launches {len(trains)} trains (line {', '.join(lines)})"
            remedy = "Give arguments with which it launches one, as --from-miles 'RECIPE ARGUMENT ...'."
        raise SettingsError(f"{what}{f': {said}' if said else ''}", remedy=remedy)
    train = trains[0]
    where = f"{path.name}:{train['line']}"
    notes = [f"{path.name}: after the launch: {said}"] if said else []
    model = ""
    if train["model"] is not None:
        text, why = model_words(train["model"], find_above(path), {**environ, **train["set"]})
        model = " ".join(map(shlex.quote, text.split()))
        if why:
            notes.append(f"{where}: what {ARCHITECTURE} holds is left out: {why}; config.json says the same")
    absent: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        absent.setdefault(found[1], f"ABSENT{len(absent)}_")
        return absent[found[1]]

    line = _ABSENT.sub(named, train["words"])
    script = read_text(f"python3 train.py {model} {line}", where, environ)
    script.program, script.where = train["program"], where
    script.words = [_unread(word, absent) for word in script.words]
    script.environment = {
        name: _unread(Word(_ABSENT.sub(named, value), where), absent) for name, value in train["environment"].items()
    }
    script.notes += notes
    skipped: dict[str, list[str]] = {}
    for what, at in answer["not_run"]:
        name = " ".join(what.split()[: 2 if what.startswith(("ray ", "hf ", "write ")) else 1])
        places = skipped.setdefault(name, [])
        places += [f"line {at}"] if f"line {at}" not in places else []
    if skipped:
        script.notes.append("not run: " + ", ".join(f"{name} ({', '.join(at)})" for name, at in skipped.items()))
    return script


def _unread(word: Word, absent: dict[str, str]) -> Word:
    """A word of which a part is not there says so."""
    for name, mark in absent.items():
        if mark in word.text:
            return word._replace(text=word.text.replace(mark, f"<{name}>"), unread=f"{name} is not there in the sandbox")
    return word


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"cannot read {path}: {why}", remedy="Give a launch script.") from None


def _sources(path: Path, text: str) -> dict[str, tuple[str, str]]:
    """Modules that the recipe imports and that stand in its folder or those above: name -> (path, text). Those past the limits
    are left out, and absent."""
    found: dict[str, tuple[str, str]] = {}
    folders = list(path.resolve().parents)
    waiting = [("", text)]
    size = 0
    while waiting:
        package, source = waiting.pop(0)
        for name in _imported(source, package):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                part = ".".join(parts[:end])
                if part in found or part in STAND_INS or parts[0] in sys.stdlib_module_names:
                    continue
                file = _file(part, folders)
                if file is None or len(found) >= MOST_SOURCES:
                    continue
                try:
                    inner = file.read_text("utf-8")
                except (OSError, UnicodeDecodeError):
                    continue
                size += len(inner)
                if size > MOST_CHARACTERS:
                    continue
                found[part] = (str(file), inner)
                waiting.append((part if file.name == "__init__.py" else part.rpartition(".")[0], inner))
    return found


def _file(name: str, folders: list[Path]) -> Path | None:
    tail = name.replace(".", "/")
    places = (folder / one for folder in folders for one in (f"{tail}.py", f"{tail}/__init__.py"))
    return next((place for place in places if place.is_file()), None)


def _imported(source: str, package: str) -> list[str]:
    """The names of modules that a source may import, nearest first; of a source that is no Python none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
    return list(dict.fromkeys(names))
