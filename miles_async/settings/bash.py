"""(pure) Bash source as tokens: words with their pieces, array assignments, operators. Nothing is expanded and nothing run.

Always true: the pieces of a word are in order, and each says whether it stood in quotes, on which splitting depends.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from miles_async.settings.errors import SettingsError

OPERATOR = re.compile(r"<<<|<<-?|&>>?|>>|>&|<&|\|\||&&|;;|[;&|()<>\n]")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
_BRACES = re.compile(
    r"(#(?!\}))?([A-Za-z_]\w*|[0-9]+|[@*#])(?:\[([@*]|[0-9]+)\])?(?:(:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:(?=[ \d]))|(?=\}))"
)
_DOCUMENT = re.compile(r"(?<!<)<<(-?)[ \t]*(['\"\\]?)(\w+)")
_BEFORE_SUM = ("for", "if", "elif", "while", "until", "then", "do", "else", "!", "{")
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class WordPart(NamedTuple):
    """A piece of a word. lit: `text` itself. var, all: the variable `text`, or every element of it; `default` and `operator` as in
    `${X:-default}`, `at` as in `${X[2]}`. size: the length of the variable, or the number of its elements. sub: the command
    `text`. sum: the arithmetic `text`. no: what is not read. `raw`: as written."""

    kind: Literal["lit", "var", "all", "size", "sub", "sum", "no"]
    text: str
    quoted: bool
    raw: str = ""
    operator: str = ""
    default: tuple[WordPart, ...] = ()
    at: str = ""


class Token(NamedTuple):
    """A word (`parts`), or an operator (`parts` is None). `text`: as written. Of a word that may be an assignment `assigned` is
    what stands before the value, and `parts` the value; of an array that is `elements`. Behind `<<` a word is the here-document."""

    line: int
    text: str
    parts: tuple[WordPart, ...] | None = None
    assigned: re.Match[str] | None = None
    elements: tuple[Token, ...] | None = None


class Lexer:
    """Text to tokens. SettingsError for a quote or a bracket that is not closed; `name` says in which file."""

    def __init__(self, text: str, name: str) -> None:
        self._s, self._i, self._name = text.replace("\r\n", "\n"), 0, name
        self._document = False  # of a here-document, where a quote is a character

    def tokens(self, end: str = "") -> list[Token]:
        """All up to the operator `end`, by default to the end."""
        found: list[Token] = []
        documents: list[tuple[int, bool]] = []  # that begin with the next line: where in `found`, and whether `<<-`
        while self._i < len(self._s):
            c = self._s[self._i]
            if c in " \t":
                self._i += 1
            elif self._s.startswith("\\\n", self._i):
                self._i += 2
            elif c == "#":
                self._i = self._find("\n")
            elif self._s.startswith("((", self._i) and self._begins(found) and (text := self._sum()) is not None:
                found.append(Token(self._line(), "((", (WordPart("sum", text, True),)))
            elif (operator := OPERATOR.match(self._s, self._i)) is None:
                found.append(self._word())
            else:
                number = ""
                if c in "<>" and found and found[-1].text.isdigit() and self._s[self._i - 1].isdigit():
                    number = found.pop().text  # the 2 of 2> is no word
                line, self._i = self._line(), operator.end()
                if operator[0] == end:
                    return found
                found.append(Token(line, number + operator[0]))
                if operator[0] in ("<<", "<<-"):
                    self._i += len(self._s[self._i :]) - len(self._s[self._i :].lstrip(" \t"))
                    found.append(self._word())
                    documents.append((len(found) - 1, operator[0] == "<<-"))
                while operator[0] == "\n" and documents:
                    at, tabs = documents.pop(0)
                    found[at] = found[at]._replace(parts=self._body(found[at], tabs))
        if end:
            raise self._unclosed(end)
        return found

    @staticmethod
    def _begins(found: list[Token]) -> bool:
        """Whether a command may begin behind `found`."""
        return not found or found[-1].parts is None or found[-1].text in _BEFORE_SUM

    def _sum(self) -> str | None:
        """What stands in `((` and `))`; None, and nothing passed, where that is not arithmetic."""
        start = self._i
        self._i += 1
        self._skip(")", sums=True)
        if self._s[self._i - 2 : self._i] == "))":
            return self._s[start + 2 : self._i - 2]
        self._i = start
        return None

    def _body(self, delimiter: Token, tabs: bool) -> tuple[WordPart, ...]:
        """The here-document that begins here, up to its end, which is passed."""
        end = re.sub(r"[\\'\"]", "", delimiter.text)
        lines: list[str] = []
        while self._i < len(self._s):
            stop = self._find("\n")
            line, self._i = self._s[self._i : stop], stop + 1
            line = line.lstrip("\t") if tabs else line
            if line == end:
                break
            lines.append(line + "\n")
        text = "".join(lines)
        if end != delimiter.text:
            return (WordPart("lit", text, True),)
        inner = Lexer(text, self._name)
        inner._document = True
        return tuple(inner._parts("", quoted=True))

    def _line(self) -> int:
        return self._s.count("\n", 0, self._i) + 1

    def _find(self, text: str) -> int:
        at = self._s.find(text, self._i)
        return len(self._s) if at < 0 else at

    def _unclosed(self, what: str) -> SettingsError:
        return SettingsError(f"{self._name} ends before {what!r}", remedy="Close the quote or bracket; it must be a bash script.")

    def _pass(self, at: int, what: str) -> None:
        """Go on behind what stands at `at`."""
        if not self._s.startswith(what, at):
            raise self._unclosed(what)
        self._i = at + len(what)

    def _word(self) -> Token:
        line, start = self._line(), self._i
        assigned = ASSIGNED.match(self._s, start)
        if assigned is not None:
            self._i = assigned.end()
            if self._s.startswith("(", self._i):
                self._i += 1
                elements = tuple(one for one in self.tokens(end=")") if one.parts is not None)
                return Token(line, self._s[start : self._i], (), assigned, elements)
        parts = self._parts(" \t\n;&|()<>", quoted=False)
        return Token(line, self._s[start : self._i], tuple(parts), assigned)

    def _parts(self, stops: str, *, quoted: bool) -> list[WordPart]:
        """Pieces up to a character of `stops`, which stays."""
        s, found = self._s, list[WordPart]()
        while self._i < len(s) and s[self._i] not in stops:
            c, then = s[self._i], s[self._i + 1 : self._i + 2]
            self._i += 1
            if c == "\\" and not (quoted and then not in ("$`\\\n" if self._document else '$`"\\\n')):
                self._i += 1
                if then != "\n":
                    found.append(WordPart("lit", then, True))
            elif c == "'" and not quoted:
                end = self._find("'")
                found.append(WordPart("lit", s[self._i : end], True))
                self._pass(end, "'")
            elif c == '"' and not self._document:
                found += self._parts('"', quoted=True) or [WordPart("lit", "", True)]
                self._pass(self._i, '"')
            elif c == "`":
                end = self._find("`")
                found.append(WordPart("sub", s[self._i : end], quoted, s[self._i - 1 : end + 1]))
                self._pass(end, "`")
            elif c == "$":
                found.append(self._dollar(quoted))
            else:
                found.append(WordPart("lit", c, quoted))
        return found

    def _dollar(self, quoted: bool) -> WordPart:
        s, start = self._s, self._i - 1
        then = s[self._i : self._i + 1]
        if name := NAME.match(s, self._i):
            self._i = name.end()
            return WordPart("var", name[0], quoted, s[start : self._i])
        if then == "(":
            self._i += 1
            self._skip(")", sums=s.startswith("(", self._i))
            raw = s[start : self._i]
            if raw.startswith("$((") and raw.endswith("))"):
                return WordPart("sum", raw[3:-2], quoted, raw)
            return WordPart("sub", raw[2:-1], quoted, raw)
        if then == "{":
            self._i += 1
            return self._braces(start, quoted)
        if then == "'" and not quoted:
            body = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(s, self._i)
            if body is None:
                raise self._unclosed("'")
            self._i = body.end()
            if all(escaped in _ANSI for escaped in re.findall(r"\\(.)", body[1], re.DOTALL)):
                return WordPart("lit", re.sub(r"\\(.)", lambda m: _ANSI[m[1]], body[1]), True)
            return WordPart("no", body[0], True, s[start : self._i])
        if then and then in "0123456789@*#?$!-":
            self._i += 1
            kind: Literal["var", "all", "no"] = "all" if then in "@*" else "no" if then in "?$!-" else "var"
            return WordPart(kind, then, quoted, s[start : self._i])
        return WordPart("lit", "" if then == '"' and not quoted else "$", quoted)

    def _braces(self, start: int, quoted: bool) -> WordPart:
        head = _BRACES.match(self._s, self._i)
        if head is None:
            self._skip("}")
            return WordPart("no", self._s[start : self._i], quoted, self._s[start : self._i])
        self._i = head.end()
        default = tuple(self._parts("}", quoted=quoted))
        self._pass(self._i, "}")
        size, name, index, operator = head.groups()
        kind: Literal["all", "var", "size"] = "size" if size else "all" if index in ("@", "*") or name in "@*" else "var"
        star = "*" if "*" in (index, name) else index or ""
        return WordPart(kind, name, quoted, self._s[start : self._i], operator or "", default, star)

    def _skip(self, close: str, *, sums: bool = False) -> None:
        """To behind the bracket or quote that closes what was opened. sums: it is arithmetic."""
        s = self._s
        while self._i < len(s):
            c = s[self._i]
            self._i += 1
            if c == close:
                return
            if close == ")" and not sums and c == "#" and s[self._i - 2] in " \t\n":
                self._i = self._find("\n")
            elif close == ")" and not sums and c == "<" and (document := _DOCUMENT.match(s, self._i - 1)):
                end = re.compile(rf"^{chr(9) + '*' if document[1] else ''}{re.escape(document[3])}$", re.MULTILINE).search(
                    s, self._find("\n")
                )
                self._i = end.end() if end else len(s)
            elif c == "\\":
                self._i += 1
            elif c == "'" and close != '"':
                self._pass(self._find("'"), "'")
            elif c == '"':
                self._skip('"')
            elif c == "(" and (close == ")" or s[self._i - 2] == "$"):
                self._skip(")", sums=sums)
            elif c == "{" and s[self._i - 2] == "$":
                self._skip("}")
        raise self._unclosed(close)
