"""Variables of a script of bash, and what its words become of them: expansion as a shell does it, as far as that can be known.

Always true: a word that is not known says why, and nothing of its text is taken for known.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from miles_async.settings.bash import Token, WordPart
from miles_async.settings.bash_pure import LONGEST
from miles_async.settings.bash_sums import UnknownNumber, arithmetic
from miles_async.settings.errors import SettingsError

ARCHITECTURE = "MODEL_ARGS"  # what a model file of Miles sets; config.json says the same
_OF_THE_SHELL = (
    "RANDOM",
    "SECONDS",
    "HOSTNAME",
    "UID",
    "EUID",
    "BASHPID",
    "LINENO",
    "PIPESTATUS",
    "PPID",
    "EPOCHSECONDS",
)
_NAME_IN_SUM = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*|\d)")
_BRACE = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")


class Word(NamedTuple):
    """A word of a command, and where it stands. `unread`: why it is not known without a shell; `text` is then as written. `empty`:
    of such a word, what it is if all that is set nowhere is empty, as in a shell; None where that is not the reason."""

    text: str
    where: str
    unread: str = ""
    empty: str | None = None

    @property
    def known(self) -> str | None:
        """What a shell would have; None where that is not known."""
        return self.empty if self.unread else self.text


def place(file: str, line: int) -> str:
    """A place in a file; what is read out of a word stands where the word does."""
    return file if ":" in file else f"{file}:{line}"


def joined(words: list[Word], between: str) -> Word:
    known = [word.known for word in words]
    text = between.join(word.text for word in words)
    unread = next((word.unread for word in words if word.unread), "")
    empty = between.join(one or "" for one in known) if unread and None not in known else None
    return Word(text, words[-1].where, unread, empty)


@dataclass(slots=True)
class Variables:
    """What a shell has set at one place of a script."""

    values: dict[str, list[Word]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    exported: dict[str, None] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    folder: str = ""
    lost: tuple[str, ...] = ()
    """Sourced files that were not read, which may have set anything."""

    def copy(self) -> Variables:
        return copy.copy(self)._own()

    def _own(self) -> Variables:
        self.values, self.arrays, self.exported, self.unset = (
            dict(self.values), set(self.arrays), dict(self.exported), set(self.unset)
        )  # fmt: skip
        return self

    def same(self, name: str, other: Variables) -> bool:
        return [(w.text, w.unread) for w in self.values.get(name, ())] == [
            (w.text, w.unread) for w in other.values.get(name, ())
        ] and (name in self.values) == (name in other.values)


def merged(outcomes: list[Variables], why: str) -> tuple[Variables, list[str]]:
    """What holds after one of `outcomes`, and nobody knows which: unread is what differs. Also the names of that."""
    first, *others = outcomes
    now, differ = first.copy(), list[str]()
    for name in dict.fromkeys(name for one in outcomes for name in one.values):
        if all(first.same(name, one) for one in others):
            continue
        differ.append(name)
        lists = [one.values.get(name, []) for one in outcomes]
        reason = f"{name} is set in {why}"
        if name not in {array for one in outcomes for array in one.arrays}:
            last = next(words[-1] for words in reversed(lists) if words)
            now.values[name] = [Word(f"${name}", last.where, reason)]
            continue
        same = 0
        while all(len(words) > same and words[same][:3] == lists[0][same][:3] for words in lists):
            same += 1
        rest = [word._replace(unread=word.unread or reason, empty=None) for words in lists for word in words[same:]]
        now.values[name] = [*lists[0][:same], *rest]
        now.arrays.add(name)
    for one in others:
        now.exported |= one.exported
        now.lost = tuple(dict.fromkeys((*now.lost, *one.lost)))
        now.folder = now.folder if now.folder == one.folder else ""
        now.unset &= one.unset
    return now, differ


class Words:
    """Expands words. `substituted` is the subclass's: what a command in `$(...)` prints."""

    def __init__(self, path: Path, arguments: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self.path, self.environ, self.now = path, environ, Variables(folder=os.getcwd())
        self.notes: list[str] = []
        self.arguments = [Word(text, path.name) for text in arguments]
        self.sourced = [str(path)]  # the files that are being read

    def substituted(self, part: WordPart, where: str) -> Word:
        raise NotImplementedError

    # -- variables ---------------------------------------------------------------------------------------------------

    def put(self, name: str, words: list[Word], *, array: bool = False) -> None:
        if sum(len(word.text) for word in words) > LONGEST:
            raise SettingsError(f"{self.path}: {name} grows past {LONGEST} characters", remedy="Give a launch script.")
        self.now.values[name] = words
        self.now.unset.discard(name)
        (self.now.arrays.add if array else self.now.arrays.discard)(name)

    def known(self, name: str, where: str) -> list[Word] | None:
        """The value of a variable: one word, or the elements of an array. None where it is set nowhere."""
        if name in self.now.values:
            return self.now.values[name]
        if name in self.now.unset:
            return None
        if name in ("0", "BASH_SOURCE"):
            return [Word(self.sourced[-1] if name != "0" else str(self.path), where)]
        if name.isdigit():
            at = int(name) - 1
            return [self.arguments[at]] if at < len(self.arguments) else None
        if name in "@*":
            return self.arguments
        if name == "#":
            return [Word(str(len(self.arguments)), where)]
        if name == "PWD":
            return [Word(self.now.folder, where, "" if self.now.folder else "the folder is known to a shell alone")]
        if name in _OF_THE_SHELL:
            return [Word(f"${name}", where, f"${name} is known to a shell alone")]
        given = self.environ.get(name)
        return None if given is None else [Word(given, where)]

    def number(self, text: str, where: str) -> int:
        """The value of an arithmetic expression. Raises Unknown."""

        def get(name: str) -> str:
            words = self.known(name, where)
            if not words or not (text := words[0].known):
                raise UnknownNumber(name)
            return text

        def put(name: str, number: int) -> None:
            self.put(name, [Word(str(number), where)])

        text = _NAME_IN_SUM.sub(lambda found: f"({get(found[1] or found[2])})", text.replace('"', ""))
        return arithmetic(text, get, put)

    def split(self, text: str) -> list[str]:
        """A text cut as a shell cuts what is not in quotes."""
        set_to = self.now.values.get("IFS")
        between = set_to[0].known if set_to else None
        spaces, others = (re.escape("".join(c for c in between or " " if c.isspace() == wanted)) for wanted in (True, False))
        if not others:
            return text.split()
        text = text.strip(" \t\n") if spaces else text.removesuffix("\n")
        cut = re.split(rf"[{spaces}]*[{others}][{spaces}]*|[{spaces}]+" if spaces else f"[{others}]", text)
        return cut[:-1] if not cut[-1] else cut

    # -- words -------------------------------------------------------------------------------------------------------

    def value(self, token: Token, file: str) -> list[Word]:
        """Of an assignment: the elements of an array, or one word."""
        if token.elements is not None:
            return [word for element in token.elements for word in self.fields(element, file)]
        return [self.whole(token, file)]

    def whole(self, token: Token, file: str) -> Word:
        """A word that is not cut, as a value or behind `<<<`."""
        whole = tuple(part._replace(quoted=True) for part in token.parts or ())
        plain = token.parts[0] if token.parts else None
        if plain and plain == WordPart("lit", "~", False):
            whole = (plain, *whole[1:])
        return joined(self.fields(Token(token.line, "", whole), file) or [Word("", place(file, token.line))], " ")

    def fields(self, token: Token, file: str) -> list[Word]:
        """The words that one word expands to: none, one or several."""
        where = place(file, token.line)
        found: list[Word] = []
        now: Word | None = None
        parts = list(token.parts or ())
        if token.assigned is not None and token.text.startswith(token.assigned[0]):
            parts.insert(0, WordPart("lit", token.assigned[0], False))
        if parts[:1] == [WordPart("lit", "~", False)] and "".join(part.text for part in parts[1:2]) in ("", "/"):
            parts[0] = WordPart("var", "HOME", True, "~")
        for part in parts:
            for piece in self._pieces(part, where):
                if piece is not None and now is not None:
                    now = joined([now, piece], "")._replace(where=now.where)
                elif piece is not None:
                    now = piece
                elif now is not None:
                    found.append(now)
                    now = None
        found += [now] if now is not None else []
        bare = "".join(part.text if part.kind == "lit" and not part.quoted else "\0" for part in parts)
        if found and "{" in bare and _BRACE.search(bare):
            return [Word(token.text, where, f"{token.text} is known to a shell alone")]
        return found

    def _pieces(self, part: WordPart, where: str) -> list[Word | None]:
        """What a piece of a word stands for; None is a gap between words."""
        if part.kind == "lit":
            return [Word(part.text, where)]
        found: list[Word | None] = []
        operator = part.operator[-1:]
        if part.kind in ("var", "all") and operator and operator in "-=+?":
            known = self._indexed(part, where)
            if known and known[0].known is None:
                return [Word(part.raw, where, known[0].unread)]
            empty = not known or (":" in part.operator and not "".join(word.known or "" for word in known))
            if operator in "-=+" and empty != (operator == "+"):
                for one in part.default:
                    found += [None] if not one.quoted and one.text.isspace() else self._pieces(one, where)
                if operator == "=":
                    self.put(part.text, [joined([word or Word(" ", where) for word in found] or [Word("", where)], "")])
                return found or ([Word("", where)] if part.quoted else [])
            if operator == "+":
                return [Word("", where)] if part.quoted else []
        for number, word in enumerate(self._words(part, where)):
            found += [None] if number else []
            if part.quoted or word.unread:
                found.append(word)
                continue
            pieces = [gap for piece in self.split(word.text) for gap in (None, word._replace(text=piece))][1:]
            ends = [[None] if end.isspace() else [] for end in (word.text[:1], word.text[-1:])]
            found += [*ends[0], *pieces, *ends[1]]
        return found

    def _indexed(self, part: WordPart, where: str) -> list[Word] | None:
        """The value of the variable of `part`, or the element that it names; None where that is not set."""
        known = self.known(part.text, where)
        if known is None or part.kind != "var" or not part.at:
            return known
        at = int(part.at)
        if why := next((word.unread for word in known[: at + 1] if word.unread), ""):
            return [Word(part.raw, where, why)]
        return known[at : at + 1] or None

    def _words(self, part: WordPart, where: str) -> list[Word]:
        """The value of a variable or of a command, unread where only a shell knows."""
        if part.kind == "sub":
            return [self.substituted(part, where)]
        if part.kind == "sum":
            try:
                return [Word(str(self.number(part.text, where)), where)]
            except UnknownNumber:
                return [Word(part.raw, where, self._of_sum(part, where))]
        if part.kind == "no":
            return [Word(part.raw, where, f"{part.raw} is known to a shell alone")]
        known = self._indexed(part, where)
        if part.kind == "size":
            return [self._size(part, known, where)]
        if known is None and part.kind == "all":
            if self.now.lost and part.text != ARCHITECTURE:
                return [Word(part.raw, where, f"{part.raw} may be set in {self.now.lost[0]}, which is not read")]
            if part.text != ARCHITECTURE or not any(ARCHITECTURE in note for note in self.notes):
                self.notes.append(f"{where}: {part.raw} is set nowhere, and stands for nothing")
            return []
        if not known and part.kind != "all":
            return [Word(part.raw, where, f"{part.raw} is set nowhere", None if self.now.lost else "")]
        assert known is not None
        words = known if part.kind == "all" else [known[0]._replace(where=where)]
        if part.operator and part.operator[-1] not in "-=+?":
            words = [self._cut(part, word, where) for word in words]
        if (part.kind == "all" and part.at == "*" and part.quoted) or (part.text == "*" and part.quoted):
            set_to = self.now.values.get("IFS")
            return [joined(words, (set_to[0].known or "")[:1] if set_to else " ")] if words else [Word("", where)]
        return words

    def _of_sum(self, part: WordPart, where: str) -> str:
        """Why the number is not known: the reason of the first variable in it that is not, if one is to blame."""
        for name in re.findall(r"[A-Za-z_]\w*", part.text):
            words = self.known(name, where)
            if words and words[0].unread:
                return words[0].unread
        return f"{part.raw} is known to a shell alone"

    def _size(self, part: WordPart, known: list[Word] | None, where: str) -> Word:
        words = known or []
        if any(word.unread for word in words) or (known is None and self.now.lost):
            return Word(part.raw, where, f"{part.raw} is known to a shell alone")
        return Word(str(len(words) if part.at or part.text in "@*" else len(words[0].text) if words else 0), where)

    def _cut(self, part: WordPart, word: Word, where: str) -> Word:
        """`${X%pattern}`, `${X//a/b}`, `${X,,}` and `${X:1:2}`."""
        text, sign = word.known, part.operator
        inner = [piece for one in part.default for piece in self._pieces(one, where)]
        if text is None or any(piece is None or piece.known is None for piece in inner):
            return Word(part.raw, where, word.unread or f"{part.raw} is known to a shell alone")
        rest = "".join(piece.known or "" for piece in inner if piece is not None)
        cut: str | None = None
        if sign in ("^", "^^", ",", ",,") and not rest:
            turn = str.upper if sign[0] == "^" else str.lower
            cut = turn(text) if len(sign) == 2 else turn(text[:1]) + text[1:]
        elif sign in ("#", "##", "%", "%%"):
            cut = _without(text, rest, sign)
        elif sign in ("/", "//") and rest[:1] not in "#%":
            old, _, new = rest.partition("/")
            plain = not re.search(r"[*?\[\\]", old) and "&" not in new and old
            cut = text.replace(old, new, -1 if sign == "//" else 1) if plain else None
        elif sign == ":":
            match = re.fullmatch(r" *(-?\d+)(?::(\d+))?", rest)
            if match:
                start = int(match[1]) if int(match[1]) >= 0 else max(0, len(text) + int(match[1]))
                cut = text[start:][: int(match[2])] if match[2] else text[start:]
        return Word(part.raw, where, f"{part.raw} is known to a shell alone") if cut is None else Word(cut, where)


def _without(text: str, pattern: str, sign: str) -> str | None:
    """`text` without the shortest, or longest, beginning or end that `pattern` matches."""
    if "\\" in pattern or "[" in pattern or len(text) > 4096:
        return None
    lengths = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for length in lengths:
        if sign[0] == "#" and fnmatchcase(text[:length], pattern):
            return text[length:]
        if sign[0] == "%" and fnmatchcase(text[len(text) - length :], pattern):
            return text[: len(text) - length]
    return text
