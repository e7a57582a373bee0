"""Commands of bash that set variables, read and not run: assignments, `export`, `read`, `printf -v`, `unset`.

Always true: what is set to something that is not known is unread, and says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from miles_async.settings.bash import Token
from miles_async.settings.bash_pure import format_text
from miles_async.settings.bash_sums import UnknownNumber
from miles_async.settings.bash_words import Word, Words, joined, place

Status = bool | None
"""Whether a command succeeds; None where only a shell knows."""


class Assignments(Words):
    """Sets variables. `local`: what they were before each function that is being read."""

    def __init__(self, path: Path, arguments: tuple[str, ...], environ: Mapping[str, str]) -> None:
        super().__init__(path, arguments, environ)
        self.given: Word | None = None  # the standard input
        self.local: list[dict[str, list[Word] | None]] = []

    def declare(self, name: str, tokens: tuple[Token, ...], file: str) -> Status:
        for token in tokens:
            variable = token.assigned[1] if token.assigned else token.text
            if name == "local" and self.local and not variable.startswith("-"):
                self.local[-1].setdefault(variable, self.now.values.get(variable))
                if token.assigned is None:
                    self.put(variable, [Word("", place(file, token.line))])
            if token.assigned is not None:
                self.assign(token, file)
            if name == "export" or (name in ("declare", "typeset") and "-x" in [t.text for t in tokens]):
                self.now.exported[variable] = None
        return True

    def assign(self, token: Token, file: str) -> Status:
        assert token.assigned is not None
        name, index, append = token.assigned[1], token.assigned[2], token.assigned[3]
        words, old = self.value(token, file), self.now.values.get(name, [])
        array = token.elements is not None
        if any(element.assigned and element.text.startswith("[") for element in token.elements or ()) or index:
            self._element(name, index, words, old, place(file, token.line))
        elif append and array:
            self.put(name, [*old, *words], array=True)
        elif append:
            before = old[:1] or (self.known(name, words[0].where) or [])[:1]
            self.put(name, [joined([*before, *words], ""), *old[1:]], array=name in self.now.arrays)
        else:
            self.put(name, words, array=array)
            parts = token.parts or ()
            if not array and len(parts) == 1 and parts[0].kind in ("sub", "no") and words[0].text == parts[0].raw:
                self.put(name, [words[0]._replace(text=f"${name}")])  # for what is printed, and for JSON
        return None if any(part.kind == "sub" for part in token.parts or ()) else True

    def _element(self, name: str, index: str | None, words: list[Word], old: list[Word], where: str) -> None:
        """`NAME[1]=x`, where the elements before it are known."""
        try:
            at = self.number((index or "[]")[1:-1], where)
        except UnknownNumber:
            at = -1
        if index and 0 <= at <= len(old) and not any(word.unread for word in old[:at]):
            self.put(name, [*old[:at], *words, *old[at + 1 :]], array=True)
        else:
            why = f"{name} is set in parts, at {where}"
            self.put(name, [word._replace(unread=word.unread or why) for word in (*old, *words)], array=True)

    def read(self, rest: list[Word]) -> Status:
        """`read -ra NAME` and `read A B` from a text that is known."""
        options = [word.text for word in rest if word.text.startswith("-")]
        names = [word.text for word in rest if not word.text.startswith("-")]
        given, where = self.given, rest[0].where if rest else ""
        simple = all(re.fullmatch(r"-[ra]+", option) for option in options)
        array = any("a" in option for option in options)
        text = given.known if given is not None else None
        if text is not None and simple and names:
            cut = self.split(text.partition("\n")[0])
            if array:
                self.put(names[0], [Word(piece, where) for piece in cut], array=True)
                return True
            if len(cut) <= len(names):
                for name, piece in zip(names, [*cut, *[""] * len(names)], strict=False):
                    self.put(name, [Word(piece, where)])
                return bool(text)
        why = (given.unread if given is not None and given.unread else "") or f"`read` at {where} is not run"
        for name in names:
            self.put(name, [Word(f"${name}", where, why)], array=array)
        return None

    def into(self, name: str, rest: list[Word], where: str) -> Status:
        """`printf -v NAME FORMAT ...` and `mapfile NAME`."""
        texts = [word.known for word in rest]
        if name == "printf" and len(texts) > 2 and None not in texts:
            try:
                text = format_text([text or "" for text in texts[2:]])
            except (ValueError, IndexError):
                pass
            else:
                self.put(rest[1].text, [Word(text, where)])
                return True
        for word in rest:
            if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                self.put(word.text, [Word(f"${word.text}", where, f"`{name}` at {where} is not run")], array=name != "printf")
        return None

    def unset(self, names: list[str]) -> Status:
        for name in names:
            self.now.values.pop(name, None)
            self.now.exported.pop(name, None)
            self.now.unset.add(name)
        return True
