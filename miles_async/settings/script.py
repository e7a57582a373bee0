"""A launch script of bash, read and never run: the words that it gives to train.py, as far as they can be known.

Reads  the script, and what it sources, where that is there    Writes  nothing
Known are assignments, arrays, `${X:-default}`, `$((2 * N))`, quotes, `source`, `bash -c`, `eval`, this process's environment, and
the usual ways to say "the folder of this script". What needs a shell (substituted commands, loops, conditions, arguments of
functions) leaves the words that depend on it unread, with place and reason. The script is given no arguments. Always true: no
process is started.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from miles_async.settings.bash import SEPARATORS, Lexer, Part, Token, arithmetic
from miles_async.settings.errors import SettingsError, parsed

PROGRAMS = ("train.py", "train_async.py")
MOST_FILES = 32
ARCHITECTURE = "MODEL_ARGS"  # what a model file of Miles sets; config.json says the same
DECLARE = ("export", "declare", "typeset", "local", "readonly")
QUIET = ("set", "[", "[[", "test", "echo", "true", ":", "exit", "return")  # nothing is lost where these are not run
_HERE = r"\$(?:\{BASH_SOURCE(?:\[0\])?\}|BASH_SOURCE|\{?0\}?)"
_DIRNAME = rf"dirname (?:-- )?(?:\$\((?:realpath|readlink -f) (?:-- )?{_HERE}\)|{_HERE})"
_FOLDER = re.compile(
    rf"cd (?:-P )?(?:-- )?(?:\$\( ?{_DIRNAME} ?\)|`{_DIRNAME}`)(?P<rest>/[\w./-]*)?"
    rf"(?: (?:&>|>&|>|2>) ?/dev/null(?: 2>&1)?)? ?(?:&&|;) ?pwd(?: -P)?|{_DIRNAME}"
)


class Word(NamedTuple):
    """A word of a command, and where it stands. `unread`: why it is not known without a shell; `text` is then as written."""

    text: str
    where: str
    unread: str = ""


def _joined(words: list[Word], between: str) -> Word:
    unread = next((word.unread for word in words if word.unread), "")
    return Word(between.join(word.text for word in words), words[-1].where, unread)


@dataclass(slots=True)
class Script:
    """What a script gives to `program`. `environment`: variables that it sets for it. `notes`: what was not run or not found."""

    program: str = ""
    where: str = ""
    words: list[Word] = field(default_factory=list)
    environment: dict[str, Word] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_script(path: Path, environ: Mapping[str, str] | None = None) -> Script:
    """What the script at `path` gives to train.py. SettingsError when it cannot be read, or starts none or several."""
    reader = _Reader(path, os.environ if environ is None else environ)
    reader.file(path)
    found, script = reader.starts, reader.script
    if len(found) != 1:
        said = f"starts train.py {len(found)} times ({', '.join(found)})" if found else "starts no train.py"
        raise SettingsError(f"{path} {said}", remedy="Give a script with one `python3 train.py --flags ...`.")
    if reader.not_run:
        script.notes.append("not run: " + ", ".join(f"{name} ({', '.join(at)})" for name, at in reader.not_run.items()))
    return script


class _Reader:
    """Goes through commands in their order, and follows variables as a shell does."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self.script, self.starts, self.not_run = Script(), list[str](), dict[str, list[str]]()
        self._path, self._environ, self._files = path, environ, 0
        self._values: dict[str, list[Word]] = {}
        self._exported: dict[str, None] = {}
        self._lost: list[str] = []  # sourced files that were not read
        self._unsure = ""  # why the command that is read may not be run, or not so

    def file(self, path: Path) -> None:
        """Read one file to its end."""
        self._files += 1
        if self._files > MOST_FILES:
            raise SettingsError(f"{self._path} sources more than {MOST_FILES} files", remedy="Look for one that sources itself.")
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise SettingsError(f"cannot read {path}: {why}", remedy="Give a launch script.") from None
        self._text(text, path.name)

    def _text(self, text: str, name: str, outside: str = "") -> None:
        """Read commands. `name`: where they stand; `outside`: why they may not be run."""
        tokens = [*Lexer(text, name).tokens(), Token(0, "\n")]
        blocks: list[str] = []  # that we are in; each says why what it sets is unsure, "" where it is sure
        command: list[Token] = []
        joined, function, redirected = "", "", False
        for token, then in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
            if token.parts is not None:
                command += () if redirected else (token,)
                redirected = False
            elif token.text not in SEPARATORS:
                redirected = True
            elif token.text == "(" and then.text == ")" and len(command) == 1:
                function, command = f"the function {command[0].text}", []
            elif command:
                rest = self._enter(command, blocks, function, name)
                function = "" if rest is not command else function
                if rest:
                    self._unsure = next(filter(None, blocks), joined) or outside
                    self._command(rest, name, self._unsure)
                joined = f"what `{token.text}` joins at {name}:{token.line}" if token.text in ("&&", "||") else ""
                command = []

    def _enter(self, command: list[Token], blocks: list[str], function: str, file: str) -> list[Token]:
        """The command without the words that begin and end blocks, which are noted in `blocks`."""
        while command:
            head, line = command[0].text, command[0].line
            if head in ("if", "while", "until", "for", "select", "case"):
                if not any(blocks):
                    self.script.notes.append(f"{file}:{line}: `{head}` is not run, so what it sets is not known")
                blocks.append(f"the `{head}` at {file}:{line}")
                if head in ("for", "select") and len(command) > 1:
                    self._set(command[1].text, [Word(f"${command[1].text}", f"{file}:{line}")], blocks[-1])
                if head in ("for", "select", "case"):
                    return []
            elif head == "{":
                blocks.append(function)
            elif head == "function":
                blocks.append(f"the function {command[1].text}" if len(command) > 1 else "a function")
                return []
            elif head in ("fi", "done", "esac", "}"):
                del blocks[-1:]
            elif head not in ("then", "else", "elif", "do", "!", "time"):
                break
            command = command[1:]
        return command

    def _command(self, command: list[Token], file: str, unsure: str) -> None:
        own = [token for token in command if token.assigned is not None]
        if own == command:
            for token in own:
                self._assign(token, file, unsure)
            return
        before = next(i for i, token in enumerate(command) if token.assigned is None)
        words = [word for token in command[before:] for word in self._fields(token, file)]
        if not words:
            return
        name, line = words[0].text, command[0].line
        program = next((i for i, word in enumerate(words) if Path(word.text).name in PROGRAMS), 0)
        if name in DECLARE:
            for token in command[before + 1 :]:
                if token.assigned is not None:
                    self._assign(token, file, unsure)
                if name == "export":
                    self._exported[token.assigned[1] if token.assigned else token.text] = None
        elif program:
            prefix = {t.assigned[1]: w for t in command[:before] if t.assigned and (w := self._value(t, file)[0])}
            self._start(words, program, prefix)
        elif name == "eval" and len(words) > 1:
            self._given(words[1:], name, unsure)
        elif name in ("bash", "sh") and len(words) == 3 and words[1].text in ("-c", "-lc"):
            self._given(words[2:], name, unsure)
        elif name in ("source", ".") and len(words) > 1:
            self._source(words[1], unsure)
        elif name in ("read", "mapfile", "readarray", "unset") or [w.text for w in words[:2]] == ["printf", "-v"]:
            for word in words[1:]:
                self._set(word.text, [Word(f"${word.text}", word.where, f"`{name}` at {word.where} is not run")], "")
        elif name not in QUIET and not unsure.startswith("the `case`"):
            what = " ".join(word.text for word in words[: 1 + (name == "ray")])
            self.not_run.setdefault(what, []).append(f"line {line}")

    def _given(self, words: list[Word], name: str, unsure: str) -> None:
        """Read the commands that the words of `eval`, or of another shell, hold. That one knows what is exported alone."""
        text = _joined(words, " ")
        starts = any(program in text.text for program in PROGRAMS)
        if self._files >= MOST_FILES or (text.unread and not starts):
            self.not_run.setdefault(name, []).append(f"line {text.where.rpartition(':')[2]}")
            return
        self._files += 1
        values = self._values
        if name != "eval":
            self._values = {known: value for known, value in values.items() if known in self._exported}
        self._text(text.text, text.where, unsure)  # where a variable is not known it stands as written, and is unread again
        if name != "eval":
            self._values = values

    def _value(self, token: Token, file: str) -> list[Word]:
        """Of an assignment: the elements of an array, or one word."""
        if token.elements is not None:
            return [word for element in token.elements for word in self._fields(element, file)]
        whole = tuple(part._replace(quoted=True) for part in token.parts or ())
        plain = token.parts[0] if token.parts else None
        if plain and plain == Part("lit", "~", False):
            whole = (plain, *whole[1:])
        words = self._fields(Token(token.line, "", whole), file) or [Word("", f"{file}:{token.line}")]
        return [_joined(words, " ")]

    def _assign(self, token: Token, file: str, unsure: str) -> None:
        assert token.assigned is not None
        name, index, append = token.assigned[1], token.assigned[2], token.assigned[3]
        words, old = self._value(token, file), self._values.get(name, [])
        if index:
            self._set(name, [*old, *words], unsure or f"parts, at {file}:{token.line}")
        elif append and token.elements is not None:
            self._values[name] = [*old, *self._marked(name, words, unsure)]
        elif append:
            self._set(name, [_joined([*old[:1], *words], ""), *old[1:]], unsure)
        elif unsure and token.elements is None:
            self._set(name, [words[0]._replace(text=f"${name}")], unsure)
        else:
            self._set(name, [*old, *words] if unsure else words, unsure)

    def _set(self, name: str, words: list[Word], unsure: str) -> None:
        self._values[name] = self._marked(name, words, unsure)

    @staticmethod
    def _marked(name: str, words: list[Word], unsure: str) -> list[Word]:
        """`words`, unread where what sets them may not be run."""
        return (
            [word._replace(unread=word.unread or f"{name} is set in {unsure}") for word in words] if unsure else words
        )

    def _fields(self, token: Token, file: str) -> list[Word]:
        """The words that one word expands to: none, one or several."""
        where = f"{file}:{token.line}"
        found: list[Word] = []
        now: Word | None = None
        parts = list(token.parts or ())
        if token.assigned is not None and token.text.startswith(token.assigned[0]):
            parts.insert(0, Part("lit", token.assigned[0], False))
        if parts[:1] == [Part("lit", "~", False)] and "".join(part.text for part in parts[1:2]) in ("", "/"):
            parts[0] = Part("var", "HOME", True, "~")
        for part in parts:
            for piece in self._pieces(part, where):
                if piece is not None and now is not None:
                    now = now._replace(text=now.text + piece.text, unread=now.unread or piece.unread)
                elif piece is not None:
                    now = piece
                elif now is not None:
                    found.append(now)
                    now = None
        return found + ([now] if now is not None else [])

    def _pieces(self, part: Part, where: str) -> list[Word | None]:
        """What a piece of a word stands for; None is a gap between words."""
        if part.kind == "lit":
            return [Word(part.text, where)]
        found: list[Word | None] = []
        if part.kind in ("var", "all"):
            known = self._known(part.text, where)
            if known and part.operator and (why := known[0].unread):
                return [Word(part.raw, where, why)]
            empty, operator = known is None or (":" in part.operator and not known[0].text), part.operator[-1:]
            if operator and operator in "-=+" and empty != (operator == "+"):
                for one in part.default:
                    found += [None] if not one.quoted and one.text.isspace() else self._pieces(one, where)
                if operator == "=":
                    self._values[part.text] = [Word("".join(word.text if word else " " for word in found), where)]
                return found or ([Word("", where)] if part.quoted else [])
            if operator == "+":
                return [Word("", where)] if part.quoted else []
        for number, word in enumerate(self._words(part, where)):
            found += [None] if number else []
            if part.quoted or word.unread:
                found.append(word)
                continue
            pieces = [gap for piece in word.text.split() for gap in (None, word._replace(text=piece))][1:]
            ends = [[None] if end.isspace() else [] for end in (word.text[:1], word.text[-1:])]
            found += [*ends[0], *pieces, *ends[1]]
        return found

    def _words(self, part: Part, where: str) -> list[Word]:
        """The value of a variable or of a command, unread where only a shell knows."""
        if part.kind == "sub":
            folder = _FOLDER.fullmatch(" ".join(part.text.replace('"', "").split()))
            if folder:
                return [Word(os.path.normpath(f"{self._path.resolve().parent}{folder['rest'] or ''}"), where)]
            return [Word(part.raw, where, f"{part.raw} is not run")]
        if part.kind == "no":
            number = arithmetic(part.raw, lambda name: next((w.text for w in self._known(name, where) or () if not w.unread), ""))
            return [Word(number or part.raw, where, "" if number else f"{part.raw} is known to a shell alone")]
        known = self._known(part.text, where)
        if known is None and part.kind == "all" and self._lost and part.text != ARCHITECTURE:
            return [Word(part.raw, where, f"{part.raw} may be set in {self._lost[0]}, which is not read")]
        if known is None and part.text in ("@", "*"):
            if self._unsure.startswith("the function"):
                return [Word(part.raw, where, f"{part.raw} are what {self._unsure} is given")]
            return []  # the script is given no arguments
        if known is None and part.kind == "all":
            self.script.notes.append(f"{where}: {part.raw} is set nowhere, and stands for nothing")
            return []
        if known is None:
            return [Word(part.raw, where, f"{part.raw} is set nowhere")]
        return known if part.kind == "all" else [known[0]._replace(where=where)]

    def _known(self, name: str, where: str) -> list[Word] | None:
        if name in self._values:
            return self._values[name] or None
        if name in ("0", "BASH_SOURCE"):
            return [Word(str(self._path), where)]
        given = self._environ.get(name)
        return None if given is None else [Word(given, where)]

    def _source(self, word: Word, unsure: str) -> None:
        """Read a sourced file: where the script says, or beside the script."""
        tail = Path(re.split(r"\$\w+|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`", word.text)[-1].lstrip("/"))
        folder = self._path.resolve().parent
        places = [] if word.unread else [Path(word.text)]
        places += [folder / tail, folder.parent / tail, folder / tail.name] if tail.name else []
        file = next((place for place in places if place.is_file()), None)
        if file is None or unsure:
            why = f"it stands in {unsure}" if unsure else "no such file, nor beside the script"
            self.script.notes.append(f"{word.where}: {word.text} is not read: {why}")
            self._lost.append(word.text)
        else:
            self.file(file)

    def _start(self, words: list[Word], program: int, prefix: dict[str, Word]) -> None:
        """The command that starts training. With `ray job submit` the job's environment is its own."""
        self.starts.append(words[program].where)
        script = self.script
        script.program, script.where = Path(words[program].text).name, words[program].where
        script.words = words[program + 1 :]
        texts = [word.text for word in words[:program]]
        at = next((i for i, text in enumerate(texts) if text.startswith("--runtime-env-json")), None)
        if texts[:1] != ["ray"] or at is None:
            known = {name: self._values[name][0] for name in self._exported if self._values.get(name)}
            script.environment = {} if texts[:1] == ["ray"] else known | prefix
            return
        given = words[at] if "=" in texts[at] else words[at + 1]
        text = given.text.partition("=")[2] if given is words[at] else given.text
        try:
            variables = parsed(json.loads, text).get("env_vars", {})
            script.environment = {
                str(name): Word(str(value), given.where, given.unread if "$" in str(value) else "")
                for name, value in variables.items()
            }
        except (ValueError, AttributeError) as error:
            problem = f"{given.where}: --runtime-env-json is no JSON object: {error}"
            raise SettingsError(problem, remedy="Correct it.") from None
