"""Commands of a script of bash, one at a time, read and not run: what they set, print and start.

Reads  what a script sources, and the model file that it names    Writes  nothing
Always true: no process is started; a command that is not read makes unread what it sets or prints, and is told.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_async.settings import bash_tree as tree
from miles_async.settings.bash import Token
from miles_async.settings.bash_assign import Assignments, Status
from miles_async.settings.bash_pure import PRINTING, Decider, Item, printed
from miles_async.settings.bash_pure import joined as led
from miles_async.settings.bash_words import ARCHITECTURE, Variables, Word, joined, merged, place
from miles_async.settings.errors import SettingsError, parsed
from miles_async.settings.model_file import find_above, model_words

PROGRAMS = ("train.py", "train_async.py")
MOST_FILES = 32
DEEPEST = 40  # functions, substitutions and files in one another
DECLARE = ("export", "declare", "typeset", "local", "readonly")
QUIET = (
    "set",
    "shopt",
    "wait",
    "shift",
    "trap",
    "umask",
    "ulimit",
    "let",
    "echo",
    "printf",
    "command",
    "grep",
    "test",
)  # nothing is lost where these are not run
STARTS_NONE = ("pkill", "pgrep", "kill", "grep", "ls", "rm", "cp", "chmod", "which", "cat", "tail", "git")
MODEL_PROGRAM = "model_args_utils.py"  # of Miles: prints what MODEL_ARGS holds for the model that it is given


@dataclass(slots=True)
class ScriptCommands:
    """What a script gives to `program`. `environment`: variables that it sets for it. `notes`: what was not run or not found."""

    program: str = ""
    where: str = ""
    words: list[Word] = field(default_factory=list)
    environment: dict[str, Word] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Left(Exception):
    """The script, a function or a pass of a loop is left. kind: exit, return, break, continue."""

    def __init__(self, kind: str, where: str) -> None:
        super().__init__(kind)
        self.kind, self.where = kind, where


class Commands(Assignments):
    """Follows one command at a time. Each method of a command returns whether it succeeds, None where only a shell knows. What is
    sourced, and what commands hold commands, are the subclass's."""

    def __init__(self, path: Path, arguments: tuple[str, ...], environ: Mapping[str, str]) -> None:
        super().__init__(path, arguments, environ)
        self.script, self.starts, self.not_run = ScriptCommands(), list[str](), dict[str, list[str]]()
        self.files, self.depth = 0, 0
        self.functions: dict[str, tuple[tree.Node, str]] = {}
        self.out: list[Word] | None = None  # what is printed, where somebody reads it
        self.left: list[tuple[str, Variables]] = []
        """Where a branch that is not decided leaves a loop or a function: how, and what holds then."""

    def file(self, path: Path) -> None:
        raise NotImplementedError

    def body(self, body: tree.Body, file: str) -> Status:
        raise NotImplementedError

    def node(self, node: tree.Node, file: str) -> Status:
        raise NotImplementedError

    def apart(self, run: Callable[[], Status]) -> Status:
        raise NotImplementedError

    # -- one command -------------------------------------------------------------------------------------------------

    def items(self, tokens: tuple[Token, ...], file: str) -> list[Item]:
        return [(token.text, token.text) if token.parts is None else self.item(token, file) for token in tokens]

    def item(self, token: Token, file: str) -> Item:
        """A word of `[[` or a pattern: its text, and the text again where no part of it stands in quotes."""
        text = self.whole(token, file).known
        return text, "" if text is None or any(part.quoted for part in token.parts or ()) else text

    def simple(self, node: tree.Simple, file: str) -> Status:
        own = [token for token in node.words if token.assigned is not None]
        if len(own) == len(node.words):
            statuses = [self.assign(token, file) for token in own]
            return None if None in statuses else True
        at = next(i for i, token in enumerate(node.words) if token.assigned is None)
        words = [word for token in node.words[at:] for word in self.fields(token, file)]
        if not words:
            return True
        prefix = {t.assigned[1]: self.value(t, file)[:1] or [Word("", file)] for t in node.words[:at] if t.assigned}
        name = words[0].known or words[0].text
        program = next((i for i, word in enumerate(words) if Path(word.text).name in PROGRAMS), 0)
        if name in DECLARE:
            return self.declare(name, node.words[at + 1 :], file)
        if program and name not in STARTS_NONE and name not in PRINTING - {"python3", "python"}:
            self._start(words, program, {key: value[0] for key, value in prefix.items()})
            return True
        kept = {key: (self.now.values.get(key), key in self.now.exported) for key in prefix}
        given = self.given
        for key, value in prefix.items():
            self.put(key, value)
            self.now.exported[key] = None
        if node.given:
            sign, token = node.given[-1]
            word = self.whole(token, file)
            self.given = None if sign == "<" else joined([word, Word("\n", file)], "") if sign == "<<<" else word
        out = self.out
        if node.written:
            self.out = None if out is None else []
            if node.written not in ("&", "/dev/null") and name in PRINTING:
                self._not_run(f"{name} > {node.written}", node.line)
        try:
            return self._called(name, words, node, file)
        finally:
            self.given, self.out = given, out
            for key, (value_before, exported) in kept.items():
                if value_before is None:
                    self.now.values.pop(key, None)
                else:
                    self.now.values[key] = value_before
                if not exported:
                    self.now.exported.pop(key, None)

    def _called(self, name: str, words: list[Word], node: tree.Simple, file: str) -> Status:
        rest, line = words[1:], node.line
        texts = [word.known for word in rest]
        where = place(file, line)
        known = [text for text in texts if text is not None]
        builtin: dict[str, Callable[[], Status]] = {
            "eval": lambda: self._texts(rest, name),
            "source": lambda: self._source(rest),
            ".": lambda: self._source(rest),
            "read": lambda: self.read(rest),
            "unset": lambda: self.unset(known),
            "cd": lambda: self._cd(texts),
            "[": lambda: Decider(list(zip(texts[:-1], [text or "" for text in texts[:-1]], strict=True)), double=False).decide(),
            "test": lambda: Decider(list(zip(texts, [text or "" for text in texts], strict=True)), double=False).decide(),
            "shift": lambda: self._shift(known),
        }
        if name in ("exit", "return", "break", "continue"):
            raise Left(name, f"`{name}` ({where})")
        if name in self.functions:
            return self._function(name, rest)
        if name in builtin:
            return builtin[name]()
        if name in ("bash", "sh") and len(words) == 3 and words[1].text in ("-c", "-lc"):
            return self._texts(words[2:], name)
        if name == "ray" and "--" in texts and (tail := words[texts.index("--") + 2 :]) and tail[0].text in ("bash", "sh"):
            return self._called(tail[0].text, tail, node, file)
        if name in ("mapfile", "readarray") or [name, *known[:1]] == ["printf", "-v"]:
            return self.into(name, rest, where)
        return self._program(name, words, line, where)

    def _program(self, name: str, words: list[Word], line: int, where: str) -> Status:
        """A program: its output, where that is known and somebody reads it."""
        texts = [word.known for word in words[1:]]
        if Path(name).name in ("python", "python3") and Path(texts[0] or "").name == MODEL_PROGRAM if texts else False:
            word = self._model(words[1:], where)
            self._print(word)
            return None if word.unread else True
        if name == "pwd" and not [text for text in texts if text not in ("-L", "-P")]:
            folder = os.path.realpath(self.now.folder) if "-P" in texts and self.now.folder else self.now.folder
            self._print(Word(folder + "\n", where, "" if folder else "the folder is known to a shell alone"))
            return True
        if name in ("realpath", "readlink") and None not in texts:
            plain = [text for text in texts if text not in ("-f", "-m", "-e", "-s", "--")]
            if len(plain) == 1 and plain[0] and self.now.folder and (name == "realpath" or "-f" in texts):
                self._print(Word(os.path.realpath(led(self.now.folder, plain[0])) + "\n", where))
                return True
        if name == "cat" and not texts and self.given is not None:
            self._print(self.given)
            return True
        given = self.given.known if self.given is not None else None
        found = None if None in texts else printed(name, [text for text in texts if text is not None], given)
        if found is not None:
            bare = next((word.unread for word in words if word.unread), "")
            self._print(Word(found[0], where, bare, found[0] if bare else None))
            return found[1]
        if self.out is not None:
            why = next((word.unread for word in words[1:] if word.unread), "") if name in PRINTING else ""
            self._print(Word(f"`{name}`", where, why or f"`{name}` is not run"))
        elif name not in QUIET:
            self._not_run(" ".join(word.text for word in words[: 1 + (name == "ray")]), line)
        return True if name in QUIET else None

    def _not_run(self, what: str, line: int) -> None:
        at = self.not_run.setdefault(what, [])
        at += [] if f"line {line}" in at else [f"line {line}"]

    def _print(self, word: Word) -> None:
        if self.out is not None:
            self.out.append(word)

    def _model(self, words: list[Word], where: str) -> Word:
        """What Miles' own program prints for a model: read from the model file, which is not run."""
        names = [word.known for word in words[1:]]
        if len(names) != 1 or not names[0]:
            return Word("`python3`", where, next((word.unread for word in words if word.unread), "its model is not named"))
        program = Path(led(self.now.folder or "/", words[0].known or ""))
        folders = [parent / "scripts" / "models" for parent in program.parents] if words[0].known else []
        exported = {name: self.now.values[name][0].known for name in self.now.exported if self.now.values.get(name)}
        text, why = model_words(names[0], [*folders, *find_above(self.path)], {**self.environ, **exported})
        if why:
            self.notes.append(f"{where}: what {ARCHITECTURE} holds is left out: {why}; config.json says the same")
        return Word(text + "\n" if not why else f"${ARCHITECTURE}", where, why)

    def _texts(self, words: list[Word], name: str) -> Status:
        """Read the commands that the words of `eval`, or of another shell, hold. That one knows what is exported alone."""
        if not words:
            return True
        text = joined(words, " ")
        starts = any(program in text.text for program in PROGRAMS)
        if self.files >= MOST_FILES or (text.known is None and not starts):
            self.not_run.setdefault(name, []).append(f"line {text.where.rpartition(':')[2]}")
            return None
        self.files += 1
        # where a variable is not known it stands as written, and is unread again
        body = tree.parse(text.text, text.where.partition(":")[0])
        file = text.where
        if name == "eval":
            return self.body(body, file)

        def other() -> Status:
            self.now.values = {known: value for known, value in self.now.values.items() if known in self.now.exported}
            return self.body(body, file)

        return self.apart(other)

    def _function(self, name: str, arguments: list[Word]) -> Status:
        body, file = self.functions[name]
        if self.depth >= DEEPEST:
            return None
        before, self.arguments = self.arguments, arguments
        self.depth += 1
        self.local.append({})
        try:
            return self.returning(lambda: self.node(body, file), f"the function {name}")
        finally:
            for variable, words in self.local.pop().items():
                if words is None:
                    self.now.values.pop(variable, None)
                else:
                    self.now.values[variable] = words
            self.depth -= 1
            self.arguments = before

    def returning(self, run: Callable[[], Status], what: str) -> Status:
        """Run a function or a file, which `return` leaves."""
        outer, self.left = self.left, []
        status: Status = None
        try:
            status = run()
        except Left as left:
            if left.kind == "exit":
                raise
        finally:
            mine, self.left = self.left, outer
        if mine:
            self.now, _ = merged([self.now, *(then for _, then in mine)], what)
            return None
        return status

    # -- where it goes on -----------------------------------------------------------------------------------------------

    def _cd(self, texts: list[str | None]) -> Status:
        """Taken to succeed: a script goes on where its folders are there."""
        where = [text for text in texts if text not in ("--", "-P", "-L")]
        folder = where[0] if len(where) == 1 else None
        known = folder is not None and folder != "-" and (folder.startswith("/") or bool(self.now.folder))
        self.now.folder = led(self.now.folder, folder) if known and folder is not None else ""
        if known and "-P" in texts:
            self.now.folder = os.path.realpath(self.now.folder)
        return True

    def _shift(self, texts: list[str]) -> Status:
        number = int(texts[0]) if texts and texts[0].isdigit() else 1
        if number > len(self.arguments):
            return False
        self.arguments = self.arguments[number:]
        return True

    def _source(self, rest: list[Word]) -> Status:
        """Read a sourced file: where the script says, or else in the folders above the script."""
        if not rest:
            return None
        word = rest[0]
        said = word.known
        if said is not None and self.now.folder and Path(led(self.now.folder, said)).is_file():
            self.file(Path(led(self.now.folder, said)) if not said.startswith("/") else Path(said))
            return True
        tail = Path(re.split(r"\$\w+|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`", said or word.text)[-1].lstrip("/"))
        model = tail.parent.name == "models"
        folder = self.path.resolve().parent
        places = [folder / tail, folder.parent / tail, folder / tail.name] if tail.name else []
        places += [above / tail.name for above in find_above(self.path)] if model else []
        file = next((place for place in places if place.is_file()), None)
        if file is not None:
            if said is not None:
                self.notes.append(f"{word.where}: {word.text} is not there; read instead: {file}")
            self.file(file)
            return True
        why = f"no such file, nor in the folders above the script; {ARCHITECTURE} may be left out" if model else (
            "no such file, nor beside the script"
        )  # fmt: skip
        self.notes.append(f"{word.where}: {word.text} is not read: {why}")
        if not model:
            self.now.lost = (*self.now.lost, word.text)
        return None

    # -- the start ---------------------------------------------------------------------------------------------------

    def _start(self, words: list[Word], program: int, prefix: dict[str, Word]) -> None:
        """The command that starts training. With `ray job submit` the job's environment is its own."""
        self.starts.append(words[program].where)
        script = self.script
        script.program, script.where = Path(words[program].text).name, words[program].where
        script.words = words[program + 1 :]
        texts = [word.text for word in words[:program]]
        at = next((i for i, text in enumerate(texts) if text.startswith("--runtime-env-json")), None)
        if texts[:1] != ["ray"] or at is None:
            known = {name: self.now.values[name][0] for name in self.now.exported if self.now.values.get(name)}
            script.environment = {} if texts[:1] == ["ray"] else known | prefix
            return
        given = words[at] if "=" in texts[at] else words[at + 1]
        text = given.text if given.known is None else given.known
        text = text.partition("=")[2] if given is words[at] else text
        try:
            variables: Any = parsed(json.loads, text).get("env_vars", {})
            script.environment = {
                str(name): Word(str(value), given.where, given.unread if "$" in str(value) else "")
                for name, value in variables.items()
            }
        except (ValueError, AttributeError) as error:
            if given.known is None:
                script.notes.append(f"{given.where}: the environment of the job is not known: {given.unread}")
                return
            problem = f"{given.where}: --runtime-env-json is no JSON object: {error}"
            raise SettingsError(problem, remedy="Correct it.") from None
